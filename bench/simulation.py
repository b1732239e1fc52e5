"""An hour of a hundred thousand Macs and a thousand sites, on virtual time, without a network.

The reconcilers, queues, workers, caches and rules are the real ones; only the API server is a
dictionary and the event loop's time jumps. Macs and sites fall silent and come back at random, some
clocks are wrong by hours, and the controller's own watch is cut now and then. At each step the
rules of the specification are checked:

* nobody is demoted who was not silent, and nobody while we were blind ourselves;
* whoever was silent beyond the timeout, with calm over, is demoted;
* a Mac costs at most one status write a minute unless AgentConnected changes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import msgspec
import structlog

from bench.report import Figure
from llmkube.api.cached import (
    CachedFederatedCluster,
    CachedFederatedClusterSpec,
    CachedFederatedClusterStatus,
    CachedLease,
    CachedMeta,
    CachedMetalNode,
    CachedMetalNodeSpec,
    CachedMetalNodeStatus,
    CachedObject,
    Identity,
    LeaseMeta,
    LeaseSpec,
    Meta,
)
from llmkube.api.names import ConditionType
from llmkube.api.times import format_micro_time
from llmkube.clock import Clock, Now
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.informers.worker import run_workers
from llmkube.kube.client import KubeClient, WrittenStatus
from llmkube.kube.errors import Conflict, NotFound
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import (
    FEDERATEDCLUSTERS,
    LEASES,
    METALNODES,
    SERVICEACCOUNTS,
    Resource,
)
from llmkube.metrics import Metrics
from llmkube.reconcilers import heartbeat
from llmkube.reconcilers.federatedcluster import FederatedClusterReconciler
from llmkube.reconcilers.heartbeat import HeartbeatReconciler, Sources
from tests.support.virtualtime import run_virtual, virtual_clock

PART = "simulation"
INTERVAL = 30  # seconds between two heartbeats of a Mac and of a site
TIMEOUT = timedelta(seconds=120)
STALE = timedelta(seconds=3 * INTERVAL)
SETTLED = timedelta(seconds=5)
"""Virtual time within which a due demotion must have been written: checks run between ticks."""
NAMESPACE = "sim"


@dataclass(frozen=True, slots=True)
class Plan:
    """How large, how long, how troubled. Rates are per sender and hour."""

    macs: int = 100_000
    sites: int = 1_000
    seconds: int = 3600
    outages_per_hour: float = 0.5
    outage_seconds: float = 300.0
    wrong_clocks: float = 0.01
    """The share of senders whose clocks are wrong by up to two hours."""
    blindnesses: int = 3
    """How often the controller's own watch is cut, for up to two minutes."""
    seed: int = 1


class BrokenInvariant(AssertionError):
    """The simulation caught a wrong decision; the message says whose and when."""


@dataclass(slots=True)
class Sender:
    """A Mac or a site as it really is."""

    name: str
    phase: int
    skew: timedelta
    silent_until: int = -1
    beats: int = 0
    last_beat: timedelta = timedelta(0)
    last_write: timedelta | None = None


@dataclass(slots=True)
class Tally:
    """What happened."""

    beats: int = 0
    writes: int = 0
    wake_ups: int = 0
    live_reads: int = 0
    demotions: int = 0
    events: Counter[str] = field(default_factory=Counter)


