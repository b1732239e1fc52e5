"""The stale-cache guard: no decision on a cache that has not seen our own last write.

A write's answer arrives before the watch delivers its echo. A reconcile in between would decide on
the state before its own write and do it twice (KEP-5647; kopf#729). One guard per resource is
shared by all its reconcilers, so that each waits for the other's writes, too.

It never blocks for ever: `bound` after the write the verdict is "read live", and stays so until
the cache has caught up. Only objects with a write on its way are remembered; a deletion or a
re-creation (another UID) clears them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Generic

import msgspec

from llmkube.clock import Clock
from llmkube.informers.options import DEFAULTS
from llmkube.informers.store import Change, Store, T

Passed = Callable[[str, int], bool]
"""Has the watch that covers this key delivered everything up to this resourceVersion?"""


class Freshness(StrEnum):
    """May a reconcile of this object trust the cache?"""

    FRESH = "fresh"
    WAIT = "wait"
    READ_LIVE = "read live"


class _Write(msgspec.Struct, frozen=True, gc=False):
    """Our last write of an object. `version` 0: we deleted it."""

    uid: str
    version: int
    at: timedelta


def parse_version(text: str) -> int:
    """A resourceVersion as a number: comparable within one resource (KEP-5504), 0 if it is none."""
    return int(text) if text.isdecimal() else 0


class CacheGuard(Generic[T]):
    """Remembers own writes of one resource until `store` shows them.

    Feed it every Change of the informer (`informer.add_handler(guard.observe)`, before the
    handlers that queue keys). `passed` is the informer's, and settles objects that came and went
    between two lists.
    """

    def __init__(
        self,
        store: Store[T],
        clock: Clock,
        *,
        passed: Passed = lambda _key, _version: False,
        bound: timedelta = DEFAULTS.echo_limit,
    ) -> None:
        self._store = store
        self._clock = clock
        self._passed = passed
        self._bound = bound
        self._writes: dict[str, _Write] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Objects with a write on its way."""
        return len(self._writes)

    # Writing ------------------------------------------------------------------------------------

    def wrote(self, key: str, uid: str, resource_version: str) -> None:
        """We created or changed the object: the API server answered with this version."""
        version = parse_version(resource_version)
        if version:
            self._remember(key, _Write(uid, version, self._clock.monotonic()))

    def deleted(self, key: str, uid: str) -> None:
        """We deleted the object with that UID: wait until the cache no longer shows it."""
        self._remember(key, _Write(uid, 0, self._clock.monotonic()))

    def _remember(self, key: str, write: _Write) -> None:
        old = self._writes.get(key)
        if (
            old is not None
            and old.uid == write.uid
            and write.version
            and (old.version == 0 or old.version > write.version)
        ):
            return  # two reconcilers' answers may come out of order
        self._writes[key] = write
        if self._settled(key, write):
            self._clear(key)

    # Seeing -------------------------------------------------------------------------------------

    def observe(self, change: Change[T]) -> None:
        """Handler for the informer: an echo, a deletion or a re-creation ends the wait."""
        write = self._writes.get(change.key)
        if write is None:
            return
        gone = change.new is None and change.old is not None
        ended = gone and change.old is not None and change.old.metadata.uid == write.uid
        if ended or self._settled(change.key, write):
            self._clear(change.key)

    def _settled(self, key: str, write: _Write) -> bool:
        obj = self._store.get(key)
        if write.version == 0:
            # A pod lives on for its grace period, but the cache knows that it is doomed.
            doomed = obj is not None and getattr(obj.metadata, "deletion_timestamp", None)
            return obj is None or obj.metadata.uid != write.uid or bool(doomed)
        if obj is not None:
            # Another UID with a higher version was created later; with a lower one, before.
            seen = parse_version(obj.metadata.resource_version)
            if seen >= write.version:
                return True
        return self._passed(key, write.version)

    def _clear(self, key: str) -> None:
        self._writes.pop(key, None)
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    # Asking -------------------------------------------------------------------------------------

    def check(self, key: str) -> Freshness:
        """May the cache be trusted for this object now? Cheap, and does not wait."""
        write = self._writes.get(key)
        if write is None:
            return Freshness.FRESH
        if self._settled(key, write):
            self._clear(key)
            return Freshness.FRESH
        late = self._clock.monotonic() - write.at >= self._bound
        return Freshness.READ_LIVE if late else Freshness.WAIT

    async def wait_fresh(self, key: str) -> Freshness:
        """Wait for the echo of our last write: FRESH, or READ_LIVE once the bound has passed.

        Returns at once, without giving up the event loop, if no write is on its way.
        """
        while (verdict := self.check(key)) is Freshness.WAIT:
            left = self._writes[key].at + self._bound - self._clock.monotonic()
            try:
                async with asyncio.timeout(left.total_seconds()), self._waiter(key) as echo:
                    await echo
            except TimeoutError:
                fresh = self.check(key) is Freshness.FRESH
                return Freshness.FRESH if fresh else Freshness.READ_LIVE
        return verdict

    @asynccontextmanager
    async def _waiter(self, key: str) -> AsyncIterator[asyncio.Future[None]]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        try:
            yield waiter
        finally:
            waiters = self._waiters.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(key, None)
