"""A machine: mount, network, process and host-name namespaces of its own under one process.

The kernel ends all processes of a PID namespace with the first one, and mounts and links with the
last user of their namespace. So killing that one process, which the reaper does even if we are
killed ourselves, leaves nothing behind.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from devcluster.process import Process, ProcessFailed

_START = timedelta(seconds=20)
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"


class Machine:
    """Namespaces in which programs can be run. Create with `start`."""

    def __init__(self, name: str, folder: Path, first: Process) -> None:
        self.name = name
        self.folder = folder
        self._first = first
        self._processes: list[Process] = []
        self.pid = _child_of(first)

    @classmethod
    def start(cls, name: str, folder: Path) -> Machine:
        """Start an empty machine: a loopback interface that is up, and nothing else."""
        folder.mkdir(parents=True, exist_ok=True)
        unshare = ["unshare", "--mount", "--net", "--pid", "--uts", "--fork"]
        unshare += ["--mount-proc", "--propagation=private", "--kill-child=SIGKILL"]
        first = Process.start(
            name, [*unshare, sys.executable, "-c", _INIT], log=folder / "machine.log"
        )
        machine = cls(name, folder, first)
        machine.run("hostname", name)
        machine.run("ip", "link", "set", "lo", "up")
        return machine

    def enter(self, *argv: str | Path) -> list[str]:
        """The command that runs `argv` in this machine."""
        target = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--"]
        return [*target, *map(str, argv)]

    def run(self, *argv: str | Path, check: bool = True, timeout: timedelta = _START) -> str:
        """Run to the end; what it printed. Raises ProcessFailed with its words if it fails."""
        done = subprocess.run(
            self.enter(*argv),
            text=True,
            capture_output=True,
            timeout=timeout.total_seconds(),
            check=False,
        )
        if check and done.returncode:
            raise ProcessFailed(f"{self.name}: {' '.join(map(str, argv))}: {done.stderr.strip()}")
        return done.stdout

    def spawn(
        self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> Process:
        """Run in the background, until the machine stops at the latest."""
        log = self.folder / f"{name}.log"
        process = Process.start(name, self.enter(*argv), log=log, env=env)
        self._processes.append(process)
        return process

    async def stop(self) -> None:
        for process in reversed(self._processes):
            await process.stop(grace=timedelta(seconds=5))
        await self._first.kill()


@dataclass(frozen=True, slots=True)
class End:
    """One end of a cable: an interface with an address (CIDR) in a machine, or here (`None`)."""

    machine: Machine | None
    device: str
    address: str

    def run(self, *argv: str) -> str:
        return _host(*argv) if self.machine is None else self.machine.run(*argv)

    @property
    def namespace(self) -> tuple[str, str] | tuple[()]:
        return () if self.machine is None else ("netns", str(self.machine.pid))


def link(one: End, other: End) -> None:
    """Lay a cable. It goes with either of its machines."""
    pair = ["type", "veth", "peer", "name", other.device, *other.namespace]
    _host("ip", "link", "add", one.device, *one.namespace, *pair)
    for end in (one, other):
        end.run("ip", "address", "add", end.address, "dev", end.device)
        end.run("ip", "link", "set", end.device, "up")


def _host(*argv: str) -> str:
    done = subprocess.run(argv, text=True, capture_output=True, check=False)
    if done.returncode:
        raise ProcessFailed(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _child_of(process: Process) -> int:
    """The first process inside: the child of `unshare`, once it runs our program."""
    deadline = time.monotonic() + _START.total_seconds()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while time.monotonic() < deadline:
        process.check_alive()
        pids = children.read_text().split()
        if pids and "signal.pause" in Path(f"/proc/{pids[0]}/cmdline").read_text():
            return int(pids[0])
        time.sleep(0.02)
    raise ProcessFailed(f"{process.name} did not start:\n{process.tail()}")
