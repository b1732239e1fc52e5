"""HTTP/1.1 answers, without any input or output: bytes go in, heads and bodies come out.

`AnswerParser` takes one answer in pieces of any size and gives the same result for each way of
cutting it. It knows what API servers and the proxies before them send: Content-Length, chunks,
bodies that end with the connection, interim 1xx answers; it refuses everything else. Sockets are
`llmkube.kube.connection`'s.
"""

from __future__ import annotations

import re
import zlib
from enum import Enum, auto

HEAD_LIMIT = 64 * 1024
LINE_LIMIT = 4 * 1024
"""For the line before a chunk, extensions included."""
_STATUS = re.compile(rb"[1-5][0-9][0-9]")


class BadAnswer(Exception):
    """The peer does not speak HTTP/1.1 as we do."""


class Head:
    """Status and headers. A header is looked for when it is asked for: of the dozen that an API
    server sends, an answer's reader needs three."""

    __slots__ = ("_lines", "_lower", "status")

    def __init__(self, status: int, lines: bytes = b"") -> None:
        self.status = status
        self._lines = lines
        self._lower = lines.lower()

    def header(self, name: str) -> str | None:
        """The value of a header, whose name is given in lower case; of repeated ones the first."""
        start = self._lower.find(f"\r\n{name}:".encode())
        if start < 0:
            return None
        start += len(name) + 3
        end = self._lower.find(b"\r\n", start)
        value = self._lines[start:] if end < 0 else self._lines[start:end]
        return value.strip().decode("latin-1")

    def repeats(self, name: str) -> bool:
        """Whether there is more than one header of this name."""
        return self._lower.count(f"\r\n{name}:".encode()) > 1

    @property
    def persistent(self) -> bool:
        """Whether the connection may be used again after the body."""
        return self._lines.startswith(b"HTTP/1.1") and (
            "close" not in (self.header("connection") or "").lower()
        )


class _Expect(Enum):
    HEAD = auto()
    LENGTH = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    END_OF_STREAM = auto()
    NOTHING = auto()


