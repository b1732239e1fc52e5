"""The shared informer: one cache of one resource, kept equal to the server, for many handlers.

It creates a reflector for each namespace (or one for all), is their sink, and tells its handlers
each change. What it promises:

* a handler sees every step that the store takes, in order, and none that is none: what a
  reconnect or a re-list shows again is not passed on;
* a handler that raises costs the others nothing, and is logged;
* an object that does not decode is absent, with one message per version; the rest goes on;
* `wait_synced` ends when the first lists are complete, or raises if the informer stops before; why
  it is not synced yet is in `sync_error`.

Everything runs on the event loop's thread. Read `view` for what it says about its own sight.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Generic

from llmkube.clock import Clock, Now
from llmkube.informers.events import Decode, EventDecoder, Malformed
from llmkube.informers.guard import CacheGuard, parse_version
from llmkube.informers.options import DEFAULTS, ReflectorSettings
from llmkube.informers.reflector import Reflector, Stream
from llmkube.informers.store import Change, Index, Store, T
from llmkube.informers.telemetry import SILENT, ReflectorMetrics
from llmkube.informers.view import View, age
from llmkube.kube.resources import Resource
from llmkube.kube.watch import Pace, at_once
from llmkube.log import get_logger

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Handler = Callable[[Change[T]], None]

_log = get_logger(__name__)
_HANDLER_LOG_INTERVAL = timedelta(minutes=1)


class NotSynced(Exception):
    """The informer stopped before its first list was complete."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Lists and watches of a resource through a client: the `Source` of a reflector."""

    client: KubeClient
    resource: Resource
    scope: str | None
    label_selector: str | None
    field_selector: str | None
    metadata_only: bool
    inactivity_timeout: timedelta
    pace: Pace

    @property
    def name(self) -> str:
        plural = self.resource.plural
        return f"{plural} in {self.scope}" if self.scope else plural

    async def page(self, since: str | None, token: str | None, limit: int) -> bytes:
        return await self.client.list_page(
            self.resource,
            self.scope,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
            limit=limit,
            continue_token=token or None,
            resource_version=since,
            resource_version_match="NotOlderThan" if since else None,
            metadata_only=self.metadata_only,
        )

    def watch(self, version: str, server_timeout: timedelta) -> AbstractAsyncContextManager[Stream]:
        return self.client.watch(
            self.resource,
            self.scope,
            label_selector=self.label_selector,
            field_selector=self.field_selector,
            resource_version=version,
            metadata_only=self.metadata_only,
            server_timeout=server_timeout,
            inactivity_timeout=self.inactivity_timeout,
            pace=self.pace,
        )


