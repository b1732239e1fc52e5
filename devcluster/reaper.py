"""Nothing that this process starts survives it, even when it is killed with SIGKILL.

A small child process holds the read end of a pipe. We tell it about each process group and each
temporary folder; when the pipe closes, because we exited or died, it kills the groups and removes
the folders. That works on Linux and macOS alike and, unlike PR_SET_PDEATHSIG, does not depend on
which thread started what.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

_lock = threading.Lock()
_pipe: IO[str] | None = None
_owner = 0


def watch_group(pgid: int) -> None:
    """Kill process group `pgid` when this process ends."""
    _tell(f"+group {pgid}")


def forget_group(pgid: int) -> None:
    """The group has ended: its number may be used again by others."""
    _tell(f"-group {pgid}")


def watch_folder(folder: Path) -> None:
    """Remove `folder` when this process ends."""
    _tell(f"+folder {folder}")


def forget_folder(folder: Path) -> None:
    """The folder is to stay, or is gone already."""
    _tell(f"-folder {folder}")


def _tell(line: str) -> None:
    with _lock:
        pipe = _started()
        pipe.write(line + "\n")
        pipe.flush()


def _started() -> IO[str]:
    global _pipe, _owner
    if _pipe is None or _owner != os.getpid():
        child = subprocess.Popen(
            [sys.executable, "-m", "devcluster.reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).resolve().parent.parent,
        )
        if child.stdin is None:
            raise RuntimeError("the reaper has no standard input")
        _pipe, _owner = child.stdin, os.getpid()
    return _pipe


def main() -> None:
    """The reaper process: read what to watch until the pipe closes, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[str, dict[str, None]] = {"group": {}, "folder": {}}
    for line in sys.stdin:
        verb, value = line.rstrip("\n").split(" ", 1)
        if verb[0] == "+":
            watched[verb[1:]][value] = None
        else:
            watched[verb[1:]].pop(value, None)
    for pgid in watched["group"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pgid), signal.SIGKILL)
    for folder in watched["folder"]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