class MemoryServer:
    """The API server's part: objects by resource and key, versions, status applies.

    Stands in for `KubeClient` in front of the real status writer. What it stores it also shows to
    the informer, unless the watch is down.
    """

    def __init__(self, clock: Clock, tally: Tally) -> None:
        self.clock = clock
        self.tally = tally
        self.objects: dict[str, dict[str, CachedObject]] = {}
        self.informers: dict[str, Informer[Any]] = {}
        self.blind = False
        self.missed: dict[tuple[str, str], None] = {}
        self.version = 1
        self.written: list[tuple[str, CachedObject, CachedObject]] = []
        """(resource, before, after) of status writes since the last look."""

    def put(self, plural: str, obj: Any, now: Now) -> None:
        """Store an object whose version is `self.version` and show it."""
        self.objects.setdefault(plural, {})[obj.key] = obj
        if self.blind:
            self.missed[plural, obj.key] = None
        elif plural in self.informers:
            self.informers[plural].put(obj, now, first_sight=False)

    def next_version(self) -> str:
        self.version += 1
        return str(self.version)

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, **_: Any
    ) -> dict[str, Any]:
        self.tally.live_reads += 1
        key = f"{namespace}/{name}" if namespace else name
        obj = self.objects[resource.plural].get(key)
        if obj is None:
            raise NotFound(key, status=404)
        return cast(dict[str, Any], msgspec.to_builtins(obj))

    async def apply_status(
        self, resource: Resource, body: dict[str, Any], **_: Any
    ) -> WrittenStatus:
        """One owner per resource here, so its complete set is the whole status."""
        metadata = body["metadata"]
        namespace = metadata.get("namespace")
        key = f"{namespace}/{metadata['name']}" if namespace else metadata["name"]
        old: Any = self.objects[resource.plural][key]
        if old.metadata.resource_version != metadata["resourceVersion"]:
            raise Conflict(key, status=409)
        fields = msgspec.to_builtins(old.status) | body["status"]
        status = msgspec.convert(fields, type(old.status))
        meta = msgspec.structs.replace(old.metadata, resource_version=self.next_version())
        new = msgspec.structs.replace(old, metadata=meta, status=status)
        self.tally.writes += 1
        self.written.append((resource.plural, old, new))
        self.put(resource.plural, new, self.clock.now())
        return WrittenStatus(meta.resource_version, body["status"])