class Informer(Generic[T]):
    """A cache of `resource`, through `client`.

    `decode` is the msgspec Struct that the store shall hold (the fast way), or a function from
    JSON to such an object that raises ValueError. `namespaces`: these only, empty for all.
    Selectors as in kubectl. `metadata_only` fetches PartialObjectMetadata. `pace` says for how
    long watch events may gather before they are read: cheaper, and late by as much. `indexes` maps
    names to functions from an object to the values it is filed under.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        decode: Decode[T],
        namespaces: Sequence[str] = (),
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
        pace: Pace = at_once,
        indexes: Mapping[str, Index[T]] | None = None,
        clock: Clock,
        settings: ReflectorSettings = DEFAULTS,
        metrics: ReflectorMetrics = SILENT,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.resource = resource
        self.store: Store[T] = Store(indexes)
        self.view = View(clock, settings)
        self.bad: dict[str, Malformed] = {}
        """Objects that exist but could not be decoded, by key."""
        self._clock = clock
        self._echo_limit = settings.echo_limit
        self._metrics = metrics
        self._log = _log.bind(resource=resource.plural)
        self._handlers: list[Handler[T]] = []
        self._complained: dict[Handler[T], timedelta] = {}
        scopes: list[str | None] = sorted(set(namespaces)) or [None]  # type: ignore[assignment]
        self._unsynced: dict[str | None, str] = dict.fromkeys(scopes, "not listed yet")
        self._refused: set[str | None] = set()
        self._synced = asyncio.Event()
        self._stopped = False
        decoder = EventDecoder(decode)
        self._reflectors: dict[str | None, Reflector[T]] = {}
        for scope in scopes:
            source = _Source(
                client,
                resource,
                scope,
                label_selector,
                field_selector,
                metadata_only,
                settings.inactivity_timeout,
                pace,
            )
            self._reflectors[scope] = Reflector(
                source,
                self,
                decoder,
                self.view.add_watch(source.name, scope),
                clock=clock,
                settings=settings,
                metrics=metrics,
                log=self._log,
                uniform=uniform,
            )
        metrics.observe_event_age(lambda: age(self.view, clock))

    # Using it -----------------------------------------------------------------------------------

    def add_handler(self, handler: Handler[T]) -> None:
        """Call `handler` with each change from now on, and with all that is there already.

        Handlers are called in the order in which they were added, synchronously: they must be
        cheap, and put keys on queues rather than act.
        """
        self._handlers.append(handler)
        now = self._clock.now()
        for obj in self.store.values():
            self._call(handler, Change(obj.key, None, obj, True, now))

    def guard(self, *, bound: timedelta | None = None) -> CacheGuard[T]:
        """The stale-cache guard of this resource. Ask for it before you add handlers."""
        bound = bound or self._echo_limit
        guard = CacheGuard(self.store, self._clock, passed=self.passed, bound=bound)
        self.add_handler(guard.observe)
        return guard

    @property
    def synced(self) -> bool:
        """The first list of every namespace is complete."""
        return self._synced.is_set() and not self._unsynced

    @property
    def refused(self) -> bool:
        """Not synced because the API server refuses what is missing yet: there is no such CRD, or
        we have no rights. An outage that follows says nothing to the contrary."""
        return bool(self._unsynced) and self._unsynced.keys() <= self._refused

    @property
    def sync_error(self) -> str | None:
        """Why the informer is not synced, None when it is."""
        return "; ".join(self._unsynced.values()) or None

    async def wait_synced(self) -> None:
        """Return when synced. Raises NotSynced if the informer stops before."""
        await self._synced.wait()
        if self._unsynced:
            raise NotSynced(f"{self.resource.plural}: {self.sync_error}")

    def passed(self, key: str, version: int) -> bool:
        """Has the store everything up to this resourceVersion that concerns the key?"""
        namespace = key.partition("/")[0] if "/" in key else None
        reflector = self._reflectors.get(namespace) or self._reflectors.get(None)
        return reflector is not None and parse_version(reflector.resource_version) >= version

    async def run(self) -> None:
        """Keep the store equal to the server until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for scope, reflector in self._reflectors.items():
                    name = f"reflector-{self.resource.plural}-{scope or 'all'}"
                    group.create_task(reflector.run(), name=name)
        finally:
            self._synced.set()  # whoever waits learns that it will not come any more

    # The reflectors' sink -----------------------------------------------------------------------

    def put(self, obj: T, now: Now, *, first_sight: bool) -> None:
        """An object as a list or an event shows it."""
        key = obj.key
        old = self.store.get(key)
        if old is not None and _same_version(old, obj):
            return  # shown again after a reconnect or by a re-list
        try:
            self.store.put(obj)
        except Exception as error:  # an index function that this object is too much for
            meta = obj.metadata
            why = f"{type(error).__name__}: {error}"
            bad = Malformed(key, meta.uid, meta.resource_version, why)
            self.malformed(bad, now, first_sight=first_sight)
            return
        if self.bad:
            self.bad.pop(key, None)
        self._tell(Change(key, old, obj, first_sight, now))

    def delete(self, obj: T, now: Now) -> None:
        """An object is gone."""
        old = self.store.get(obj.key)
        if old is not None and old.metadata.uid != obj.metadata.uid:
            return  # a namesake took its place already
        self._drop(obj.key, now, first_sight=False)

    def malformed(self, bad: Malformed, now: Now, *, first_sight: bool) -> None:
        """An object that breaks its schema: absent from now on, with a message per version."""
        known = self.bad.get(bad.key)
        self._drop(bad.key, now, first_sight=first_sight)
        if bad.deleted:
            return
        self.bad[bad.key] = bad
        if known and (known.uid, known.resource_version) == (bad.uid, bad.resource_version):
            return
        self._metrics.bad_object()
        self._log.error(
            "object left out: it does not have the shape of its kind; correct or delete it",
            key=bad.key,
            uid=bad.uid,
            resource_version=bad.resource_version,
            why=bad.why,
        )

    def complete(self, scope: str | None, keys: set[str], now: Now) -> None:
        """A list is complete: delete what it no longer shows, and call this scope synced."""
        known = [*self.store.keys(), *self.bad]
        for key in known if scope is None else [k for k in known if k.startswith(f"{scope}/")]:
            if key not in keys:
                self._drop(key, now, first_sight=True)
        if self._unsynced.pop(scope, None) is not None and not self._unsynced:
            self._synced.set()
            self._log.info("cache synced", objects=len(self.store), left_out=len(self.bad))

    def failing(self, scope: str | None, why: str, *, refused: bool) -> None:
        """An attempt failed; `refused`: by a server that is well."""
        if scope in self._unsynced:
            self._unsynced[scope] = why
            if refused:
                self._refused.add(scope)

    def _drop(self, key: str, now: Now, *, first_sight: bool) -> None:
        self.bad.pop(key, None)
        old = self.store.remove(key)
        if old is not None:
            self._tell(Change(key, old, None, first_sight, now))

    def _tell(self, change: Change[T]) -> None:
        for handler in self._handlers:
            self._call(handler, change)

    def _call(self, handler: Handler[T], change: Change[T]) -> None:
        try:
            handler(change)
        except Exception:  # isolated: the other handlers and the cache go on
            last = self._complained.get(handler)
            if last is None or change.at.mono - last >= _HANDLER_LOG_INTERVAL:
                self._complained[handler] = change.at.mono
                self._log.exception(
                    "a handler broke: this is a bug, please report it", key=change.key
                )


def _same_version(old: T, new: T) -> bool:
    before, after = old.metadata, new.metadata
    return before.resource_version == after.resource_version and before.uid == after.uid
