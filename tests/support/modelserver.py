"""A model of what lists and watches promise, for the reflector's pure logic on virtual time.

No stand-in for the API server: tests of what the real one does use the real one. This model has
versions, history, compaction, paging and faults, and nothing else, so that hypothesis can run
thousands of scripts against it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from llmkube.kube.errors import (
    Forbidden,
    Gone,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)


class Fault(StrEnum):
    """What the next request meets."""

    REFUSED = "refused"
    SERVER_ERROR = "500"
    THROTTLED = "429"
    UNAUTHORIZED = "401"
    FORBIDDEN = "403"
    MISSING = "404"
    EXPIRED = "410"
    EXPIRED_IN_STREAM = "410 in the stream"
    EMPTY = "immediate end"
    GARBAGE = "garbage"
    SILENT = "half-open"
    BROKEN = "breaks at once"
    ERROR_EVENT = "an ERROR event"
    CUT_LINE = "ends within a line"


_REFUSALS: dict[Fault, Exception] = {
    Fault.REFUSED: Unavailable("connection refused"),
    Fault.SERVER_ERROR: Unavailable("boom", status=500),
    Fault.THROTTLED: TooManyRequests("slow", status=429, retry_after=timedelta(seconds=2)),
    Fault.UNAUTHORIZED: Unauthorized("who", status=401),
    Fault.FORBIDDEN: Forbidden("no", status=403),
    Fault.MISSING: NotFound("what", status=404),
    Fault.EXPIRED: Gone("too old", status=410),
}
_SILENCE = 70.0


@dataclass
class Entry:
    """One step of history."""

    version: int
    kind: str
    obj: dict[str, Any]

    def line(self) -> bytes:
        return json.dumps({"type": self.kind, "object": self.obj}).encode() + b"\n"


def event_line(kind: str, obj: Any) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


_EXPIRED_EVENT = event_line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
_ERROR_EVENT = event_line("ERROR", {"kind": "Status", "code": 500, "reason": "InternalError"})
_FIRST_WORDS: dict[Fault, bytes] = {
    Fault.GARBAGE: b"<html>bad gateway</html>\n",
    Fault.EXPIRED_IN_STREAM: _EXPIRED_EVENT,
    Fault.ERROR_EVENT: _ERROR_EVENT,
    Fault.CUT_LINE: b'{"type":"ADDED","obj',
}


@dataclass
class ModelServer:
    """Objects, their history, and the faults that the next requests meet."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[Entry] = field(default_factory=list)
    version: int = 100
    compacted: int = 100
    faults: deque[Fault] = field(default_factory=deque)
    requests: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    streams: int = 0

    # What happens in the cluster ----------------------------------------------------------------

    def write(self, key: str, *, good: bool = True, new_uid: bool = False) -> None:
        """Create or change an object; with `new_uid` it is deleted and created anew."""
        old = self.objects.get(key)
        if old is not None and new_uid:
            self.delete(key)
            old = None
        self.version += 1
        namespace, name = key.split("/")
        uid = old["metadata"]["uid"] if old else f"uid-{self.version}"
        meta = {"namespace": namespace, "name": name, "uid": uid}
        spec = {"leaseDurationSeconds": self.version if good else "soon"}
        obj = {"metadata": meta | {"resourceVersion": str(self.version)}, "spec": spec}
        self.objects[key] = obj
        self.history.append(Entry(self.version, "MODIFIED" if old else "ADDED", obj))

    def delete(self, key: str) -> None:
        if (old := self.objects.pop(key, None)) is not None:
            self.version += 1
            meta = old["metadata"] | {"resourceVersion": str(self.version)}
            self.history.append(Entry(self.version, "DELETED", old | {"metadata": meta}))

    def compact(self) -> None:
        """Forget the history: every version before now is gone."""
        self.compacted = self.version
        self.history.clear()

    async def publish(self) -> None:
        """Let open streams deliver."""
        async with self.changed:
            self.changed.notify_all()

    # The source of a reflector ------------------------------------------------------------------

    name = "model"
    scope: str | None = None

    def _meet(self) -> Fault | None:
        self.requests += 1
        fault = self.faults.popleft() if self.faults else None
        if fault in _REFUSALS:
            raise _REFUSALS[fault]
        return fault

    async def page(self, since: str | None, token: str | None, limit: int) -> bytes:
        fault = self._meet()
        await asyncio.sleep(0.001)
        match fault:
            case Fault.GARBAGE:
                return b"<html>"
            case Fault.SILENT | Fault.BROKEN | Fault.CUT_LINE | Fault.EMPTY:
                raise Unavailable("no answer")
            case Fault.EXPIRED_IN_STREAM | Fault.ERROR_EVENT:
                return json.dumps({"kind": "Status", "code": 500, "reason": "odd"}).encode()
        return self._page(token, limit)

    def _page(self, token: str | None, limit: int) -> bytes:
        at, start = (int(part) for part in token.split("/")) if token else (self.version, 0)
        if at < self.compacted:
            raise Gone("the continue token is too old", status=410)
        keys = sorted(self._at(at))
        objects = self._at(at)
        end = start + limit if limit else len(keys)
        meta = {"resourceVersion": str(at)}
        if end < len(keys):
            meta["continue"] = f"{at}/{end}"
        items = [objects[key] for key in keys[start:end]]
        return json.dumps({"metadata": meta, "items": items}).encode()

    def _at(self, version: int) -> dict[str, dict[str, Any]]:
        """The objects as they were at a version that is not compacted."""
        if version == self.version:
            return self.objects
        state = {
            key: obj
            for key, obj in self.objects.items()
            if int(obj["metadata"]["resourceVersion"]) <= version
        }
        for entry in self.history:  # what has changed or gone since
            meta = entry.obj["metadata"]
            key = f"{meta['namespace']}/{meta['name']}"
            if entry.version <= version:
                state[key] = entry.obj
                if entry.kind == "DELETED":
                    del state[key]
        return state

    @asynccontextmanager
    async def watch(self, version: str, server_timeout: timedelta) -> AsyncIterator[_ModelStream]:
        fault = self._meet()
        self.streams += 1
        try:
            yield _ModelStream(self, int(version), fault, server_timeout.total_seconds())
        finally:
            self.streams -= 1


