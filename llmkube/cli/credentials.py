"""A credential for a machine outside the cluster: what it holds and where it is written.

Macs and edge clusters get the same thing: a kubeconfig with the API server's URL, its certificate
authority and a token of their own ServiceAccount. It is a file with mode 0600, written whole or
not at all, and it never skips TLS verification. Neighbours: `metal_credentials` and
`fleet_registration` make the accounts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer
import yaml

from llmkube.api.times import format_time
from llmkube.cli.errors import CliError, ExitCode
from llmkube.cli.output import human_duration
from llmkube.cli.ownership import Change, find
from llmkube.cli.values import parse_server, parse_ttl
from llmkube.kube.resources import CONFIGMAPS

if TYPE_CHECKING:
    from llmkube.kube.client import IssuedToken, KubeClient

DEFAULT_TTL = timedelta(days=30)
SERVER_ANNOTATION = "llmkube.dev/token-server"
TTL_ANNOTATION = "llmkube.dev/token-ttl"
AUTHORITY_ANNOTATION = "llmkube.dev/token-certificate-authority"
"""On the owner: the token options that were given last, for the next run without them."""
STDOUT = "-"


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """What the user asked for; None: as before, or the default."""

    ttl: timedelta | None = None
    server: str | None = None
    certificate_authority: str | None = None
    """PEM."""

    def annotations(self, before: Mapping[str, Any]) -> dict[str, str]:
        """What to remember on the owner, which carries `before`; complete, for an apply."""
        kept = before.get("metadata", {}).get("annotations") or {}
        given = {
            SERVER_ANNOTATION: self.server,
            TTL_ANNOTATION: None if self.ttl is None else f"{int(self.ttl.total_seconds())}s",
            AUTHORITY_ANNOTATION: self.certificate_authority,
        }
        merged = {name: kept.get(name) if value is None else value for name, value in given.items()}
        return {name: value for name, value in merged.items() if value}


@dataclass(frozen=True, slots=True)
class Credentials:
    """A kubeconfig in the making. Its token never shows in a repr, a log or a message."""

    server: str
    ca_pem: bytes
    namespace: str
    user: str
    token: IssuedToken = field(repr=False)
    asked_ttl: timedelta
    changes: tuple[Change, ...] = ()

    @property
    def expires_at(self) -> datetime:
        """The server's own word, which may be sooner than what was asked for."""
        return self.token.expires_at


async def issue(
    client: KubeClient,
    owner: Mapping[str, Any],
    account: str,
    namespace: str,
    changes: tuple[Change, ...],
) -> Credentials:
    """A new token of the account, with all that a kubeconfig needs. Raises CliError, ApiError."""
    remembered = owner["metadata"].get("annotations") or {}
    ca_pem = await _authority(client, remembered.get(AUTHORITY_ANNOTATION), namespace)
    ttl, server = _settings(remembered, client.access.server)
    token = await client.request_token(account, namespace, ttl=ttl)
    return Credentials(server, ca_pem, namespace, account, token, ttl, changes)


def _settings(remembered: Mapping[str, str], own_server: str) -> tuple[timedelta, str]:
    """Life and server: what is remembered, else the defaults. Raises CliError."""
    try:
        life = remembered.get(TTL_ANNOTATION)
        ttl = parse_ttl(life) if life is not None else DEFAULT_TTL
        return ttl, parse_server(remembered.get(SERVER_ANNOTATION) or own_server)
    except typer.BadParameter as error:
        raise CliError(f"{error.message}; give it with --ttl or --server", ExitCode.USAGE) from None


async def _authority(client: KubeClient, given: str | None, namespace: str) -> bytes:
    """The bundle given, our own kubeconfig's, or the one that every namespace publishes."""
    if given:
        return given.encode()
    if client.access.ca_pem:
        return client.access.ca_pem
    published = await find(client, CONFIGMAPS, "kube-root-ca.crt", namespace)
    pem = ((published or {}).get("data") or {}).get("ca.crt")
    if not pem:
        raise CliError(
            "the API server's certificate authority is neither in your kubeconfig nor in the "
            f"ConfigMap kube-root-ca.crt of namespace {namespace}; give it with "
            "--certificate-authority FILE"
        )
    return str(pem).encode()


def read_authority(path: Path | None) -> str | None:
    """The text of a CA bundle. Raises CliError."""
    if path is None:
        return None
    text = path.read_bytes().decode("utf-8", "replace")
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
        raise CliError(f"{path} is no PEM bundle of CA certificates", ExitCode.USAGE)
    return text


def choose_path(given: str | None, name: str, user: str, *, overwrite: bool) -> Path | None:
    """Where the kubeconfig goes, checked before anything is created; None means stdout.

    Raises CliError where writing would fail or destroy a file that is not this credential.
    """
    if given == STDOUT:
        return None
    path = Path(given or f"{name}.kubeconfig").expanduser()
    if not path.absolute().parent.is_dir() or (path.exists() and not path.is_file()):
        raise CliError(
            f"{path} cannot be written: it is no regular file, or its folder does not exist; "
            "give another -o FILE, or '-' for stdout",
            ExitCode.USAGE,
        )
    if path.exists() and not overwrite and not _holds_only(path, user):
        raise CliError(
            f"{path} exists and is something else than the credential of {user}; give another "
            "-o FILE, or --overwrite",
            ExitCode.TAKEN,
        )
    return path


def _holds_only(path: Path, user: str) -> bool:
    try:
        content = yaml.safe_load(path.read_bytes()[:1_000_000])
        return [entry["name"] for entry in content["users"]] == [user]
    except (yaml.YAMLError, TypeError, KeyError, RecursionError, ValueError):
        return False


def write(credentials: Credentials, path: Path | None) -> None:
    """Write the kubeconfig to the file, or to stdout where that was asked for."""
    from llmkube.kube.kubeconfig import render_kubeconfig, write_kubeconfig

    put = render_kubeconfig if path is None else partial(write_kubeconfig, path)
    text = put(
        server=credentials.server,
        ca_pem=credentials.ca_pem,
        namespace=credentials.namespace,
        user=credentials.user,
        token=credentials.token.token,
    )
    if text is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def summary(credentials: Credentials, path: Path | None, advice: str, now: datetime) -> str:
    """What the user is told; never the token."""
    lines = [str(change) for change in credentials.changes]
    where = "stdout" if path is None else f"{path} (mode 0600)"
    lines.append(f"Wrote a credential for {credentials.server} to {where}.")
    lines.append(
        f"Its token expires at {format_time(credentials.expires_at)}; it renews itself at half "
        "its life while the program runs."
    )
    if credentials.expires_at - now < credentials.asked_ttl * 0.95:
        lines.append(
            f"The API server shortened it: {human_duration(credentials.asked_ttl)} were asked for."
        )
    if is_loopback(credentials.server):
        lines.append("Warning: no other machine reaches this address; run again with --server URL.")
    return "\n".join([*lines, advice])


def is_loopback(server: str) -> bool:
    """True if no other machine can reach this URL."""
    host = urlsplit(server).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
