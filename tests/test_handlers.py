"""What the handlers of the liveness reconcilers remember of senders, without an API server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from llmkube.api.cached import (
    CachedFederatedCluster,
    CachedFederatedClusterSpec,
    CachedFederatedClusterStatus,
    CachedLease,
    CachedMeta,
    CachedMetalNode,
    CachedMetalNodeSpec,
    CachedMetalNodeStatus,
    LeaseMeta,
    LeaseSpec,
    Meta,
)
from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.kube.resources import FEDERATEDCLUSTERS, LEASES, METALNODES, SERVICEACCOUNTS
from llmkube.reconcilers.federatedcluster import FederatedClusterReconciler
from llmkube.reconcilers.heartbeat import METALNODE_INDEXES, HeartbeatReconciler, Sources
from llmkube.reconcilers.shell import Live
from llmkube.rules.liveness import skewed
from tests.support.clock import FakeClock

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


class Senders:
    """A reconciler whose informers are fed by hand; no worker runs, so nothing is requested."""

    def __init__(self, kind: str) -> None:
        self.clock = FakeClock()
        self.queue = WorkQueue("test", self.clock)
        self.kind = kind
        self.version = 10
        nobody: Any = None
        if kind == "site":
            self.informer: Informer[Any] = self._informer(FEDERATEDCLUSTERS, CachedFederatedCluster)
            self.key = "site"
            self.reconciler: Any = FederatedClusterReconciler(
                nobody, self.informer, self.queue, nobody, self.informer.guard(), self.clock
            )
        else:
            self.nodes = self._informer(METALNODES, CachedMetalNode, indexes=METALNODE_INDEXES)
            self.informer = self._informer(LEASES, CachedLease)
            accounts = self._informer(SERVICEACCOUNTS, CachedMeta)
            self.key = "macs/mac"
            sources = Sources(self.nodes, self.informer, accounts)
            self.reconciler = HeartbeatReconciler(
                nobody, sources, self.queue, nobody, self.nodes.guard(), self.clock
            )
        self.reconciler.attach()
        self.informer.view.watches[0].opened(self.clock.mono)

    def _informer(self, resource: Any, kind: Any, **options: Any) -> Informer[Any]:
        nobody: Any = None
        return Informer(nobody, resource, decode=kind, clock=self.clock, **options)

    def send(self, *, ahead: timedelta = ZERO, uid: str = "u1", first_sight: bool = False) -> None:
        """The next stamp, half a minute after the last one."""
        self.clock.advance(30 * SECOND)
        self.version += 1
        stamp = format_micro_time(self.clock.wall + ahead)
        self.informer.put(self._object(stamp, uid), self.clock.now(), first_sight=first_sight)

    def _object(self, stamp: str, uid: str) -> Any:
        version = str(self.version)
        if self.kind == "site":
            status = CachedFederatedClusterStatus(last_heartbeat_time=stamp)
            meta = Meta("site", "", uid, version)
            return CachedFederatedCluster(meta, CachedFederatedClusterSpec(), status)
        return CachedLease(LeaseMeta("mac", "macs", uid, version), LeaseSpec(renew_time=stamp))

    def announce(self) -> None:
        """What a run does with the skew that it found."""
        record = self.reconciler.book.get(self.key)
        assert record is not None
        told = skewed(record, self.reconciler.book.trust)
        self.reconciler._announced.note(self.key, record.uid, told)

    def gone(self) -> None:
        obj = self.informer.store.get(self.key)
        self.informer.delete(obj, self.clock.now())


@pytest.mark.parametrize("kind", ["site", "Mac"])
@pytest.mark.parametrize("end", ["deleted", "re-created", "re-created unseen", "set right"])
def test_a_skewed_sender_that_is_no_more_is_not_remembered(kind: str, end: str) -> None:
    senders = Senders(kind)
    for _ in range(5):
        senders.send(ahead=-HOUR)
    senders.announce()
    assert len(senders.reconciler._announced) == 1
    match end:
        case "deleted":
            senders.gone()
        case "re-created":
            senders.gone()
            senders.send(uid="u2")
        case "re-created unseen":  # a re-list shows another UID at once
            senders.send(uid="u2", first_sight=True)
            senders.announce()
        case _:
            for _ in range(5):
                senders.send()
            senders.announce()
    assert len(senders.reconciler._announced) == 0


@pytest.mark.parametrize("kind", ["site", "Mac"])
def test_a_sender_that_went_while_its_skew_was_written_is_not_remembered(kind: str) -> None:
    senders = Senders(kind)
    for _ in range(5):
        senders.send(ahead=-HOUR)
    record = senders.reconciler.book.get(senders.key)
    senders.gone()
    senders.reconciler._announced.note(senders.key, record.uid, True)
    assert len(senders.reconciler._announced) == 0


@pytest.mark.parametrize("kind", ["site", "Mac"])
@pytest.mark.parametrize(
    ("frozen", "skew"),
    [
        pytest.param(False, True, id="a clock that is slow by 65 s"),
        pytest.param(True, False, id="a beat that waited 65 s until we were woken"),
    ],
)
def test_our_own_freeze_is_nobodys_skew(kind: str, frozen: bool, skew: bool) -> None:
    senders = Senders(kind)
    watch = senders.informer.view.watches[0]
    behind = ZERO if frozen else -65 * SECOND
    for _ in range(5):
        watch.heard(senders.clock.mono + 30 * SECOND)
        senders.send(ahead=behind)
    if frozen:
        senders.clock.advance(35 * SECOND)
        watch.heard(senders.clock.mono + 30 * SECOND)
        senders.send(ahead=-65 * SECOND)
    assert skewed(senders.reconciler.book.get(senders.key), senders.reconciler.book.trust) is skew


# What a follower learns of the leader's writes ---------------------------------------------------
def node(version: str, mirrored: str | None, *, host: str | None = None) -> CachedMetalNode:
    spec = CachedMetalNodeSpec(lease_name="mac", service_account_name="mac")
    status = CachedMetalNodeStatus(last_heartbeat_time=mirrored, host_ip=host)
    return CachedMetalNode(Meta("mac", "macs", "n1", version), spec, status)


async def last_write(senders: Senders) -> timedelta | None:
    seen = await senders.reconciler.observe("macs/mac", senders.clock.now(), Live.NOTHING)
    found: timedelta | None = seen.facts.last_write
    return found


async def test_a_new_leader_knows_when_the_old_one_wrote_last() -> None:
    senders = Senders("Mac")
    nodes, clock = senders.nodes, senders.clock
    nodes.put(node("1", None), clock.now(), first_sight=True)
    assert await last_write(senders) is None
    clock.advance(SECOND)
    nodes.put(node("2", "2026-01-01T00:00:00Z"), clock.now(), first_sight=False)
    wrote = clock.mono
    assert await last_write(senders) == wrote
    clock.advance(SECOND)
    nodes.put(node("3", "2026-01-01T00:00:00Z", host="192.0.2.1"), clock.now(), first_sight=False)
    assert await last_write(senders) == wrote, "what the verification writes is not counted"


async def test_what_a_list_shows_does_not_say_when_it_was_written() -> None:
    senders = Senders("Mac")
    senders.nodes.put(node("1", None), senders.clock.now(), first_sight=True)
    late = node("2", "2026-01-01T00:00:00Z")
    senders.nodes.put(late, senders.clock.now(), first_sight=True)
    assert await last_write(senders) is None
