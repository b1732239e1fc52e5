"""The reflector: lists a resource, watches it from there, and never gives up.

One coroutine per namespace (or one for all). It owns the resourceVersion and does exactly one
thing at a time: an *attempt* lists if it must, opens a watch where that ended, and hands every
event to its `Sink` until the stream ends. Whatever ends an attempt - the server's own timeout, a
cut, silence, 410, 429, 403, a garbled line, a bug of ours - goes through the one table and the one
back-off of `backoff`, so there is no path on which it could spin, stop, or stay behind.

While a list runs no watch does, so its pages can be handed on as they come: memory holds one page
beside the cache. Objects that a complete list no longer shows are deleted in the sink.

Read `informer` next: the sink, and the way to create all this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from llmkube.clock import Clock, Now
from llmkube.informers.backoff import Backoff, Ending, Mode, after, classify
from llmkube.informers.events import Bookmark, EventDecoder, Garbled, Malformed
from llmkube.informers.options import ReflectorSettings
from llmkube.informers.splitter import LineSplitter
from llmkube.informers.store import Cached, T
from llmkube.informers.telemetry import ReflectorMetrics
from llmkube.informers.view import WatchView
from llmkube.kube.errors import ApiError, Forbidden, Gone, NotFound

T_contra = TypeVar("T_contra", bound=Cached, contravariant=True)


class Stream(Protocol):
    """An open watch: bytes as they come, b"" at its end. Raises Unavailable when it breaks."""

    async def read(self) -> bytes: ...


class Source(Protocol):
    """What is reflected: lists and watches of one resource in one scope. Raises ApiError."""

    @property
    def name(self) -> str:
        """For logs: the resource, and its namespace if it is only one."""

    @property
    def scope(self) -> str | None:
        """The namespace, None for all."""

    async def page(self, since: str | None, token: str | None, limit: int) -> bytes:
        """One page of a list not older than `since`; `limit` 0: everything."""

    def watch(
        self, version: str, server_timeout: timedelta
    ) -> AbstractAsyncContextManager[Stream]: ...


class Sink(Protocol[T_contra]):
    """Where objects go. It isolates its own failures: none of these raises."""

    def put(self, obj: T_contra, now: Now, *, first_sight: bool) -> None: ...

    def delete(self, obj: T_contra, now: Now) -> None: ...

    def malformed(self, bad: Malformed, now: Now, *, first_sight: bool) -> None: ...

    def complete(self, scope: str | None, keys: set[str], now: Now) -> None:
        """A list is complete: whatever else of that scope we know is gone."""

    def failing(self, scope: str | None, why: str, *, refused: bool) -> None:
        """An attempt failed; before the first complete list that is why there is no sync."""


class Reflector(Generic[T]):
    """See the module. `uniform` returns a random number from 0 to 1."""

    def __init__(
        self,
        source: Source,
        sink: Sink[T],
        decoder: EventDecoder[T],
        view: WatchView,
        *,
        clock: Clock,
        settings: ReflectorSettings,
        metrics: ReflectorMetrics,
        log: Any,
        uniform: Callable[[], float],
    ) -> None:
        self._source = source
        self._sink = sink
        self._decoder = decoder
        self._view = view
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._log = log.bind(reflector=source.name)
        self._uniform = uniform
        self._backoff = Backoff(settings, uniform)
        self._mode = Mode.LIST_NEWEST
        self._listed = False
        self._paged = True
        self._events = 0
        self._silent_streams = 0
        self._lived = settings.short_watch
        self.resource_version = ""
        """Everything up to here has been handed to the sink."""

    async def run(self) -> None:
        """Reflect until cancelled."""
        try:
            while True:
                delay = await self._attempt()
                await asyncio.sleep(delay.total_seconds())
        finally:
            self._view.ended()

    async def _attempt(self) -> timedelta:
        """List if need be, watch until that ends; return how long to wait before the next."""
        try:
            if self._mode is not Mode.WATCH:
                await self._list()
            ending = await self._watch()
        except Exception as error:  # no exception may end a reflector (kopf#787, #1077)
            return self._failed(error)
        self._metrics.restarted(ending)
        if ending is Ending.END:
            return self._backoff.pause(self._lived)
        self._mode = after(self._mode, ending)
        return self._backoff.next(self._clock.monotonic())

    def _failed(self, error: Exception) -> timedelta:
        now = self._clock.monotonic()
        ending = self._ending(error, now)
        silent = ending in (Ending.SILENCE, Ending.STUCK)
        self._view.closed(now, silent=silent, short=self._is_short(now))
        self._metrics.restarted(ending)
        self._paged = self._paged and not (isinstance(error, Gone) and self._mode is not Mode.WATCH)
        self._mode = after(self._mode, ending)
        why = f"{type(error).__name__}: {error}"
        refused = isinstance(error, (Forbidden, NotFound))
        self._sink.failing(self._source.scope, why, refused=refused)
        delay = self._backoff.next(now, error.retry_after if isinstance(error, ApiError) else None)
        report = self._log.exception if ending is Ending.BUG else self._log.warning
        report(
            "reflector interrupted",
            reason=ending.value,
            why=why,
            next=self._mode.value,
            again_in=str(delay),
        )
        return delay

    def _ending(self, error: Exception, now: timedelta) -> Ending:
        ending = classify(error)
        if ending is Ending.BROKEN and self._view.opened_at is not None:
            heard = self._view.heard_at or self._view.opened_at
            if now - heard >= self._settings.inactivity_timeout:
                return self._silence()
        return ending

    def _silence(self) -> Ending:
        self._silent_streams = 0 if self._events else self._silent_streams + 1
        if self._silent_streams < self._settings.silent_streams:
            return Ending.SILENCE
        self._silent_streams = 0
        return Ending.STUCK

    def _is_short(self, now: timedelta) -> bool:
        """Has the open stream shown nothing worth the name of a sight?"""
        opened = self._view.opened_at
        short = opened is not None and now - opened < self._settings.short_watch
        return short and not self._events

    # Listing ------------------------------------------------------------------------------------

    async def _list(self) -> None:
        if self._listed:
            self._metrics.relisted()
        since = self.resource_version if self._mode is Mode.LIST else None
        limit = self._settings.page_size if self._paged else 0
        keys: set[str] = set()
        token = None
        while True:
            self._view.attempted(self._clock.monotonic())
            page = self._decoder.page(await self._source.page(since, token, limit))
            version = _real(page.resource_version)
            await self._take_items(page.items, page.malformed, keys)
            since, token = None, page.continue_token
            if not token:
                break
        self._sink.complete(self._source.scope, keys, self._clock.now())
        self.resource_version = version
        self._mode = Mode.WATCH
        self._listed = self._paged = True

    async def _take_items(
        self, items: list[T], malformed: Iterable[Malformed], keys: set[str]
    ) -> None:
        now = self._clock.now()
        for bad in malformed:
            self._sink.malformed(bad, now, first_sight=True)
            keys.add(bad.key)
        for number, obj in enumerate(items, 1):
            self._sink.put(obj, now, first_sight=True)
            keys.add(obj.key)
            if number % self._settings.slice_size == 0:
                await asyncio.sleep(0)  # a big list must not hold up the loop

    # Watching -----------------------------------------------------------------------------------

    async def _watch(self) -> Ending:
        self._view.attempted(self._clock.monotonic())
        self._events = 0
        async with self._source.watch(self.resource_version, self._server_timeout()) as stream:
            opened = self._clock.monotonic()
            self._view.opened(opened)
            splitter = LineSplitter(self._settings.line_cap)
            while data := await stream.read():
                await self._take_lines(splitter.feed(data))
            if rest := splitter.rest():  # a Status without a newline, or a line cut off
                await self._take_lines([rest])
        now = self._clock.monotonic()
        self._lived = now - opened
        short = self._is_short(now)
        self._view.closed(now, short=short)
        if self._events:
            self._silent_streams = 0
        return Ending.SHORT if short else Ending.END

    def _server_timeout(self) -> timedelta:
        low, high = self._settings.shortest_server_timeout, self._settings.longest_server_timeout
        return low + (high - low) * self._uniform()

    async def _take_lines(self, lines: list[bytes]) -> None:
        now = self._clock.now()
        self._view.heard(now.mono)
        for number, line in enumerate(lines, 1):
            if line:
                self._take(line, now)
            if number % self._settings.slice_size == 0:
                await asyncio.sleep(0)

    def _take(self, line: bytes, now: Now) -> None:
        event = self._decoder.event(line)
        self._events += 1
        if isinstance(event, Bookmark):
            version = _real(event.resource_version)
        elif isinstance(event, Malformed):
            version = _real(event.resource_version)
            self._sink.malformed(event, now, first_sight=False)
        else:
            obj = event.object
            version = _real(obj.metadata.resource_version)
            if event.type == "DELETED":
                self._sink.delete(obj, now)
            else:
                self._sink.put(obj, now, first_sight=False)
        self.resource_version = version


def _real(version: str) -> str:
    """A watch that began at an empty version would hide every deletion before it."""
    if not version:
        raise Garbled("an answer without a resourceVersion")
    return version
