"""Just enough HTTP/1.1 to stand between a client and the API server: heads, bodies, chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

_READ = 65536


@dataclass(frozen=True, slots=True)
class Head:
    """A request's or response's first line and headers, names in lower case."""

    start: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def without(self, *names: str) -> Head:
        return Head(self.start, tuple(h for h in self.headers if h[0] not in names))

    def with_header(self, name: str, value: str) -> Head:
        return Head(self.start, (*self.without(name).headers, (name, value)))

    def encode(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    @property
    def chunked(self) -> bool:
        return "chunked" in (self.get("transfer-encoding") or "")

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.start.split()[1])


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = raw.decode("latin-1").strip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return Head(start, tuple((name.strip().lower(), value.strip()) for name, value in pairs))


async def read_body(reader: asyncio.StreamReader, head: Head) -> AsyncIterator[bytes]:
    """The body in the pieces in which it comes. Raises IncompleteReadError if it breaks off."""
    if head.chunked:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
    else:
        left = int(head.get("content-length") or 0)
        while left:
            piece = await reader.read(min(left, _READ))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)