class _ModelStream:
    def __init__(
        self, server: ModelServer, version: int, fault: Fault | None, lifetime: float
    ) -> None:
        self._server = server
        self._version = version
        self._fault = fault
        self._end = asyncio.get_running_loop().time() + lifetime

    async def read(self) -> bytes:
        fault, self._fault = self._fault, Fault.EMPTY if self._fault is not None else None
        match fault:
            case None:
                return await self._next()
            case Fault.EMPTY:
                return b""
            case Fault.SILENT:
                await asyncio.sleep(_SILENCE)
                raise Unavailable("the watch was silent")
            case Fault.BROKEN:
                raise Unavailable("the watch broke")
            case _:
                return _FIRST_WORDS[fault]

    async def _next(self) -> bytes:
        if self._version < self._server.compacted:
            self._fault = Fault.EMPTY
            return _EXPIRED_EVENT
        loop = asyncio.get_running_loop()
        while not (news := [e for e in self._server.history if e.version > self._version]):
            left = self._end - loop.time()
            if left <= 0:
                return b""
            try:
                async with asyncio.timeout(min(left, 60)):
                    async with self._server.changed:
                        await self._server.changed.wait()
            except TimeoutError:
                if left > 60:
                    self._version = self._server.version
                    meta = {"resourceVersion": str(self._version)}
                    return event_line("BOOKMARK", {"metadata": meta})
            if self._version < self._server.compacted:
                self._fault = Fault.EMPTY
                return _EXPIRED_EVENT
        self._version = news[-1].version
        return b"".join(entry.line() for entry in news)
