"""The real controller as a child process, the way a Deployment runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from devcluster.process import Process
from tests.support.wait import eventually


class ControllerProcess:
    """A running `llmkube controller`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def records(self) -> list[dict[str, Any]]:
        """Its log so far; raises ValueError for a line that is no JSON object."""
        return [json.loads(line) for line in self.process.output().splitlines()]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log records of that event."""
        return [record for record in self.records() if record["event"] == event]

    def _port(self, what: str) -> int | None:
        self.process.check_alive()
        found = re.search(rf'"{what}": ?(\d+)', self.process.output())
        return int(found[1]) if found else None

    async def get(self, what: str, path: str) -> tuple[int, str]:
        """(status, body) of `path` at its "metrics" or its "health" port."""
        port = await eventually(lambda: self._port(f"{what}_port"), f"the {what} port is known")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def ready(self) -> None:
        """Wait until /readyz says ok."""

        async def is_ready() -> bool:
            self.process.check_alive()
            return (await self.get("health", "/readyz"))[0] == 200

        await eventually(is_ready, "the controller is ready")


@asynccontextmanager
async def running_controller(
    kubeconfig: Path,
    *args: str,
    tuning: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    argv: Sequence[str] = (sys.executable, "-m", "llmkube", "controller"),
) -> AsyncIterator[ControllerProcess]:
    """Run the controller with `tuning` as its --config while the block runs, ready."""
    with tempfile.TemporaryDirectory(prefix="llmkube-controller-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(tuning or {}))
        command = [
            *argv,
            f"--kubeconfig={kubeconfig}",
            f"--config={config}",
            "--metrics-bind-address=127.0.0.1:0",
            "--health-probe-bind-address=127.0.0.1:0",
            *args,
        ]
        process = Process.start(
            "controller",
            command,
            log=Path(folder) / "log",
            env={**os.environ, **(env or {})},
        )
        running = ControllerProcess(process)
        try:
            await running.ready()
            yield running
        finally:
            await asyncio.shield(process.stop())
