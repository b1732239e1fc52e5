"""Reading what lists and watches say: one pass from bytes to typed objects, and blame for the rest.

The fast path decodes a whole event, or a whole page, straight into the type that the store keeps;
all other fields are skipped, not built. Only if that fails is the text looked at again, to tell
apart a bookmark, the server's ERROR, an object that breaks its schema (which costs that object and
nothing else), and garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, cast

import msgspec
from msgspec import Raw, field

from llmkube.informers.store import T

DecodeErrors = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
INITIAL_EVENTS_END = "k8s.io/initial-events-end"

Decode = type[T] | Callable[[bytes], T]
"""A msgspec Struct (one pass, the fast way), or a function that raises ValueError."""


class _Part(msgspec.Struct, rename="camel", gc=False):
    """The parts of answers that every kind shares."""


class _ObjectMeta(_Part):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _AnyObject(_Part):
    metadata: _ObjectMeta


class _RawEvent(_Part):
    object: Raw
    type: str


class _BookmarkMeta(_Part):
    resource_version: str
    annotations: dict[str, str] | None = None


class _Bookmark(_Part):
    metadata: _BookmarkMeta


class _Status(_Part):
    kind: Literal["Status"]
    code: int = 0
    reason: str = ""
    message: str = ""


class _ListMeta(_Part):
    resource_version: str = ""
    continue_token: str = field(default="", name="continue")


class _RawPage(_Part):
    metadata: _ListMeta
    items: list[Raw] | None = None


class Upsert(Protocol[T]):
    """An event about an object that is well formed."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: T


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Nothing happened up to this resourceVersion."""

    resource_version: str
    ends_initial_events: bool


@dataclass(frozen=True, slots=True)
class Malformed:
    """An object that breaks its schema; `deleted` if it is gone anyway."""

    key: str
    uid: str
    resource_version: str
    why: str
    deleted: bool = False


class StreamError(Exception):
    """The server's ERROR event, or a Status in place of a stream."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.expired = code == 410 or reason in ("Expired", "Gone")


class Garbled(Exception):
    """Bytes that no API server sends: the stream or list cannot be trusted any more."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `malformed` are the objects left out of `items`."""

    resource_version: str
    continue_token: str
    items: list[T]
    malformed: list[Malformed]


class EventDecoder(Generic[T]):
    """Decodes events and pages of one kind. Safe to share; keeps no state."""

    def __init__(self, decode: Decode[T]) -> None:
        struct = decode if isinstance(decode, type) else None
        kind: Any = Raw if struct is None else struct
        self._one: Callable[[bytes], T] = (
            msgspec.json.Decoder(struct).decode if struct is not None else decode
        )
        self._convert = struct is None
        names = Literal["ADDED", "MODIFIED", "DELETED"]
        event = msgspec.defstruct("Event", [("type", names), ("object", kind)], gc=False)
        page = msgspec.defstruct(
            "ListPage", [("metadata", _ListMeta), ("items", list[kind] | None, None)], gc=False
        )
        self._event: Callable[[bytes], Any] = msgspec.json.Decoder(event).decode
        self._page: Callable[[bytes], Any] = msgspec.json.Decoder(page).decode

    # Events -------------------------------------------------------------------------------------

    def event(self, line: bytes) -> Upsert[T] | Bookmark | Malformed:
        """What a line of a stream says. Raises StreamError, Garbled."""
        try:
            event = self._event(line)
            if self._convert:
                event.object = self._one(bytes(event.object))
        except DecodeErrors as error:
            return self._look_closer(line, error)
        return cast(Upsert[T], event)

    def _look_closer(self, line: bytes, why: Exception) -> Bookmark | Malformed:
        try:
            raw = _raw_event(line)
        except DecodeErrors as error:
            raise _status_error(line) or Garbled(f"not an event: {_clip(error)}") from error
        match raw.type:
            case "BOOKMARK":
                return _bookmark(raw.object)
            case "ADDED" | "MODIFIED" | "DELETED":
                return _malformed(raw.object, why, deleted=raw.type == "DELETED")
            case "ERROR":
                raise _status_error(raw.object) or Garbled("an ERROR event without a Status")
            case other:
                raise Garbled(f"an event of unknown type {other[:40]!r}")

    # Pages --------------------------------------------------------------------------------------

    def page(self, body: bytes) -> Page[T]:
        """What a page of a list says. Raises StreamError, Garbled."""
        if not self._convert:
            try:
                fast = self._page(body)
            except DecodeErrors:
                pass  # one bad object spoils the fast path: take them one by one
            else:
                meta = fast.metadata
                return Page(meta.resource_version, meta.continue_token, fast.items or [], [])
        return self._one_by_one(body)

    def _one_by_one(self, body: bytes) -> Page[T]:
        try:
            raw = _raw_page(body)
        except DecodeErrors as error:
            raise _status_error(body) or Garbled(f"not a list: {_clip(error)}") from error
        page: Page[T] = Page(raw.metadata.resource_version, raw.metadata.continue_token, [], [])
        for item in raw.items or ():
            try:
                page.items.append(self._one(bytes(item)))
            except DecodeErrors as error:
                page.malformed.append(_malformed(item, error))
        return page


_raw_event = msgspec.json.Decoder(_RawEvent).decode
_raw_page = msgspec.json.Decoder(_RawPage).decode
_any_object = msgspec.json.Decoder(_AnyObject).decode
_any_bookmark = msgspec.json.Decoder(_Bookmark).decode
_any_status = msgspec.json.Decoder(_Status).decode


def _malformed(raw: Raw, why: Exception, *, deleted: bool = False) -> Malformed:
    try:
        meta = _any_object(raw).metadata
    except DecodeErrors as error:
        raise Garbled(f"an object without readable metadata: {_clip(error)}") from error
    key = f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
    return Malformed(key, meta.uid, meta.resource_version, _clip(why), deleted)


def _bookmark(raw: Raw) -> Bookmark:
    try:
        meta = _any_bookmark(raw).metadata
    except DecodeErrors as error:
        raise Garbled(f"a bookmark without a resourceVersion: {_clip(error)}") from error
    ends = (meta.annotations or {}).get(INITIAL_EVENTS_END) == "true"
    return Bookmark(meta.resource_version, ends)


def _status_error(raw: bytes | Raw) -> StreamError | None:
    try:
        status = _any_status(raw)
    except DecodeErrors:
        return None
    return StreamError(status.code, status.reason, status.message)


def _clip(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
