"""A child process in a group of its own, with its output in a file, stopped within a bound.

It belongs to no event loop: the control plane that a test session shares is started on one loop
and disturbed from many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from devcluster import reaper

_POLL = 0.01  # seconds; a Popen offers no awaitable that is independent of the loop


class ProcessFailed(RuntimeError):
    """A program failed or ended too early; the message ends with its last output."""


class Process:
    """One running program. Create with `start`."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._child = child

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start `argv` with standard output and error appended to `log`."""
        with log.open("ab") as output:
            child = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        reaper.watch_group(child.pid)
        return cls(name, child, log)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        return self._child.poll()

    def check_alive(self) -> None:
        """Raise ProcessFailed if it has ended."""
        if (code := self.returncode) is not None:
            raise ProcessFailed(f"{self.name} ended with code {code}:\n{self.tail()}")

    def output(self) -> str:
        """Everything it has printed."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 20) -> str:
        """The last lines of its output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        while (code := self._child.poll()) is None:
            await asyncio.sleep(_POLL)
        reaper.forget_group(self._child.pid)
        return code

    async def stop(self, grace: timedelta = timedelta(seconds=10)) -> int:
        """SIGTERM, then SIGKILL once `grace` is over. Returns the exit code."""
        self.signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace.total_seconds()):
                await self.wait()
        self.signal(signal.SIGKILL)  # itself, or whatever it left in its group
        return await self.wait()

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.signal(signal.SIGKILL)
        await self.wait()