class AnswerParser:
    """One answer. `head` is None until it is known; `complete` when the body has ended."""

    __slots__ = ("_begun", "_body", "_expect", "_left", "_rest", "head", "size")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.size = 0
        """Body bytes that wait for `take`."""
        self._expect = _Expect.HEAD
        self._left = 0
        self._rest = b""
        self._begun = False
        self._body: list[bytes] = []

    @property
    def complete(self) -> bool:
        return self._expect is _Expect.NOTHING

    @property
    def clean(self) -> bool:
        """Whether a complete answer was followed by nothing that nobody asked for."""
        return not self._rest

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises BadAnswer."""
        self._begun = self._begun or bool(data)
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        while at < end:
            taken = self._step(data, at)
            if taken == at:
                self._rest = data[at:]
                return
            at = taken

    @property
    def untouched(self) -> bool:
        """Whether not one byte has come."""
        return not self._begun

    def feed_end(self) -> None:
        """The connection has ended in good order, and with it a body of unknown length."""
        if self._expect is _Expect.END_OF_STREAM:
            self._expect = _Expect.NOTHING

    def take(self) -> bytes:
        """The body bytes that came since the last call."""
        body, self.size = self._body, 0
        self._body = []
        return body[0] if len(body) == 1 else b"".join(body)

    # Each step returns how far it got; nowhere means: more bytes are needed. --------------------

    def _step(self, data: bytes, at: int) -> int:
        match self._expect:
            case _Expect.CHUNK_LINE:
                return self._read_chunk_line(data, at)
            case _Expect.HEAD:
                return self._read_head(data, at)
            case _Expect.LENGTH | _Expect.CHUNK:
                return self._read_counted(data, at)
            case _Expect.CHUNK_END:
                return self._read_chunk_end(data, at)
            case _Expect.TRAILER:
                return self._read_trailer(data, at)
            case _Expect.END_OF_STREAM:
                self._keep(data[at:])
                return len(data)
            case _Expect.NOTHING:
                return at

    def _read_head(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n\r\n", at)
        if end < 0:
            if len(data) - at > HEAD_LIMIT:
                raise BadAnswer("the head of the answer is too long")
            return at
        head = parse_head(data[at:end])
        if head.status >= 200:
            self.head = head
            self._expect, self._left = _framing(head)
        elif head.status == 101:
            raise BadAnswer("the protocol was switched without being asked")
        return end + 4

    def _read_counted(self, data: bytes, at: int) -> int:
        end = min(at + self._left, len(data))
        self._keep(data[at:end])
        self._left -= end - at
        if not self._left:
            in_chunks = self._expect is _Expect.CHUNK
            self._expect = _Expect.CHUNK_END if in_chunks else _Expect.NOTHING
        return end

    def _read_chunk_line(self, data: bytes, at: int) -> int:
        end = _line_end(data, at)
        if end < 0:
            return at
        digits = data[at:end].split(b";", 1)[0].strip()
        if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
            raise BadAnswer("a chunk begins without its size")
        self._left = int(digits, 16)
        start, stop = end + 2, end + 2 + self._left
        if self._left and data[stop : stop + 2] == b"\r\n":  # all of it is here, as nearly always
            self._keep(data[start:stop])
            return stop + 2
        self._expect = _Expect.CHUNK if self._left else _Expect.TRAILER
        return start

    def _read_chunk_end(self, data: bytes, at: int) -> int:
        if len(data) - at < 2:
            return at
        if data[at : at + 2] != b"\r\n":
            raise BadAnswer("a chunk is longer than it said")
        self._expect = _Expect.CHUNK_LINE
        return at + 2

    def _read_trailer(self, data: bytes, at: int) -> int:
        end = _line_end(data, at)
        if end < 0:
            return at
        if end == at:
            self._expect = _Expect.NOTHING
        return end + 2

    def _keep(self, body: bytes) -> None:
        if body:
            self._body.append(body)
            self.size += len(body)


def parse_head(head: bytes) -> Head:
    """Parse status line and headers, without the empty line. Raises BadAnswer."""
    code = head[9:12]
    if head[:9] not in (b"HTTP/1.1 ", b"HTTP/1.0 ") or not _STATUS.fullmatch(code):
        raise BadAnswer("the answer is not HTTP/1.1")
    return Head(int(code), head)


def _framing(head: Head) -> tuple[_Expect, int]:
    """How the body of an answer to anything but HEAD ends (RFC 9112, 6.3)."""
    if head.status in (204, 304):
        return _Expect.NOTHING, 0
    coding, length = head.header("transfer-encoding"), head.header("content-length")
    if head.repeats("transfer-encoding") or head.repeats("content-length"):
        raise BadAnswer("two opinions on where the body ends are none")
    if coding is not None:
        if coding.lower() != "chunked":
            raise BadAnswer(f"transfer coding {coding!r} is not supported")
        return _Expect.CHUNK_LINE, 0
    if length is None:
        return _Expect.END_OF_STREAM, 0
    if not (length.isascii() and length.isdigit()) or len(length) > 15:
        raise BadAnswer("the content length is not a number")
    return (_Expect.LENGTH, int(length)) if int(length) else (_Expect.NOTHING, 0)


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\r\n", at)
    if end < 0 and len(data) - at > LINE_LIMIT:
        raise BadAnswer("a line between chunks is too long")
    return end


def decoded(head: Head, body: bytes) -> bytes:
    """The body without its content coding. Raises BadAnswer."""
    match (head.header("content-encoding") or "identity").lower():
        case "identity":
            return body
        case "gzip":
            try:
                return zlib.decompress(body, wbits=16 + zlib.MAX_WBITS)
            except zlib.error as error:
                raise BadAnswer("the compressed body is damaged") from error
        case other:
            raise BadAnswer(f"content coding {other!r} was not asked for")
