"""The agent's private folder: files that are written whole or not at all, one agent at a time.

A file here is the machine's identity, so nothing is ever repaired or regenerated behind the
admin's back: whatever is half-written, readable by others or not ours is a `StateError` that says
what to do. Crash safety: a file appears under its name only after its content is on the disk, and
the folder entry is flushed before anybody relies on it. `llmkube.agent.identity` says what is in
the files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_NAME = "lock"
MAX_FILE_BYTES = 64 * 1024


class StateError(Exception):
    """The state folder cannot be used as it is. The message says what to do."""


@dataclass(slots=True)
class StateDir:
    """An open, locked state folder. A context manager: leaving it releases the lock."""

    path: Path
    _lock: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the folder if it is missing (0700), check it, and lock it. Raises StateError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_directory(path)
            state = cls(path, _take_lock(path / LOCK_NAME))
            state._sweep()
            return state
        except OSError as error:
            raise StateError(
                f"cannot use the state folder {path}: {error.strerror}. "
                "Give the agent's user a folder of its own with --state-dir"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _sweep(self) -> None:
        """Remove what a crash left of files that never got their name: nobody relied on them."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Put `content` under `name`, replacing what was there. Raises StateError."""
        write_private(self.path / name, content)


def read_private(path: Path) -> bytes | None:
    """The content of a file that only its owner may read, None if it is missing.

    Raises StateError for anything but a regular file of our own with mode 0600 or stricter.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(
            f"cannot read {path}: {error.strerror}. It must be a regular file that belongs to "
            "the agent's user, not a link; put it back from a backup"
        ) from error
    try:
        _check_file(path, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise StateError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes, which the agent never writes"
        )
    return content


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, atomically and durably. Raises StateError, leaving no trace."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, content)
        temporary.rename(path)
        _flush_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StateError(
            f"cannot write {path}: {error.strerror}. Make room on the disk, or make the folder "
            "writable for the agent's user"
        ) from error


def _write_new(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        _flush(file.fileno())


def _flush(descriptor: int) -> None:
    """To the disk itself: on macOS fsync stops at the drive's cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):  # not every file system knows it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_directory(path: Path) -> None:
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise StateError(f"{path} is not a folder; give another with --state-dir")
    if info.st_uid != os.geteuid():
        raise StateError(
            f"the state folder {path} belongs to user {info.st_uid}, the agent runs as "
            f"{os.geteuid()}. Run it as that user, or: chown -R {os.geteuid()} '{path}'"
        )
    if info.st_mode & 0o022:
        raise StateError(f"others can write to the state folder {path}. Run: chmod 700 '{path}'")


def _check_file(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise StateError(f"{path} is not a regular file; put it back from a backup")
    if info.st_uid != os.geteuid():
        raise StateError(
            f"{path} belongs to user {info.st_uid}, the agent runs as {os.geteuid()}. "
            f"Run it as that user, or: chown {os.geteuid()} '{path}'"
        )
    if info.st_mode & 0o077:
        raise StateError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}: other users could have read it. If "
            f"nobody did, run: chmod 600 '{path}'. Otherwise move the whole folder away and start "
            "the agent again: it makes a new identity, and the cluster announces the new key"
        )


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(
            f"another agent is running with the state folder {path.parent}. Stop that one, or "
            "give this one a folder of its own with --state-dir"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
