"""The phase of every edge cluster, kept true: the reconciler `federatedcluster`.

It owns `status.phase` and cannot touch another field. Each push of an edge is seen by a handler,
which only writes the liveness book: a connected site that pushes in time costs no reconcile at all,
because the one timer it has re-arms itself when it fires. A reconcile runs when something may have
to change: a site that was silent pushes, a deadline passes, our own sight returns.

Read `rules.phase` for the rule and `shell` for how a decision is carried out.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from llmkube.api.cached import CachedFederatedCluster
from llmkube.api.names import FieldManager, Phase
from llmkube.api.times import parse_time
from llmkube.clock import Clock, Now
from llmkube.informers.guard import CacheGuard
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.informers.store import Change
from llmkube.kube.client import KubeClient
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import FEDERATEDCLUSTERS
from llmkube.reconcilers.book import LivenessBook
from llmkube.reconcilers.live import Evidence, overtaken
from llmkube.reconcilers.shell import Applied, Live, Shell
from llmkube.reconcilers.status import Ownership, StatusWriter, Target
from llmkube.reconcilers.watchfulness import Announced, Deferred
from llmkube.rules.decision import Decision
from llmkube.rules.liveness import Record, Sighting, skewed
from llmkube.rules.phase import PhaseFacts, PhaseSettings, decide_phase

NAME = "federatedcluster"
OWNERSHIP = Ownership(FEDERATEDCLUSTERS, FieldManager.HUB, fields=("phase",))


class Seen(msgspec.Struct, frozen=True, gc=False):
    target: Target
    facts: PhaseFacts


class FederatedClusterReconciler(Shell[Seen, Decision]):
    """See the module. `attach` it to the informer, then give `reconcile` to workers."""

    def __init__(
        self,
        client: KubeClient,
        clusters: Informer[CachedFederatedCluster],
        queue: WorkQueue,
        recorder: EventRecorder,
        guard: CacheGuard[CachedFederatedCluster],
        clock: Clock,
        settings: PhaseSettings | None = None,
    ) -> None:
        super().__init__(
            clock=clock,
            writer=StatusWriter(client, OWNERSHIP),
            recorder=recorder,
            guard=guard,
        )
        self._clusters = clusters
        self._evidence = Evidence(client, clusters, CachedFederatedCluster, clock)
        self._queue = queue
        self._settings = settings or PhaseSettings()
        self.book = LivenessBook(self._settings.trust)
        self._announced = Announced(self.book)
        self._deferred = Deferred(queue, clusters.view)

    def attach(self) -> None:
        """Start observing, in the leader and in its followers. Call once."""
        self._clusters.add_handler(self._changed)

    def enqueue_all(self) -> None:
        """Decide on every site anew: for a new leader, whose timers have yet to be set."""
        for key in self._clusters.store.keys():  # noqa: SIM118 - a store is no dict
            self._queue.add(key, initial=True)

    def record_of(self, cluster: CachedFederatedCluster) -> Record | None:
        """What was seen of a site's heartbeats."""
        return self.book.get(cluster.key)

    # Watching -----------------------------------------------------------------------------------

    def _changed(self, change: Change[CachedFederatedCluster]) -> None:
        new = change.new
        if new is None:
            self.forget(change.key)
            return
        before = self.book.get(change.key)
        late = self._clusters.view.catching_up(change.key, change.at.mono)
        sighting = self._sighting(new, first_sight=change.first_sight, late=late)
        record = self.book.observe(new.metadata, sighting, change.at)
        if not self._goes_on(change.old, new, before, record, change.at):
            self._queue.add(change.key, initial=change.first_sight)

    def _sighting(
        self, cluster: CachedFederatedCluster, *, first_sight: bool, late: bool
    ) -> Sighting:
        return Sighting(
            uid=cluster.metadata.uid,
            stamp=parse_time(cluster.status.last_heartbeat_time),
            period=self._settings.interval(cluster.spec.heartbeat_interval_seconds),
            first_sight=first_sight,
            late=late,
        )

    def _goes_on(
        self,
        old: CachedFederatedCluster | None,
        new: CachedFederatedCluster,
        before: Record | None,
        after: Record | None,
        now: Now,
    ) -> bool:
        """Whether all goes on as it did: Connected, with a timer set no later than needed.

        The echo of our own write of Connected is such a change, too: the run that wrote it sets the
        timer. What is Connected against the book is not: that run has to mend it.
        """
        if old is None or before is None or after is None or new.status.phase != Phase.CONNECTED:
            return False
        if before.uid != after.uid or (old.status.phase != Phase.CONNECTED and not after.improves):
            return False
        if old.spec != new.spec or after.period != before.period:
            return False
        if skewed(after, self._settings.trust) is not self._announced.has(new.key, after.uid):
            return False
        deadline = after.reference + after.period * self._settings.stale_after
        return before.reference <= after.reference and now.mono <= deadline

    # Reconciling --------------------------------------------------------------------------------

    async def observe(self, key: str, now: Now, live: Live) -> Seen | None:
        if live:
            cluster = await self._read(key)
        else:
            cluster = self._clusters.store.get(key)
        if cluster is None:
            return None
        record = self.book.get(key)
        facts = PhaseFacts(
            cluster=cluster,
            record=record,
            sight=self._clusters.view.sight_of(key),
            skew_announced=record is not None and self._announced.has(key, record.uid),
        )
        return Seen(Target.of(cluster, cluster.status), facts)

    async def _read(self, key: str) -> CachedFederatedCluster | None:
        cluster = await self._evidence.read(key, self._shortest_timeout(key))
        if cluster is None:
            return None
        if overtaken(self._clusters, cluster):
            return self._clusters.store.get(key)
        sighting = self._sighting(cluster, first_sight=False, late=True)
        self.book.observe_live(cluster.metadata, sighting, self.clock.now())
        return cluster

    def _shortest_timeout(self, key: str) -> timedelta:
        record = self.book.get(key)
        interval = self._settings.default_interval if record is None else record.period
        return interval * self._settings.stale_after

    def decide(self, seen: Seen, now: Now) -> Decision:
        return decide_phase(seen.facts, now, self._settings)

    async def act(self, applied: Applied[Seen, Decision]) -> None:
        key, record = applied.target.key, applied.seen.facts.record
        if record is not None:
            self._announced.note(key, record.uid, skewed(record, self._settings.trust))
        blind = applied.seen.facts.sight.down_since is not None
        self._deferred.note(key, applied.decision.wake_at, blind=blind)

    def forget(self, key: str) -> None:
        self._announced.forget(key)
        self.book.forget(key)
        self._queue.forget(key)
