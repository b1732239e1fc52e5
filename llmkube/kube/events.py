"""Events for people: what changed and what to do, as events.k8s.io/v1.

`EventRecorder.event` never blocks and never fails: it notes the Event down, and `run` writes it
when the API server takes it. Events are a courtesy: one that cannot be written is dropped and
counted, never repeated for ever. What is aggregated and limited, and how, is `event_series`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from llmkube.clock import ZERO, Clock
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import (
    AlreadyExists,
    ApiError,
    NotFound,
    NotLeader,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from llmkube.kube.event_series import EventBook, ObjectRef, Saying, Series, clean_note
from llmkube.kube.resources import EVENTS
from llmkube.log import get_logger

__all__ = ["EventRecorder", "ObjectRef"]

GIVE_UP_AFTER = timedelta(minutes=10)
"""An Event that the API server could not take for so long says nothing new any more."""
PAUSE = timedelta(seconds=5)
"""After the API server was busy or away."""

log = get_logger(__name__)


class EventRecorder:
    """Records Events in the name of one component.

    `component` is the reportingController (for example "llmkube-controller"), `instance` the
    process. Writing goes through the client's write gate.
    """

    def __init__(self, client: KubeClient, clock: Clock, component: str, instance: str) -> None:
        self._client = client
        self._clock = clock
        self._component = component
        self._instance = instance
        self._book = EventBook()
        self._news = asyncio.Event()
        self._not_before = ZERO
        self._writing = asyncio.Lock()

    @property
    def dropped(self) -> int:
        """How many Events were not told: over a limit, or refused by the API server."""
        return self._book.dropped

    def event(
        self,
        regarding: ObjectRef,
        type: str,  # noqa: A002 - the API's own word
        reason: str,
        action: str,
        note: str,
    ) -> None:
        """Note down an Event. `type` is Normal or Warning; `note` says what to do."""
        saying = Saying(regarding.uid, str(type), str(reason), str(action), clean_note(note))
        if self._book.say(regarding, saying, self._clock.now()):
            self._news.set()

    async def run(self) -> None:
        """Write Events until cancelled."""
        while True:
            self._news.clear()
            await self.flush()
            await self._wait()

    async def flush(self) -> None:
        """Write what is due now, unless the API server is busy or away. Never raises ApiError.

        May be called while `run` writes, too: for the last Events before a stop.
        """
        async with self._writing:
            now = self._clock.monotonic()
            for series in self._book.ready(now):
                if now < self._not_before:
                    return
                await self._write(series)

    async def _wait(self) -> None:
        """Until there is something to write: news, or a series whose time has come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._until_due()):
                await self._news.wait()

    def _until_due(self) -> float | None:
        due = self._book.next_due()
        if due is None:
            return None
        wait = max(due, self._not_before) - self._clock.monotonic()
        return max(wait, ZERO).total_seconds()

    async def _write(self, series: Series) -> None:
        count = series.count
        try:
            await self._send(series)
        except (Unavailable, TooManyRequests, Unauthorized) as error:
            self._later(series, error)
        except NotLeader:  # whoever leads now sees for itself what there is to tell
            self._book.give_up(series)
        except ApiError as error:
            log.warning(
                "event refused",
                reason=series.saying.reason,
                object=series.regarding.name,
                why=error.message,
            )
            self._book.give_up(series)
        else:
            self._book.wrote(series, count, self._clock.monotonic())

    async def _send(self, series: Series) -> None:
        namespace = series.regarding.event_namespace
        if series.written:
            try:
                await self._client.merge_patch(EVENTS, series.name, namespace, series.patch())
                return
            except NotFound:  # Events expire after an hour
                series.rename()
        body = series.body(self._component, self._instance)
        try:
            await self._client.create(EVENTS, body)
        except AlreadyExists:  # our own, sent before a broken connection
            return

    def _later(self, series: Series, error: ApiError) -> None:
        now = self._clock.monotonic()
        self._not_before = now + max(PAUSE, error.retry_after or ZERO)
        if now - series.last_mono > GIVE_UP_AFTER:
            self._book.give_up(series)
