"""Heartbeats of Macs mirrored into their MetalNodes: the reconciler `heartbeat`.

It owns AgentConnected, lastHeartbeatTime, agentVersion and capacity. Each renewal of a Lease is
seen by a handler that only writes the liveness book; a reconcile runs when something may have to
change: a Mac that was not connected beats, lastHeartbeatTime is more than a minute off (and the
last write more than a minute ago), a deadline passes, an account or a Lease comes or goes. So in
steady state a Mac costs one status write a minute or less, and no other request.

Read `rules.heartbeat` for the rule and `shell` for how a decision is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from sys import intern

import msgspec

from llmkube.api.cached import CachedLease, CachedMeta, CachedMetalNode
from llmkube.api.names import ConditionType, ConnectedReason, FieldManager
from llmkube.api.times import parse_time
from llmkube.clock import ZERO, Clock, Now
from llmkube.informers.guard import CacheGuard
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.informers.store import Change, Index
from llmkube.kube.client import KubeClient
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import METALNODES, SERVICEACCOUNTS
from llmkube.reconcilers.book import LivenessBook
from llmkube.reconcilers.live import Evidence, overtaken, read_live
from llmkube.reconcilers.mirrors import MirrorCache
from llmkube.reconcilers.shell import Applied, Live, Shell
from llmkube.reconcilers.status import Ownership, StatusWriter, Target
from llmkube.reconcilers.watchfulness import Announced, Deferred
from llmkube.rules.calm import FOREVER
from llmkube.rules.decision import Decision
from llmkube.rules.heartbeat import (
    Account,
    HeartbeatFacts,
    HeartbeatSettings,
    decide_heartbeat,
    mirror_is_off,
    write_allowed_at,
)
from llmkube.rules.liveness import Record, Sighting, skewed

NAME = "heartbeat"
OWNERSHIP = Ownership(
    METALNODES,
    FieldManager.HEARTBEAT,
    fields=("lastHeartbeatTime", "agentVersion", "capacity"),
    conditions=(ConditionType.AGENT_CONNECTED,),
)

_BY_LEASE = "lease"
_BY_ACCOUNT = "account"


def _lease_key(node: CachedMetalNode) -> str:
    return intern(f"{node.metadata.namespace}/{node.spec.lease_name}")


def _account_key(node: CachedMetalNode) -> str:
    return intern(f"{node.metadata.namespace}/{node.spec.service_account_name}")


METALNODE_INDEXES: Mapping[str, Index[CachedMetalNode]] = {
    _BY_LEASE: lambda node: (_lease_key(node),),
    _BY_ACCOUNT: lambda node: (_account_key(node),),
}
"""The indexes that the informer of MetalNodes must keep for this reconciler."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The informers that the reconciler reads; MetalNodes with METALNODE_INDEXES."""

    metalnodes: Informer[CachedMetalNode]
    leases: Informer[CachedLease]
    accounts: Informer[CachedMeta]


class Seen(msgspec.Struct, frozen=True, gc=False):
    target: Target
    facts: HeartbeatFacts


