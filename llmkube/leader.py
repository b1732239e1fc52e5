"""Leader election on a Lease: at most one process writes at a time, as far as a Lease can promise.

A candidate trusts no foreign clock: it notes on its own monotonic clock when it *saw* the record
change, and takes over only when the record's own duration has passed since then. The leader counts
its renew deadline from the moment it *sent* the last successful renewal, on a clock that runs
through suspend, and that is shorter than what candidates wait. `check_can_write` is asked before
each write (`KubeClient.write_gate`), so a process that was stopped or suspended past its deadline
starts none; what it had already sent fails by resourceVersion.

Losing the lease ends nothing but the work: `run` stops it, and contends again. First come the
values and rules, then the loop. The semantics are client-go's (tools/leaderelection).
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any

from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO, Clock, Now
from llmkube.kube.client import KubeClient, Object
from llmkube.kube.errors import AlreadyExists, ApiError, Conflict, NotFound, NotLeader
from llmkube.kube.resources import LEASES
from llmkube.log import get_logger
from llmkube.metrics import LeaderMetrics

JITTER = 1.2
"""A candidate waits up to this much longer than the retry period, so that they do not march."""

log = get_logger(__name__)


# Values and rules ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """How long things take. Raises ValueError where they could not work together."""

    lease_duration: timedelta = timedelta(seconds=15)
    """How long candidates wait after the last sign of life; written in whole seconds."""
    renew_deadline: timedelta = timedelta(seconds=10)
    """How long the leader leads without a successful renewal."""
    retry_period: timedelta = timedelta(seconds=2)
    stop_timeout: timedelta = timedelta(seconds=10)
    """How long the work may take to stop once leadership is lost."""
    release_timeout: timedelta = timedelta(seconds=1)
    """How long a leader that leaves tries to free the lease; if that fails, it expires."""

    def __post_init__(self) -> None:
        if self.lease_duration <= self.renew_deadline:
            raise ValueError("the lease duration must be longer than the renew deadline")
        if self.renew_deadline <= JITTER * self.retry_period:
            raise ValueError(f"the renew deadline must exceed {JITTER} times the retry period")
        if min(self.retry_period, self.stop_timeout, self.release_timeout) <= ZERO:
            raise ValueError("the retry period and the timeouts must be positive")

    @property
    def attempt_timeout(self) -> timedelta:
        """For one renewal: a second one, on a new connection, must still fit."""
        return self.renew_deadline / 2


@dataclass(frozen=True, slots=True)
class Record:
    """What a Lease says about its holder. Nonsense in a Lease reads as absent."""

    holder: str
    duration: timedelta
    renewed: str
    transitions: int

    @staticmethod
    def of(lease: Object) -> Record:
        spec = lease.get("spec") or {}
        seconds, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
        return Record(
            holder=str(spec.get("holderIdentity") or ""),
            duration=timedelta(seconds=seconds if isinstance(seconds, int) else 0),
            renewed=str(spec.get("renewTime") or ""),
            transitions=transitions if isinstance(transitions, int) else 0,
        )


@dataclass(slots=True)
class Observation:
    """The record as this candidate last saw it change, on its own monotonic clock."""

    record: Record | None = None
    changed_at: timedelta = field(default=ZERO)

    def see(self, record: Record, mono: timedelta) -> None:
        """Any change counts as a sign of life, whatever its stamp says."""
        if record != self.record:
            self.record, self.changed_at = record, mono

    def is_free(self, identity: str, mono: timedelta) -> bool:
        """Whether `identity` may take the lease: nobody holds it, it does itself, or the holder
        showed no life for the duration it promised."""
        if self.record is None or self.record.holder in ("", identity):
            return True
        return mono - self.changed_at > self.record.duration


def claimed(lease: Object, identity: str, now: Now, settings: LeaderSettings) -> Object:
    """The Lease as its holder writes it: taken over, or renewed if `identity` holds it."""
    record, stamp = Record.of(lease), format_micro_time(now.wall)
    spec = {
        **(lease.get("spec") or {}),
        "holderIdentity": identity,
        "leaseDurationSeconds": math.ceil(settings.lease_duration.total_seconds()),
        "renewTime": stamp,
    }
    if record.holder != identity:
        spec["acquireTime"] = stamp
        spec["leaseTransitions"] = record.transitions + 1 if "spec" in lease else 0
    return {**lease, "spec": spec}


def released(lease: Object, now: Now) -> Object:
    """The Lease as a leader leaves it: free, so that the next one need not wait."""
    stamp = format_micro_time(now.wall)
    spec = {
        **(lease.get("spec") or {}),
        "holderIdentity": "",
        "leaseDurationSeconds": 1,
        "renewTime": stamp,
        "acquireTime": stamp,
    }
    return {**lease, "spec": spec}


def process_identity() -> str:
    """A name that no other process has, and that tells people where this one runs."""
    return f"{socket.gethostname()}_{uuid.uuid4()}"


# The loop --------------------------------------------------------------------------------------


class Renewal(Enum):
    """How one attempt to renew ended."""

    DONE = auto()
    FAILED = auto()
    LOST = auto()


class LeaderElector:
    """One contender for one Lease. `run` it in a task; ask `check_can_write` before each write."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        name: str,
        identity: str,
        settings: LeaderSettings,
        metrics: LeaderMetrics | None = None,
    ) -> None:
        self._client = client.ungated()  # the gate asks us
        self._clock = clock
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._settings = settings
        self._metrics = metrics
        self._observed = Observation()
        self._lease: Object = {}
        self._deadline: timedelta | None = None
        self._log = log.bind(lease=f"{namespace}/{name}", identity=identity)
        self._report(leading=False)

    @property
    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._deadline is not None and self._clock.boottime() < self._deadline

    def check_can_write(self) -> None:
        """Raises NotLeader if this process does not lead, or has not renewed in time."""
        if not self.is_leader:
            raise NotLeader(f"{self._identity} does not hold the lease {self._name} (any more)")

    async def run(self, on_lead: Callable[[], Awaitable[None]]) -> None:
        """Contend, lead, step down, and contend again, until cancelled.

        `on_lead` is run while this process leads and cancelled when it no longer does. If it
        fails, the lease is released and its error raised. Raises RuntimeError if the work does
        not stop in time: only the end of the process is safe then.
        """
        while True:
            await self._acquire()
            await self._lead(on_lead)

    # Becoming the leader -----------------------------------------------------------------------

    async def _acquire(self) -> None:
        trouble = ""
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_deadline.total_seconds()):
                    if await self._try_acquire():
                        return
                trouble = ""
            except (ApiError, TimeoutError) as error:
                if str(error) != trouble:
                    self._log.warning("cannot contend for the lease", why=str(error) or "timeout")
                trouble = str(error)
            pause = self._settings.retry_period * (1 + JITTER * random.random())  # noqa: S311
            await asyncio.sleep(pause.total_seconds())

    async def _try_acquire(self) -> bool:
        lease = await self._read()
        if lease is None:
            return await self._write(self._client.create, self._new_lease())
        self._observed.see(Record.of(lease), self._clock.monotonic())
        if not self._observed.is_free(self._identity, self._clock.monotonic()):
            return False
        return await self._write(self._client.update, lease)

    async def _read(self) -> Object | None:
        try:
            return await self._client.get(LEASES, self._name, self._namespace)
        except NotFound:
            return None

    def _new_lease(self) -> Object:
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
        }

    async def _write(self, verb: Callable[[Any, Object], Awaitable[Object]], lease: Object) -> bool:
        """Claim the lease; False if another was faster. The deadline counts from the sending."""
        sent_at = self._clock.boottime()
        body = claimed(lease, self._identity, self._clock.now(), self._settings)
        try:
            self._lease = await verb(LEASES, body)
        except (Conflict, AlreadyExists):
            return False
        self._deadline = sent_at + self._settings.renew_deadline
        return True

    # Leading -----------------------------------------------------------------------------------

    async def _lead(self, on_lead: Callable[[], Awaitable[None]]) -> None:
        self._log.info("leading", transitions=Record.of(self._lease).transitions)
        self._report(leading=True)
        work = asyncio.ensure_future(on_lead())
        try:
            await self._renew_until_lost(work)
        finally:
            ended = work.done()
            await self._stop(work)
            left = ZERO if self._deadline is None else self._deadline - self._clock.boottime()
            self._deadline = None
            self._report(leading=False)
            if left > ZERO:
                await self._release(min(left, self._settings.release_timeout))
            self._log.info("not leading any more")
        if ended:
            work.result()

    async def _renew_until_lost(self, work: asyncio.Future[None]) -> None:
        """Return when the work has ended by itself, or the lease is lost."""
        while True:
            await asyncio.wait({work}, timeout=self._settings.retry_period.total_seconds())
            if work.done():
                return
            match await self._renew():
                case Renewal.LOST:
                    return
                case Renewal.FAILED if not self.is_leader:
                    self._log.warning("lease lost: not renewed within the deadline")
                    return

    async def _renew(self) -> Renewal:
        """One attempt, bounded so that it ends by the deadline."""
        assert self._deadline is not None
        left = self._deadline - self._clock.boottime()
        if left <= ZERO:
            return Renewal.FAILED
        try:
            async with asyncio.timeout(min(left, self._settings.attempt_timeout).total_seconds()):
                return await self._renew_or_look()
        except NotFound:
            self._log.warning("lease lost: it was deleted")
            return self._lost()
        except (ApiError, TimeoutError) as error:
            self._log.warning("lease not renewed, trying again", why=str(error) or "no answer")
            return Renewal.FAILED

    async def _renew_or_look(self) -> Renewal:
        """Renew without reading first; if the Lease has changed, look who holds it."""
        if await self._write(self._client.update, self._lease):
            return Renewal.DONE
        if self._metrics is not None:
            self._metrics.slow_path()
        lease = await self._client.get(LEASES, self._name, self._namespace)
        self._observed.see(Record.of(lease), self._clock.monotonic())
        holder = Record.of(lease).holder
        if holder != self._identity:
            self._log.warning("lease lost: another holds it", holder=holder)
            return self._lost()
        # Someone edited it, or the answer to our own last renewal was lost.
        renewed = await self._write(self._client.update, lease)
        return Renewal.DONE if renewed else Renewal.FAILED

    def _lost(self) -> Renewal:
        self._deadline = None  # closes the gate at once
        return Renewal.LOST

    # Stepping down -----------------------------------------------------------------------------

    async def _stop(self, work: asyncio.Future[None]) -> None:
        """Cancel the work and wait until it has ended."""
        work.cancel()
        stopped, running = await asyncio.wait(
            {work}, timeout=self._settings.stop_timeout.total_seconds()
        )
        if running:
            self._deadline = None
            raise RuntimeError("the work did not stop after leadership ended; ending the process")
        for task in stopped:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._log.warning("the work failed while stopping", why=repr(error))

    async def _release(self, within: timedelta) -> None:
        """Leave the lease free, now that nothing of the work runs. If that fails, it expires."""
        try:
            async with asyncio.timeout(within.total_seconds()):
                await self._client.update(LEASES, released(self._lease, self._clock.now()))
        except (ApiError, TimeoutError) as error:
            self._log.info("lease not released, it will expire", why=str(error) or "timeout")

    def _report(self, *, leading: bool) -> None:
        if self._metrics is not None:
            self._metrics.leading(leading)
