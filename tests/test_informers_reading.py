"""From bytes to objects: lines, events, pages, the store and its indexes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.api.cached import CachedLease, Meta, decode_lease
from llmkube.informers.events import (
    Bookmark,
    EventDecoder,
    Garbled,
    Malformed,
    StreamError,
)
from llmkube.informers.splitter import LineSplitter, LineTooLong
from llmkube.informers.store import Store

CAP = 64 * 1024 * 1024


# Lines ------------------------------------------------------------------------------------------
@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(1, 30), min_size=1))
def test_lines_are_the_same_however_the_stream_is_cut(lines: list[bytes], sizes: list[int]) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    splitter, found, position, turn = LineSplitter(CAP), [], 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        found += splitter.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert found == lines
    assert splitter.rest() == b"rest"


def test_a_3_mb_line_in_small_pieces_is_looked_at_once() -> None:
    """Linear: each byte is copied a constant number of times, whatever the size of the pieces."""

    class Counting(LineSplitter):
        copied = 0

        def feed(self, data: bytes) -> list[bytes]:
            before = sum(map(len, self._parts))
            lines = super().feed(data)
            # Only a newline may touch what was kept before.
            Counting.copied += len(data) + (before if lines else 0)
            return lines

    line = b"x" * 3_000_000
    splitter = Counting(CAP)
    found: list[bytes] = []
    for start in range(0, len(line), 512):
        found += splitter.feed(line[start : start + 512])
    found += splitter.feed(b"\n")
    assert found == [line]
    assert Counting.copied <= 2 * len(line) + 2


def test_a_line_beyond_the_cap_is_refused() -> None:
    splitter = LineSplitter(1000)
    assert splitter.feed(b"x" * 1000) == []
    with pytest.raises(LineTooLong, match="1000 bytes"):
        splitter.feed(b"x")


# Events -----------------------------------------------------------------------------------------
def lease(name: str = "a", version: str = "5", **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": version}
    return {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": meta, "spec": spec}


def line(kind: str, obj: Any) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


def status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": "the server's words"}


@pytest.fixture(params=["struct", "function"])
def decoder(request: pytest.FixtureRequest) -> EventDecoder[CachedLease]:
    return EventDecoder(CachedLease if request.param == "struct" else decode_lease)


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_an_event_is_typed_in_one_pass(decoder: EventDecoder[CachedLease], kind: str) -> None:
    event = decoder.event(line(kind, lease(leaseDurationSeconds=120)))
    assert not isinstance(event, Bookmark | Malformed)
    assert event.type == kind
    assert event.object.key == "ns/a"
    assert event.object.spec.lease_duration_seconds == 120


def test_a_bookmark_carries_only_a_version(decoder: EventDecoder[CachedLease]) -> None:
    obj: dict[str, Any] = {"kind": "Lease", "metadata": {"resourceVersion": "77"}, "spec": {}}
    assert decoder.event(line("BOOKMARK", obj)) == Bookmark("77", False)
    obj["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
    assert decoder.event(line("BOOKMARK", obj)) == Bookmark("77", True)
    named = lease(version="78")  # some servers send whole objects
    assert decoder.event(line("BOOKMARK", named)) == Bookmark("78", False)


@pytest.mark.parametrize(
    ("obj", "expired"),
    [
        (status(410, "Expired"), True),
        (status(410, ""), True),
        (status(500, "Gone"), True),
        (status(500, "InternalError"), False),
        (status(403, "Forbidden"), False),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False], ids=["ERROR event", "bare Status"])
def test_the_servers_error_is_no_object(
    decoder: EventDecoder[CachedLease], obj: dict[str, Any], expired: bool, wrapped: bool
) -> None:
    text = line("ERROR", obj) if wrapped else json.dumps(obj).encode()
    with pytest.raises(StreamError, match="the server's words") as caught:
        decoder.event(text)
    assert caught.value.expired is expired


@pytest.mark.parametrize("deleted", [True, False])
def test_a_malformed_object_costs_only_itself(
    decoder: EventDecoder[CachedLease], deleted: bool
) -> None:
    bad = lease(leaseDurationSeconds="soon")
    event = decoder.event(line("DELETED" if deleted else "MODIFIED", bad))
    assert isinstance(event, Malformed)
    assert (event.key, event.uid, event.resource_version) == ("ns/a", "u", "5")
    assert event.deleted is deleted
    assert "leaseDurationSeconds" in event.why


@pytest.mark.parametrize(
    "text",
    [
        b"garbage",
        b"{}",
        b"[]",
        b"null",
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":null}',
        b'{"type":"ADDED","object":{"metadata":{}}}',
        b'{"type":"BOOKMARK","object":{}}',
        b'{"type":"ERROR","object":{}}',
        b'{"type":"SURPRISE","object":{"metadata":{"name":"a"}}}',
        b'{"type":5,"object":{}}',
        b"<html>bad gateway</html>",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"type":"ADDED","object":' + b'{"a":' * 50_000,
    ],
    ids=lambda text: text[:30].decode("latin-1"),
)
def test_garbage_is_never_skipped_silently(decoder: EventDecoder[CachedLease], text: bytes) -> None:
    with pytest.raises(Garbled):
        decoder.event(text)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    one = EventDecoder(CachedLease)
    for read in (one.event, one.page):
        with contextlib.suppress(Garbled, StreamError):
            read(data)


# Pages ------------------------------------------------------------------------------------------
def page(items: Any, token: str = "") -> bytes:
    meta = {"resourceVersion": "9"} | ({"continue": token} if token else {})
    return json.dumps({"kind": "LeaseList", "metadata": meta, "items": items}).encode()


def test_a_page(decoder: EventDecoder[CachedLease]) -> None:
    found = decoder.page(page([lease("a"), lease("b")], "more"))
    assert [one.key for one in found.items] == ["ns/a", "ns/b"]
    assert (found.resource_version, found.continue_token) == ("9", "more")
    assert found.malformed == []


@pytest.mark.parametrize("items", [[], None])
def test_an_empty_page(decoder: EventDecoder[CachedLease], items: Any) -> None:
    assert decoder.page(page(items)).items == []


def test_a_malformed_object_in_a_page_costs_only_itself(
    decoder: EventDecoder[CachedLease],
) -> None:
    found = decoder.page(page([lease("a"), lease("b", leaseDurationSeconds=[]), lease("c")]))
    assert [one.key for one in found.items] == ["ns/a", "ns/c"]
    assert [bad.key for bad in found.malformed] == ["ns/b"]


def test_a_status_in_place_of_a_list_is_an_error(decoder: EventDecoder[CachedLease]) -> None:
    with pytest.raises(StreamError) as caught:
        decoder.page(json.dumps(status(410, "Expired")).encode())
    assert caught.value.expired
    with pytest.raises(Garbled):
        decoder.page(b"<html>")


# The store --------------------------------------------------------------------------------------
def cached(name: str, holder: str, version: int = 1) -> CachedLease:
    return CachedLease(metadata=Meta(name, "ns", "u", str(version), labels={"holder": holder}))


def by_holder(obj: CachedLease) -> list[str]:
    return [value for value in (obj.metadata.labels or {}).values() if value]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "x", "y", "z", None])), max_size=60
)


@given(OPERATIONS)
def test_indexes_always_agree_with_the_objects(script: list[tuple[str, str | None]]) -> None:
    store: Store[CachedLease] = Store({"holder": by_holder})
    model: dict[str, CachedLease] = {}
    for version, (name, holder) in enumerate(script):
        if holder is None:
            assert store.remove(f"ns/{name}") == model.pop(f"ns/{name}", None)
        else:
            obj = cached(name, holder, version)
            assert store.put(obj) == model.get(obj.key)
            model[obj.key] = obj
    assert {one.key: one for one in store} == model
    assert len(store) == len(model)
    for holder in ("x", "y", "z"):
        expected = [one for one in model.values() if by_holder(one) == [holder]]
        found = store.by_index("holder", holder)
        assert sorted(one.key for one in found) == sorted(one.key for one in expected)
        assert all(one in expected for one in found)
    in_use = {value for one in model.values() for value in by_holder(one)}
    assert set(store._indexes["holder"]) == in_use, "no empty entries are left behind"


def test_an_index_that_the_store_does_not_keep_is_an_error() -> None:
    with pytest.raises(KeyError):
        Store[CachedLease]().by_index("holder", "x")