class CountingRecorder:
    """The place of the event recorder: counts by reason."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def event(self, _regarding: Any, _type: str, reason: str, _action: str, _note: str) -> None:
        self._tally.events[reason] += 1


def run(plan: Plan | None = None) -> list[Figure]:
    """Simulate; raises BrokenInvariant."""
    plan = plan or Plan()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    cpu = time.process_time()
    tally = run_virtual(_World(plan).hour())
    cpu = time.process_time() - cpu
    hours = plan.seconds / 3600
    size = f"{plan.macs:,} Macs, {plan.sites:,} sites"

    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(PART, name, size, value, unit)

    return [
        figure("heartbeats per hour", tally.beats / hours, ""),
        figure("reconciles per hour", tally.wake_ups / hours, ""),
        figure("status writes per hour", tally.writes / hours, ""),
        figure("live reads per hour", tally.live_reads / hours, ""),
        figure("demotions per hour", tally.demotions / hours, ""),
        figure("CPU per simulated hour", cpu / hours, "s"),
        figure("CPU per heartbeat, all included", cpu / max(tally.beats, 1) * 1e6, "µs"),
    ]


class _World:
    """Everything there is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.tally = Tally()
        self.macs = [self._sender(f"mac-{n:06d}") for n in range(plan.macs)]
        self.sites = [self._sender(f"site-{n:04d}") for n in range(plan.sites)]
        self.calm_until = timedelta(0)
        self.blind_until = -1
        blind_for = [self.random.randint(5, 120) for _ in range(plan.blindnesses)]
        spread = range(600, max(plan.seconds - 600, 601))
        self.blindnesses = {self.random.choice(spread): seconds for seconds in blind_for}

    def _sender(self, name: str) -> Sender:
        wrong = self.random.random() < self.plan.wrong_clocks
        skew = timedelta(seconds=self.random.uniform(-7200, 7200) if wrong else 0)
        return Sender(name, self.random.randrange(INTERVAL), skew)

    async def hour(self) -> Tally:
        """Run the plan."""
        self.clock = virtual_clock()
        self.server = MemoryServer(self.clock, self.tally)
        self._build()
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(self._work(self.macs_queue, self.mac_reconciler.reconcile)),
                tasks.create_task(self._work(self.sites_queue, self.site_reconciler.reconcile)),
            ]
            for second in range(self.plan.seconds):
                self._tick(second)
                await asyncio.sleep(1)
                self._check_writes()
                if second % 60 == 59:
                    self._check_everybody()
            for task in working:
                task.cancel()
        return self.tally

    async def _work(self, queue: WorkQueue, reconcile: Any) -> None:
        async def counted(key: str) -> Any:
            self.tally.wake_ups += 1
            return await reconcile(key)

        await run_workers(queue, counted, concurrency=8, log=structlog.get_logger())

    # Building -----------------------------------------------------------------------------------

    def _informer(self, resource: Resource, kind: Any, **more: Any) -> Informer[Any]:
        client = cast(KubeClient, self.server)
        informer: Informer[Any] = Informer(client, resource, decode=kind, clock=self.clock, **more)
        self.server.informers[resource.plural] = informer
        return informer

    def _build(self) -> None:
        client = cast(KubeClient, self.server)
        recorder = cast(EventRecorder, CountingRecorder(self.tally))
        metrics = Metrics()
        nodes = self._informer(METALNODES, CachedMetalNode, indexes=heartbeat.METALNODE_INDEXES)
        node_guard = nodes.guard()
        leases = self._informer(LEASES, CachedLease)
        accounts = self._informer(SERVICEACCOUNTS, CachedMeta)
        clusters = self._informer(FEDERATEDCLUSTERS, CachedFederatedCluster)
        cluster_guard = clusters.guard()
        self.macs_queue = WorkQueue("heartbeat", self.clock, metrics.queue("heartbeat"))
        self.sites_queue = WorkQueue("sites", self.clock, metrics.queue("sites"))
        self.mac_reconciler = HeartbeatReconciler(
            client,
            Sources(nodes, leases, accounts),
            self.macs_queue,
            recorder,
            node_guard,
            self.clock,
        )
        self.site_reconciler = FederatedClusterReconciler(
            client, clusters, self.sites_queue, recorder, cluster_guard, self.clock
        )
        self.mac_reconciler.attach()
        self.site_reconciler.attach()
        self._populate()
        self.watches = [next(iter(i.view._watches)) for i in self.server.informers.values()]
        self._see(True)

    def _populate(self) -> None:
        now = self.clock.now()
        for mac in self.macs:
            meta = Meta(mac.name, NAMESPACE, f"uid-{mac.name}", "1", generation=1)
            spec = CachedMetalNodeSpec(lease_name=mac.name, service_account_name=mac.name)
            self._list(METALNODES, CachedMetalNode(meta, spec, CachedMetalNodeStatus()), now)
            self._list(LEASES, self._lease(mac, None), now)
            identity = Identity(mac.name, NAMESPACE, f"sa-{mac.name}", "1")
            self._list(SERVICEACCOUNTS, CachedMeta(identity), now)
        for site in self.sites:
            self._list(FEDERATEDCLUSTERS, self._site(site, None, None), now)
        for informer in self.server.informers.values():
            informer.complete(None, set(informer.store.keys()), now)

    def _list(self, resource: Resource, obj: Any, now: Now) -> None:
        self.server.objects.setdefault(resource.plural, {})[obj.key] = obj
        self.server.informers[resource.plural].put(obj, now, first_sight=True)

    def _lease(self, mac: Sender, stamp: str | None) -> CachedLease:
        meta = LeaseMeta(mac.name, NAMESPACE, f"lease-{mac.name}", self.server.next_version())
        duration = int(TIMEOUT.total_seconds())
        return CachedLease(meta, LeaseSpec(renew_time=stamp, lease_duration_seconds=duration))

    def _site(self, site: Sender, stamp: str | None, phase: str | None) -> CachedFederatedCluster:
        meta = Meta(site.name, "", f"uid-{site.name}", self.server.next_version(), generation=1)
        return CachedFederatedCluster(
            meta,
            CachedFederatedClusterSpec(heartbeat_interval_seconds=INTERVAL),
            CachedFederatedClusterStatus(phase=phase, last_heartbeat_time=stamp),
        )

    # Time passes --------------------------------------------------------------------------------

    def _tick(self, second: int) -> None:
        now = self.clock.now()
        if second in self.blindnesses:
            self.blind_until = second + self.blindnesses[second]
            self._see(False)
        elif second == self.blind_until:
            self._see(True)
        for mac in self.macs[second % INTERVAL :: INTERVAL]:
            if self._beats(mac, second, now):
                self.server.put(LEASES.plural, self._lease(mac, self._stamp(mac, now)), now)
        for site in self.sites[second % INTERVAL :: INTERVAL]:
            if self._beats(site, second, now):
                old: Any = self.server.objects[FEDERATEDCLUSTERS.plural][site.name]
                new = self._site(site, self._stamp(site, now), old.status.phase)
                self.server.put(FEDERATEDCLUSTERS.plural, new, now)

    def _beats(self, sender: Sender, second: int, now: Now) -> bool:
        if second < sender.silent_until:
            return False
        if self.random.random() < self.plan.outages_per_hour * INTERVAL / 3600:
            length = self.random.expovariate(1 / self.plan.outage_seconds)
            sender.silent_until = second + int(length)
            return False
        sender.last_beat = now.mono
        sender.beats += 1
        self.tally.beats += 1
        return True

    @staticmethod
    def _stamp(sender: Sender, now: Now) -> str:
        return format_micro_time(now.wall + sender.skew)

    def _see(self, up: bool) -> None:
        """Cut the controller's watches, or let them resume where they were."""
        now = self.clock.now()
        self.server.blind = not up
        if up:
            for watch in self.watches:
                watch.opened(now.mono)
            for plural, key in self.server.missed:
                obj = self.server.objects[plural][key]
                self.server.informers[plural].put(obj, now, first_sight=False)
            self.server.missed.clear()
            # For as long as that, silence alone demotes nobody: see `rules.calm`.
            self.calm_until = now.mono + TIMEOUT + timedelta(seconds=3 * INTERVAL)
        else:
            for watch in self.watches:
                watch.closed(now.mono)

    # Invariants ---------------------------------------------------------------------------------

    def _check_writes(self) -> None:
        """Every write since the last look was right."""
        now = self.clock.monotonic()
        for plural, old, new in self.server.written:
            if plural == METALNODES.plural:
                self._check_mac_write(old, new, now)
            else:
                self._check_site_write(old, new, now)
        self.server.written.clear()

    def _check_mac_write(self, old: Any, new: Any, now: timedelta) -> None:
        mac = self.macs[int(new.metadata.name.rpartition("-")[2])]
        before, after = _connected(old), _connected(new)
        if before == "True" and after == "False":
            self.tally.demotions += 1
            self._silent_long_enough(mac, TIMEOUT, now)
        since = None if mac.last_write is None else now - mac.last_write
        unchanged = _why(old) == _why(new)
        if unchanged and since is not None and since < timedelta(seconds=59):
            raise BrokenInvariant(f"{mac.name}: a second write after {since}: {old} {new}")
        mac.last_write = now

    def _check_site_write(self, old: Any, new: Any, now: timedelta) -> None:
        site = self.sites[int(new.metadata.name.rpartition("-")[2])]
        if old.status.phase == "Connected" and new.status.phase != "Connected":
            self.tally.demotions += 1
            if site.skew >= timedelta(0):  # a slow clock is trusted from its third push on
                self._silent_long_enough(site, STALE, now)

    def _silent_long_enough(self, sender: Sender, timeout: timedelta, now: timedelta) -> None:
        if self.server.blind:
            raise BrokenInvariant(f"{sender.name} was demoted while we were blind")
        if now - sender.last_beat < timeout:
            raise BrokenInvariant(f"{sender.name} was demoted after {now - sender.last_beat}")

    def _check_everybody(self) -> None:
        """Whoever is silent, and nobody else, is disconnected, once calm is over."""
        now = self.clock.monotonic()
        if self.server.blind or now < self.calm_until:
            return
        for mac in self.macs:
            node: Any = self.server.objects[METALNODES.plural][f"{NAMESPACE}/{mac.name}"]
            silence = now - mac.last_beat
            connected = _connected(node) == "True"
            if silence > TIMEOUT + SETTLED and connected:
                raise BrokenInvariant(f"{mac.name} is connected after {silence} of silence")
            if silence < timedelta(seconds=INTERVAL) and _counts(mac) and not connected:
                raise BrokenInvariant(f"{mac.name} beat {silence} ago and is not connected")


def _counts(mac: Sender) -> bool:
    """Whether its last beat must connect it. A first stamp is judged by itself: an old one is old,
    and one from the future improves nothing."""
    return mac.beats > (1 if abs(mac.skew) > timedelta(seconds=2) else 0)


def _connected(node: Any) -> str | None:
    condition = node.status.condition(ConditionType.AGENT_CONNECTED)
    return None if condition is None else str(condition.status)


def _why(node: Any) -> str | None:
    condition = node.status.condition(ConditionType.AGENT_CONNECTED)
    return None if condition is None else str(condition.reason)
