"""Control groups for the node's pods: the one thing that no namespace takes away with it.

Each run has a root of its own, named after its process. Both versions of control groups are served
alike; a run also removes what an earlier one left behind that was killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PREFIX = "llmkube-e2e-"


def own_name() -> str:
    """The control group of this run."""
    return f"{_PREFIX}{os.getpid()}"


def make(name: str) -> None:
    """Make the root that the kubelet expects to find."""
    _remove_those_of_the_dead()
    _delegate()
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):  # version 1: empty at first, and then unusable
        source = ROOT / "cpuset" / file
        if source.exists():
            (ROOT / "cpuset" / name / file).write_text(source.read_text())


def remove(name: str) -> bool:
    """Remove the groups of a run. False while the kernel still buries processes in them."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return not any((hierarchy / name).exists() for hierarchy in _hierarchies())


def _delegate() -> None:
    delegation = ROOT / "cgroup.subtree_control"  # of version 2
    if delegation.exists():
        for controller in ("cpuset", "cpu", "memory", "pids", "hugetlb"):
            with contextlib.suppress(OSError):  # only what the kernel has
                delegation.write_text(f"+{controller}")


def _remove_those_of_the_dead() -> None:
    found = {path.name for each in _hierarchies() for path in each.glob(f"{_PREFIX}*")}
    for name in found:
        if not Path("/proc", name.removeprefix(_PREFIX)).exists():
            remove(name)


def _hierarchies() -> Iterator[Path]:
    if (ROOT / "cgroup.controllers").exists():
        yield ROOT
        return
    yield from (path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink())
