"""Run the real `llmkube` command as a process, the way a user does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

COMMAND = (sys.executable, "-c", "from llmkube.cli.main import main; main()")
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


def environment(kubeconfig: Path | None, **more: str) -> dict[str, str]:
    """What a command sees of ours: no proxies, no other cluster."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if kubeconfig is not None:
        env["KUBECONFIG"] = str(kubeconfig)
    return env | more


async def run_llmkube(
    *args: str,
    kubeconfig: Path | None = None,
    cwd: Path | None = None,
    seconds: float = 90,
    **env: str,
) -> Ran:
    """Run it to its end."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *args,
        cwd=cwd,
        env=environment(kubeconfig, **env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(f"{args} did not end: {out!r} {err!r}") from None
    return Ran(process.returncode or 0, out.decode(), err.decode())


@dataclass(slots=True)
class Running:
    """A command that runs until it is stopped; its output goes to a file."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    async def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and wait for the end."""
        if self.process.returncode is None:
            self.process.send_signal(how)
            try:
                async with asyncio.timeout(seconds):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
                raise AssertionError(f"did not stop: {self.text}") from None
        assert self.process.returncode is not None
        return self.process.returncode


def _heed_interrupts() -> None:
    """Who runs the tests in the background has SIGINT ignored, and so would the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def running_llmkube(
    args: Sequence[str], *, log: Path, kubeconfig: Path | None = None, **env: str
) -> AsyncIterator[Running]:
    """Run it while the block lasts; killed at the end if it has not been stopped."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *args,
            env=environment(kubeconfig, **env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_heed_interrupts,
        )
    try:
        yield Running(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
