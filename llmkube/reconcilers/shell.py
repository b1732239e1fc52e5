"""The shell round every reconciler: observe → decide → apply.

A reconciler says what it sees (`observe`), what that means (`decide`, pure) and, if the status is
not all there is to do, what else follows (`act`). The shell does the rest, alike for all:

* it decides on a cache only if that shows our own last write, else on a live read (`guard`);
* a decision that demotes is made once more on what a live read of the evidence says;
* a status is written only if it changes something; a 409 means: read live and decide again;
* Events go out after the write that they tell of, so that a failed write announces nothing;
* the key comes back at `wake_at`, even if the API server refuses its status.

Errors leave it as they are: `informers.worker` owns the retry policy. Read `status` for how a
status is written, then `federatedcluster`, the simplest of the reconcilers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Flag, auto
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from llmkube.clock import Clock, Now
from llmkube.informers.guard import CacheGuard, Freshness
from llmkube.informers.worker import Outcome, TerminalError
from llmkube.kube.errors import Conflict, Invalid, NotFound
from llmkube.kube.events import EventRecorder
from llmkube.reconcilers.status import Fields, StatusWriter, Target
from llmkube.rules.decision import Decision, EventNote

ATTEMPTS = 5
"""How often one run decides before it leaves the key to the worker's back-off."""


class Live(Flag):
    """What `observe` must read from the API server rather than from the caches."""

    NOTHING = 0
    TARGET = auto()
    """The object that is written: its cached copy is known to be old."""
    EVIDENCE = auto()
    """The objects that a demotion rests on."""


class Observed(Protocol):
    """One frozen value with all that a decision needs."""

    @property
    def target(self) -> Target: ...


S = TypeVar("S", bound=Observed)
D = TypeVar("D", bound=Decision)


class Applied(msgspec.Struct, Generic[S, D], frozen=True, gc=False):
    """A decision that was carried out as far as the status goes.

    `target` is the object after the write, or as observed if `wrote` is false.
    """

    seen: S
    decision: D
    target: Target
    wrote: bool
    now: Now


class Shell(ABC, Generic[S, D]):
    """One reconciler. Subclasses give `observe` and `decide`, and may give `act` and `forget`."""

    def __init__(
        self,
        *,
        clock: Clock,
        writer: StatusWriter,
        recorder: EventRecorder,
        guard: CacheGuard[Any],
    ) -> None:
        self.clock = clock
        self.writer = writer
        self.recorder = recorder
        self.guard = guard

    @abstractmethod
    async def observe(self, key: str, now: Now, live: Live) -> S | None:
        """What there is to know of `key`; None if the object is gone. Raises ApiError."""

    @abstractmethod
    def decide(self, seen: S, now: Now) -> D:
        """What that means. Pure: usually one call into `llmkube.rules`."""

    async def act(self, applied: Applied[S, D]) -> None:
        """What is to be done after the status is written. Raises ApiError: the run is repeated,
        so whatever is done here must be safe to find half done."""

    def forget(self, key: str) -> None:
        """The object is gone: drop what was remembered of it."""

    async def reconcile(self, key: str) -> Outcome:
        """One run. Raises ApiError, TerminalError."""
        live = Live.NOTHING
        if await self.guard.wait_fresh(key) is Freshness.READ_LIVE:
            live |= Live.TARGET
        for _ in range(ATTEMPTS):
            now = self.clock.now()
            seen = await self.observe(key, now, live)
            if seen is None:
                self.forget(key)
                return Outcome()
            decision = self.decide(seen, now)
            if decision.confirm_live and Live.EVIDENCE not in live:
                live |= Live.EVIDENCE
                continue
            try:
                return await self._apply(key, seen, decision, now)
            except Conflict:
                live |= Live.TARGET
            except TerminalError as error:  # what was refused must not cost the next deadline
                raise TerminalError(str(error), wake_at=decision.wake_at) from error
        raise Conflict(f"{key} changes faster than its status can be written", status=409)

    async def _apply(self, key: str, seen: S, decision: D, now: Now) -> Outcome:
        target, wrote = seen.target, False
        wanted = None if decision.status is None else self.writer.part(decision.status)
        if wanted is not None and self.writer.differs(target, wanted):
            try:
                target, wrote = await self.write(target, wanted), True
            except NotFound:  # it went while we decided; its deletion is on its way to us
                self.forget(key)
                return Outcome()
        for event in decision.events:
            self.announce(target, event)
        await self.act(Applied(seen, decision, target, wrote, now))
        return Outcome(decision.wake_at)

    async def write(self, target: Target, wanted: Fields) -> Target:
        """Write this owner's complete part. Raises ApiError, TerminalError."""
        try:
            written = await self.writer.write(target, wanted)
        except Invalid as error:
            raise TerminalError(
                f"the API server refuses the status of {target.key}: {error.message}; is the "
                "installed CRD older than this controller? Apply config/crd again"
            ) from error
        self.guard.wrote(target.key, target.uid, written.resource_version)
        return written

    def announce(self, target: Target, event: EventNote) -> None:
        """Raise an Event about the target."""
        self.recorder.event(
            target.ref(self.writer.ownership.resource),
            event.type,
            event.reason,
            event.action,
            event.note,
        )
