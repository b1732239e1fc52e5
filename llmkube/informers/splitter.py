"""Lines out of a byte stream, in time linear in its length.

aiohttp's own line reader has a limit that large objects exceed (aio-libs/aiohttp#4453). This one
looks at every byte once, however small the pieces in which a line comes; only an explicit cap, well
above what etcd can hold, guards against a stream that never ends a line.
"""

from __future__ import annotations


class LineTooLong(Exception):
    """A line is longer than the cap: this is no watch stream."""


class LineSplitter:
    """Feed it pieces, get complete lines without their newline. `cap` is in bytes."""

    __slots__ = ("_cap", "_parts", "_size")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes. Raises LineTooLong."""
        lines = data.split(b"\n")
        tail = lines.pop()
        if lines and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
        if tail:
            self._parts.append(tail)
            self._size += len(tail)
        if self._size > self._cap:
            raise LineTooLong(f"a line of the stream exceeds {self._cap} bytes")
        return lines

    def rest(self) -> bytes:
        """What came after the last newline: at the end of a stream, a line that broke off."""
        return b"".join(self._parts)
