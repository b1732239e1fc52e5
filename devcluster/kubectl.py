"""The real kubectl: this environment's pinned wheel, else the one on the PATH."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from devcluster import pki
from devcluster.process import ProcessFailed


def path() -> str:
    """Where kubectl is. Raises FileNotFoundError."""
    local = Path(sys.executable).parent / "kubectl"
    found = str(local) if local.exists() else shutil.which("kubectl")
    if not found:
        raise FileNotFoundError("no kubectl: run `make setup`, or install it")
    return found


async def run(
    kubeconfig: Path,
    *args: str,
    stdin: str | None = None,
    check: bool = True,
    cache: Path | None = None,
    context: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it. Raises ProcessFailed with kubectl's own words if it fails and `check` is set.

    `cache` is where it remembers what the server has; a server whose port another may get later
    must have a cache of its own.
    """
    chosen = [f"--context={context}"] if context else []
    command = [path(), f"--kubeconfig={kubeconfig}", *chosen, *args]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **({"KUBECACHEDIR": str(cache)} if cache else {})},
    )
    out, err = await child.communicate(stdin.encode() if stdin is not None else None)
    result = subprocess.CompletedProcess(command, child.returncode or 0, out.decode(), err.decode())
    if check and result.returncode:
        raise ProcessFailed(f"kubectl {' '.join(args)}: {result.stderr.strip()}")
    return result


async def account_kubeconfig(
    admin: Path,
    namespace: str,
    account: str,
    *,
    folder: Path,
    life: str = "1h",
    context: str | None = None,
) -> Path:
    """A kubeconfig with a fresh token of that ServiceAccount, readable by its owner only."""
    asked = ("create", "token", account, "-n", namespace, f"--duration={life}")
    token = await run(admin, *asked, context=context)
    view = ("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    shown = await run(admin, *view, context=context)
    document: dict[str, Any] = json.loads(shown.stdout)
    document["users"] = [
        {"name": document["users"][0]["name"], "user": {"token": token.stdout.strip()}}
    ]
    document["contexts"][0]["context"]["namespace"] = namespace
    target = folder / f"{namespace}-{account}-{os.urandom(4).hex()}.kubeconfig"
    return pki.write_private(target, json.dumps(document).encode())
