"""A controller under measurement: any command that reconciles our kinds, as a process.

Peers are driven and measured exactly as we are: started with a kubeconfig, watched from outside,
and asked nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from devcluster.process import Process


@dataclass(frozen=True, slots=True)
class Subject:
    """What to start. `{kubeconfig}` in `argv` is replaced by the path of an admin's."""

    name: str
    argv: Sequence[str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds used so far, and resident bytes now."""

    cpu: float
    rss: int


class Running:
    """A started subject."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._psutil = psutil.Process(process.pid)

    def usage(self) -> Usage:
        """CPU and memory of the process and its children. Raises ProcessFailed if it ended."""
        self._process.check_alive()
        family = [self._psutil, *self._psutil.children(recursive=True)]
        times = [one.cpu_times() for one in family]
        cpu = sum(time.user + time.system for time in times)
        return Usage(cpu, sum(one.memory_info().rss for one in family))


@asynccontextmanager
async def running(subject: Subject, kubeconfig: Path) -> AsyncIterator[Running]:
    """Run the subject while the block runs."""
    argv = [word.replace("{kubeconfig}", str(kubeconfig)) for word in subject.argv]
    with tempfile.NamedTemporaryFile(prefix="llmkube-bench-", suffix=".log") as log:
        env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        process = Process.start(subject.name, argv, log=Path(log.name), env=env)
        try:
            yield Running(process)
        finally:
            await process.stop()


def ours(*controllers: str) -> Subject:
    """Our own controller, as an admin would start it outside the cluster."""
    argv = [sys.executable, "-m", "llmkube", "controller"]
    argv += ["--kubeconfig", "{kubeconfig}", "--controllers", ",".join(controllers)]
    argv += ["--metrics-bind-address", "0", "--health-probe-bind-address", "0"]
    return Subject("llmkube", [*argv, "--log-level", "warning"])


def chosen(subjects: Sequence[Subject], only: Sequence[str]) -> list[Subject]:
    """The subjects of those names; all of them if none is named."""
    return [subject for subject in subjects if not only or subject.name in only]


def peers(variable: str) -> list[Subject]:
    """Optional peers from an environment variable: `NAME=COMMAND;NAME=COMMAND`."""
    entries = [entry for entry in os.environ.get(variable, "").split(";") if entry.strip()]
    pairs = [entry.split("=", 1) for entry in entries]
    return [Subject(name.strip(), shlex.split(command)) for name, command in pairs]
