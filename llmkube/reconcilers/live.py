"""Live reads: one object from the API server, in the shape that the caches keep.

Before a demotion the evidence is read live, and how that goes says something by itself. An API
server that hangs leaves our streams open and silent: it takes nobody's heartbeat, and its late
answer is the old one. So `Evidence` reports a late answer, or none, as an outage of our sight, and
the calm rule does the rest. (The client tells of late answers to whatever else we ask, see
`KubeClient.add_late_listener`; it cannot know how short the timeout is that is to be judged.) Read
`informers.view` for what becomes of that.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Generic, TypeVar

import msgspec

from llmkube.api.cached import CachedMeta, CachedObject
from llmkube.clock import Clock
from llmkube.informers.guard import parse_version
from llmkube.informers.informer import Informer
from llmkube.informers.view import WatchView
from llmkube.informers.worker import TerminalError
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound, Unavailable
from llmkube.kube.resources import Resource

K = TypeVar("K", bound=CachedObject)

LATE = 10
"""An answer is late after a tenth of the timeout that is about to be judged. An outage counts from
a third of it on, but the answer may come as soon as the API server is back, and senders need more
time than that to come back themselves."""


async def read_live(client: KubeClient, resource: Resource, kind: type[K], key: str) -> K | None:
    """The object `key` ("namespace/name", or "name" of a cluster-scoped one), None if there is
    none. For CachedMeta only metadata is fetched. Raises ApiError; TerminalError if the object
    has not the shape of its kind.
    """
    namespace, _, name = key.rpartition("/")
    try:
        found = await client.get(
            resource, name, namespace or None, metadata_only=kind is CachedMeta
        )
    except NotFound:
        return None
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise TerminalError(
            f"{resource.kind} {key} has not the shape of its kind ({error}): correct or delete it"
        ) from error


def overtaken(informer: Informer[K], found: K) -> bool:
    """Whether the watch has meanwhile shown at least as much of that object as a live read found.

    An answer can be on its way for longer than an event. Then the cache is to be believed, even if
    it lacks the object: what was found is deleted by now.
    """
    version = parse_version(found.metadata.resource_version)
    if not version:
        return False
    cached = informer.store.get(found.key)
    if cached is not None and parse_version(cached.metadata.resource_version) >= version:
        return True
    return informer.passed(found.key, version)


class Evidence(Generic[K]):
    """Live reads of the objects that demotions rest on, through `client`."""

    def __init__(
        self, client: KubeClient, informer: Informer[K], kind: type[K], clock: Clock
    ) -> None:
        self._client = client
        self._informer = informer
        self._kind = kind
        self._clock = clock
        self._asked: dict[object, timedelta] = {}
        # when each read under way was sent, oldest first

    async def read(self, key: str, timeout: timedelta) -> K | None:
        """What the API server says, None if there is no such object; `timeout` is the sender's.

        Raises ApiError, and TerminalError like `read_live`.
        """
        heard = [(watch, watch.heard_at) for watch in self._informer.view.watches]
        me = object()
        self._asked[me] = self._clock.monotonic()
        try:
            found = await read_live(self._client, self._informer.resource, self._kind, key)
        except Unavailable:
            self._stalled(heard)
            raise
        else:
            if self._clock.monotonic() - self._oldest() > timeout / LATE:
                self._stalled(heard)
            return found
        finally:
            del self._asked[me]

    def _oldest(self) -> timedelta:
        """Since when something is asked and not answered: who asks last is answered with the
        others, and must not take that for promptness."""
        return next(iter(self._asked.values()))

    def _stalled(self, heard: list[tuple[WatchView, timedelta | None]]) -> None:
        """Whatever we watch, the outage began with the last sign of life before the question."""
        now, asked = self._clock.monotonic(), self._oldest()
        for watch, at in heard:
            watch.stalled(asked if at is None else min(at, asked), now)