class HeartbeatReconciler(Shell[Seen, Decision]):
    """See the module. `attach` it to the informers, then give `reconcile` to workers."""

    def __init__(
        self,
        client: KubeClient,
        sources: Sources,
        queue: WorkQueue,
        recorder: EventRecorder,
        guard: CacheGuard[CachedMetalNode],
        clock: Clock,
        settings: HeartbeatSettings | None = None,
    ) -> None:
        super().__init__(
            clock=clock,
            writer=StatusWriter(client, OWNERSHIP),
            recorder=recorder,
            guard=guard,
        )
        self._client = client
        self._nodes = sources.metalnodes
        self._leases = sources.leases
        self._accounts = sources.accounts
        self._evidence = Evidence(client, sources.leases, CachedLease, clock)
        self._queue = queue
        self._settings = settings or HeartbeatSettings()
        self.book = LivenessBook(self._settings.trust)
        """By Lease."""
        self._mirrors = MirrorCache()
        self._announced = Announced(self.book)
        self._deferred = Deferred(queue, sources.leases.view)
        self._last_writes: dict[str, timedelta] = {}

    def attach(self) -> None:
        """Start observing, in the leader and in its followers. Call once."""
        self._leases.add_handler(self._lease_changed)
        self._accounts.add_handler(self._account_changed)
        self._nodes.add_handler(self._node_changed)

    def enqueue_all(self) -> None:
        """Decide on every Mac anew: for a new leader, whose timers have yet to be set."""
        for key in self._nodes.store.keys():  # noqa: SIM118 - a store is no dict
            self._queue.add(key, initial=True)

    def record_of(self, node: CachedMetalNode) -> Record | None:
        """What was seen of a Mac's heartbeats."""
        return self.book.get(_lease_key(node))

    # Watching: the hot path is a renewal that changes nothing -------------------------------------

    def _lease_changed(self, change: Change[CachedLease]) -> None:
        new, now = change.new, change.at
        if new is None:
            self.book.forget(change.key)
            self._mirrors.forget(change.key)
            self._announced.forget(change.key)
            before = after = None
        else:
            before = self.book.get(change.key)
            late = self._leases.view.catching_up(change.key, now.mono)
            sighting = self._sighting(new, first_sight=change.first_sight, late=late)
            after = self.book.observe(new.metadata, sighting, now)
            if after is before and change.old is not None:
                return  # no new stamp: not a heartbeat
        for node in self._nodes.store.by_index(_BY_LEASE, change.key):
            at = self._due(node, change.key, before, after, now)
            if at is None:
                continue
            if at <= now.mono:
                self._queue.add(node.key, initial=change.first_sight)
            else:
                self._queue.add_at(node.key, at)

    def _sighting(self, lease: CachedLease, *, first_sight: bool, late: bool) -> Sighting:
        return Sighting(
            uid=lease.metadata.uid,
            stamp=parse_time(lease.spec.renew_time),
            period=self._settings.timeout(lease.spec.lease_duration_seconds),
            first_sight=first_sight,
            late=late,
        )

    def _due(
        self,
        node: CachedMetalNode,
        lease: str,
        before: Record | None,
        after: Record | None,
        now: Now,
    ) -> timedelta | None:
        """When to reconcile a MetalNode whose Lease was just seen to change; None: not for that."""
        if before is None or after is None or before.uid != after.uid:
            return now.mono
        condition = node.status.condition(ConditionType.AGENT_CONNECTED)
        if condition is None or condition.status != "True":
            return None if self._revoked(node) else now.mono
        if after.period != before.period or after.reference < before.reference:
            return now.mono  # the timer may be set too late
        if skewed(after, self._settings.trust) is not self._announced.has(lease, after.uid):
            return now.mono
        if mirror_is_off(after.stamp, node.status.last_heartbeat_time, self._settings):
            return write_allowed_at(self._last_writes.get(node.key), now, self._settings)
        return None

    def _account_changed(self, change: Change[CachedMeta]) -> None:
        if change.old is None or change.new is None:
            for node in self._nodes.store.by_index(_BY_ACCOUNT, change.key):
                self._queue.add(node.key, initial=change.first_sight)

    def _node_changed(self, change: Change[CachedMetalNode]) -> None:
        old, new = change.old, change.new
        if new is None:
            self.forget(change.key)
            return
        written = old is not None and _ours(old) != _ours(new)
        if written and not change.first_sight:  # by us, or by the leader before us
            self._last_writes[change.key] = change.at.mono
        if old is None or (
            (written or _identity(old) != _identity(new)) and not self._is_right(new, change.at)
        ):
            self._queue.add(change.key, initial=change.first_sight)

    def _is_right(self, node: CachedMetalNode, now: Now) -> bool:
        """Whether the status says of a beating Mac what it should: for example because we have
        just written that. The run that wrote it has set the timer."""
        condition = node.status.condition(ConditionType.AGENT_CONNECTED)
        record = self.record_of(node)
        return (
            condition is not None
            and condition.reason == ConnectedReason.HEARTBEAT_RECEIVED
            and condition.status == "True"
            and condition.observed_generation == node.metadata.generation
            and record is not None
            and record.improves
            and now.mono <= record.reference + record.period
            and _account_key(node) in self._accounts.store
            and not mirror_is_off(record.stamp, node.status.last_heartbeat_time, self._settings)
        )

    # Reconciling --------------------------------------------------------------------------------

    async def observe(self, key: str, now: Now, live: Live) -> Seen | None:
        node = self._nodes.store.get(key)
        if Live.TARGET in live:
            node = await read_live(self._client, METALNODES, CachedMetalNode, key)
        if node is None:
            return None
        lease_key = _lease_key(node)
        lease, record = await self._lease(lease_key, live)
        period = self._settings.default_timeout if record is None else record.period
        facts = HeartbeatFacts(
            node=node,
            lease_exists=lease is not None,
            record=record,
            account=await self._account(node, live),
            mirror=self._mirrors.get(lease_key, None if lease is None else lease.report),
            calm_until=self._leases.view.sight_of(key).calm_until(period, ZERO),
            last_write=self._last_writes.get(key),
            skew_announced=record is not None and self._announced.has(lease_key, record.uid),
        )
        return Seen(Target.of(node, node.status), facts)

    async def _lease(self, key: str, live: Live) -> tuple[CachedLease | None, Record | None]:
        lease = None
        if Live.EVIDENCE in live:
            known = self.book.get(key)
            timeout = self._settings.default_timeout if known is None else known.period
            lease = await self._evidence.read(key, timeout)
            if lease is None:
                return None, None
        if lease is None or overtaken(self._leases, lease):
            lease = self._leases.store.get(key)
            return lease, None if lease is None else self.book.get(key)
        sighting = self._sighting(lease, first_sight=False, late=True)
        return lease, self.book.observe_live(lease.metadata, sighting, self.clock.now())

    async def _account(self, node: CachedMetalNode, live: Live) -> Account:
        key = _account_key(node)
        if not self._accounts.synced or key in self._accounts.store:
            return Account.PRESENT
        if Live.EVIDENCE in live:
            found = await read_live(self._client, SERVICEACCOUNTS, CachedMeta, key)
            return Account.MISSING if found is None else Account.PRESENT
        # What a live read has said once holds until the cache says otherwise.
        return Account.MISSING if self._revoked(node) else Account.UNSEEN

    def _revoked(self, node: CachedMetalNode) -> bool:
        """Whether the status says that the account is missing, and the cache still agrees."""
        condition = node.status.condition(ConditionType.AGENT_CONNECTED)
        return (
            condition is not None
            and condition.reason == ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND
            and _account_key(node) not in self._accounts.store
        )

    def decide(self, seen: Seen, now: Now) -> Decision:
        return decide_heartbeat(seen.facts, now, self._settings)

    async def act(self, applied: Applied[Seen, Decision]) -> None:
        key, record = applied.target.key, applied.seen.facts.record
        if applied.wrote:
            self._last_writes[key] = applied.now.mono
        if record is not None:
            lease = _lease_key(applied.seen.facts.node)
            self._announced.note(lease, record.uid, skewed(record, self._settings.trust))
        blind = applied.seen.facts.calm_until == FOREVER
        self._deferred.note(key, applied.decision.wake_at, blind=blind)

    def forget(self, key: str) -> None:
        self._last_writes.pop(key, None)
        self._queue.forget(key)


def _identity(node: CachedMetalNode) -> tuple[object, ...]:
    """Which MetalNode it is, and which version of its spec."""
    return node.metadata.uid, node.metadata.generation


def _ours(node: CachedMetalNode) -> tuple[object, ...]:
    """What this reconciler has written into a MetalNode: not what the verification writes."""
    status = node.status
    return (
        status.condition(ConditionType.AGENT_CONNECTED),
        status.last_heartbeat_time,
        status.agent_version,
        status.capacity,
    )
