"""Credentials from an exec plugin (`client.authentication.k8s.io`), as cloud kubeconfigs use.

kubernetes_asyncio reads the plugin's section; this module runs it, because the library neither
bounds a plugin in time nor drains what it says on stderr, and insists on a usable answer: a plugin
that fails must never end in anonymous requests. The caller decides when to run it again: before
`expires_at`, and after a 401.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmkube.api.times import parse_time
from llmkube.kube.credentials import ClientCertificate, Credential
from llmkube.kube.errors import ConfigError
from llmkube.kube.library import ConfigException, ConfigNode, ExecProvider

EXEC_TIMEOUT = timedelta(seconds=60)
"""A plugin may open a browser for a log-in, but must not hold up the program for ever."""


async def run_exec_plugin(
    plugin: Mapping[str, Any], folder: Path, complain: Callable[[str], ConfigError]
) -> Credential:
    """Run the plugin and read its ExecCredential.

    `folder` is the kubeconfig's, `complain` makes a ConfigError with the user's name in it.
    """
    command = str(plugin.get("command") or "")
    if not command or not plugin.get("apiVersion"):
        raise complain("exec needs command and apiVersion")
    resolved = {**plugin, "command": _resolve(command, folder)}
    try:
        provider = ExecProvider(ConfigNode("exec", resolved))
        async with asyncio.timeout(EXEC_TIMEOUT.total_seconds()):
            output = await _run(provider)
    except FileNotFoundError as error:
        hint = str(plugin.get("installHint") or "install it or correct the path").strip()
        raise complain(f"exec plugin {command!r} was not found: {hint}") from error
    except TimeoutError as error:
        raise complain(
            f"exec plugin {command!r} did not end within {EXEC_TIMEOUT.total_seconds():g} s"
        ) from error
    except (ConfigException, OSError, TypeError, KeyError) as error:
        raise complain(
            f"exec plugin {command!r} failed; run it by hand to see why ({str(error)[:300]})"
        ) from error
    return _read(_status(output, str(plugin["apiVersion"])), command, complain)


async def _run(provider: ExecProvider) -> bytes:
    """Run the plugin and return its stdout. Raises OSError; kills it when cancelled."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    request = {
        "apiVersion": provider.api_version,
        "kind": "ExecCredential",
        "spec": {"interactive": interactive},
    }
    process = await asyncio.create_subprocess_exec(
        *provider.args,
        env={**provider.env, "KUBERNETES_EXEC_INFO": json.dumps(request)},
        stdin=None if interactive else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, complaint = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        said = " ".join(complaint.decode("utf-8", "replace").split())
        raise OSError(f"exit code {process.returncode}: {said}")
    return output


def _status(output: bytes, api_version: str) -> Any:
    """The status of the ExecCredential that the plugin printed; None if it is none."""
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.get("apiVersion") != api_version:
        return None
    return answer.get("status")


def _resolve(command: str, folder: Path) -> str:
    """A command with a slash is relative to the kubeconfig, a bare one is looked up in PATH."""
    return str(folder / command) if "/" in command else command


def _read(status: Any, command: str, complain: Callable[[str], ConfigError]) -> Credential:
    if not isinstance(status, dict):
        status = {}
    token, chain, key = (
        value if isinstance(value := status.get(name), str) and value.strip() else None
        for name in ("token", "clientCertificateData", "clientKeyData")
    )
    if bool(chain) != bool(key):
        raise complain(
            f"exec plugin {command!r} returned a certificate without key, or a key alone"
        )
    if not token and not chain:
        raise complain(f"exec plugin {command!r} returned neither a token nor a certificate")
    return Credential(
        authorization=f"Bearer {token.strip()}" if token else None,
        certificate=ClientCertificate(chain.encode(), key.encode()) if chain and key else None,
        expires_at=parse_time(str(status.get("expirationTimestamp") or "")),
    )
