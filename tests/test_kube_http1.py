"""The HTTP/1.1 parser: one answer, however it is cut into pieces."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmkube.kube.http1 import AnswerParser, BadAnswer, Head, decoded, parse_head

bodies = st.binary(max_size=300)


def chunked(pieces: list[bytes], extension: str, trailer: str) -> bytes:
    """A chunked answer; sizes in either case, with an extension and a trailer."""
    out = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for piece in pieces:
        out += f"{len(piece):X}{extension}\r\n".encode() + piece + b"\r\n"
    return out + f"0\r\n{trailer}\r\n".encode()


def fed(parser: AnswerParser, data: bytes, cuts: list[int]) -> bytes:
    """What a parser gives for data that is cut at these places."""
    body, at = b"", 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        if cut > at:
            parser.feed(data[at:cut])
            body += parser.take()
            at = cut
    return body


@settings(deadline=None)
@given(st.lists(bodies.filter(len)), st.lists(st.integers(0, 4000)), st.sampled_from(["", ";a=b"]))
def test_chunks_come_out_whole_however_they_are_cut(
    pieces: list[bytes], cuts: list[int], extension: str
) -> None:
    parser = AnswerParser()
    data = chunked(pieces, extension, "Expires: never\r\n" if extension else "")
    assert fed(parser, data, cuts) == b"".join(pieces)
    assert parser.complete
    assert parser.clean


@settings(deadline=None)
@given(bodies, st.lists(st.integers(0, 4000)), bodies)
def test_a_counted_body_ends_where_it_said(body: bytes, cuts: list[int], more: bytes) -> None:
    parser = AnswerParser()
    data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX: y\r\n\r\n" % len(body)
    assert fed(parser, data + body + more, cuts) == body
    assert parser.complete
    assert parser.clean == (not more)


@settings(deadline=None)
@given(bodies, st.lists(st.integers(0, 4000)))
def test_a_body_of_unknown_length_ends_with_the_connection(body: bytes, cuts: list[int]) -> None:
    parser = AnswerParser()
    assert fed(parser, b"HTTP/1.0 200 OK\r\n\r\n" + body, cuts) == body
    assert not parser.complete
    parser.feed_end()
    assert parser.complete


@settings(deadline=None)
@given(st.binary(max_size=400))
@example(b"HTTP/1.0 000\r\n\r\n")
@example(b"HTTP/1.1 100\r\n\r\n")
def test_garbage_is_refused_or_waited_for_but_never_crashes(data: bytes) -> None:
    parser = AnswerParser()
    try:
        parser.feed(data)
    except BadAnswer:
        return
    assert parser.untouched == (not data)


def test_interim_answers_are_skipped() -> None:
    parser = AnswerParser()
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    assert parser.head is None
    parser.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert parser.head is not None
    assert parser.head.status == 204
    assert parser.complete


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", id="another protocol"),
        pytest.param(b"HTTP/2 200\r\n\r\n", id="another version"),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n\r\n", id="no status"),
        pytest.param(b"HTTP/1.1 101 Switching\r\n\r\n", id="a switch nobody asked for"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="negative length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n", id="length in words"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\n",
            id="two lengths",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n", id="unknown coding"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="no chunk size"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
            id="a chunk longer than it said",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000, id="an endless head"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 5_000,
            id="an endless chunk line",
        ),
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        AnswerParser().feed(answer)


@pytest.mark.parametrize(
    ("head", "persistent"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK", False),
    ],
)
def test_who_may_use_the_connection_again(head: bytes, persistent: bool) -> None:
    assert parse_head(head).persistent is persistent


def test_headers_are_found_by_name_only() -> None:
    head = parse_head(
        b"HTTP/1.1 429 Retry-After: 1\r\nX-Retry-After: 2\r\nReason: retry-after: 3\r\n"
        b"Retry-After:  4 \r\nlast: 5"
    )
    assert head.header("retry-after") == "4"
    assert head.header("last") == "5"
    assert head.header("after") is None
    assert not head.repeats("retry-after")


def test_compressed_bodies_are_unpacked_and_damaged_ones_refused() -> None:
    head = Head(200, b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip")
    assert decoded(head, gzip.compress(b"abc" * 1000)) == b"abc" * 1000
    with pytest.raises(BadAnswer):
        decoded(head, b"abc")
    with pytest.raises(BadAnswer):
        decoded(Head(200, b"HTTP/1.1 200 OK\r\nContent-Encoding: br"), b"abc")
