"""The reconcilers of liveness in this process, against the real API server, and their senders.

Durations are scaled: `PHASES` and `HEARTBEATS` say what a second of an interval or of a Lease's
duration lasts here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from llmkube.api.cached import CachedFederatedCluster, CachedLease, CachedMeta, CachedMetalNode
from llmkube.api.names import REPORT_ANNOTATION, FieldManager
from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO, Clock, SystemClock
from llmkube.informers.informer import Informer
from llmkube.informers.options import ReflectorSettings
from llmkube.informers.queue import WorkQueue
from llmkube.informers.worker import Outcome, run_workers
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import FEDERATEDCLUSTERS, LEASES, METALNODES, SERVICEACCOUNTS
from llmkube.reconcilers.federatedcluster import FederatedClusterReconciler
from llmkube.reconcilers.heartbeat import METALNODE_INDEXES, HeartbeatReconciler, Sources
from llmkube.rules.heartbeat import HeartbeatSettings
from llmkube.rules.phase import PhaseSettings
from tests.support.background import background
from tests.support.wait import eventually

PHASES = PhaseSettings(default_interval=timedelta(seconds=1), second=timedelta(seconds=1) / 30)
"""An unset interval lasts a second."""
HEARTBEATS = HeartbeatSettings(
    default_timeout=timedelta(seconds=2.4),
    least_timeout=timedelta(seconds=0.3),
    most_timeout=timedelta(seconds=12),
    second=timedelta(seconds=0.02),
)
"""An unset duration lasts 2.4 s."""
EAGER = ReflectorSettings(
    short_watch=timedelta(milliseconds=50),
    backoff_base=timedelta(milliseconds=20),
    backoff_cap=timedelta(milliseconds=500),
)
"""Reflectors that reconnect quickly."""


@dataclass
class Running:
    """A reconciler that runs."""

    reconciler: Any
    queue: WorkQueue
    informers: tuple[Informer[Any], ...]
    recorder: EventRecorder
    runs: list[str] = field(default_factory=list)
    """The key of each reconcile, in order."""
    in_hand: int = 0
    """How many reconciles are under way."""

    def counted(self, reconcile: Callable[[str], Awaitable[Outcome]]) -> Any:
        async def run(key: str) -> Outcome:
            self.runs.append(key)
            self.in_hand += 1
            try:
                return await reconcile(key)
            finally:
                self.in_hand -= 1

        return run

    async def settled(self) -> None:
        """Nothing waits, nothing is under way, and the Events of what was done are written: from
        now on a request is the answer to something new."""
        await eventually(lambda: self.in_hand == len(self.queue) == 0, "nothing is to be done")
        await self.recorder.flush()


@asynccontextmanager
async def running_hub(
    client: KubeClient,
    *,
    settings: PhaseSettings = PHASES,
    reflector: ReflectorSettings = EAGER,
    clock: Clock | None = None,
    leads: bool = True,
) -> AsyncIterator[Running]:
    """A hub: the reconciler of phases. One that does not lead only observes."""
    clock = clock or SystemClock()
    clusters = Informer(
        client, FEDERATEDCLUSTERS, decode=CachedFederatedCluster, clock=clock, settings=reflector
    )
    queue = WorkQueue("federatedcluster", clock)
    recorder = EventRecorder(client, clock, "llmkube-controller", "test")
    reconciler = FederatedClusterReconciler(
        client, clusters, queue, recorder, clusters.guard(), clock, settings
    )
    async with _running(reconciler, queue, (clusters,), recorder, leads=leads) as running:
        yield running


@asynccontextmanager
async def running_heartbeats(
    client: KubeClient,
    *namespaces: str,
    settings: HeartbeatSettings = HEARTBEATS,
    reflector: ReflectorSettings = EAGER,
    clock: Clock | None = None,
    leads: bool = True,
) -> AsyncIterator[Running]:
    """The reconciler of heartbeats for these namespaces, each watched by itself."""
    clock = clock or SystemClock()

    def informer(resource: Any, kind: Any, **options: Any) -> Informer[Any]:
        return Informer(
            client,
            resource,
            decode=kind,
            namespaces=namespaces,
            clock=clock,
            settings=reflector,
            **options,
        )

    nodes = informer(METALNODES, CachedMetalNode, indexes=METALNODE_INDEXES)
    leases = informer(LEASES, CachedLease)
    accounts = informer(SERVICEACCOUNTS, CachedMeta, metadata_only=True)
    queue = WorkQueue("heartbeat", clock)
    recorder = EventRecorder(client, clock, "llmkube-controller", "test")
    reconciler = HeartbeatReconciler(
        client, Sources(nodes, leases, accounts), queue, recorder, nodes.guard(), clock, settings
    )
    informers = (nodes, leases, accounts)
    async with _running(reconciler, queue, informers, recorder, leads=leads) as running:
        yield running


@asynccontextmanager
async def _running(
    reconciler: Any,
    queue: WorkQueue,
    informers: tuple[Informer[Any], ...],
    recorder: EventRecorder,
    *,
    leads: bool,
) -> AsyncIterator[Running]:
    running = Running(reconciler, queue, informers, recorder)
    reconciler.attach()
    async with background(*(informer.run() for informer in informers), recorder.run()):
        async with asyncio.timeout(30):
            for informer in informers:
                await informer.wait_synced()
        if not leads:
            yield running
            return
        async with leading(running):
            yield running


@asynccontextmanager
async def leading(running: Running) -> AsyncIterator[None]:
    """A term of leadership."""
    running.reconciler.enqueue_all()
    reconcile = running.counted(running.reconciler.reconcile)
    log = structlog.get_logger("test")
    async with background(run_workers(running.queue, reconcile, concurrency=8, log=log)):
        yield


# Sites ------------------------------------------------------------------------------------------
class Site:
    """An edge cluster that pushes: `ahead` is its clock minus the true one."""

    def __init__(self, client: KubeClient, name: str, *, ahead: timedelta = ZERO) -> None:
        self.client = client
        self.name = name
        self.ahead = ahead
        self.pushed_at: datetime | None = None

    async def register(self, interval: int | None = None) -> None:
        spec = {} if interval is None else {"heartbeatIntervalSeconds": interval}
        await self.client.create(
            FEDERATEDCLUSTERS,
            {
                "apiVersion": FEDERATEDCLUSTERS.api_version,
                "kind": "FederatedCluster",
                "metadata": {"name": self.name},
                "spec": spec,
            },
        )

    async def set_interval(self, seconds: int) -> None:
        body = {"spec": {"heartbeatIntervalSeconds": seconds}}
        await self.client.merge_patch(FEDERATEDCLUSTERS, self.name, None, body)

    async def push(self) -> None:
        self.pushed_at = datetime.now(UTC) + self.ahead
        status = {
            "lastHeartbeatTime": format_micro_time(self.pushed_at),
            "observedVersion": "v0.1.0",
            "capacity": {"nodes": 3, "gpusTotal": 8, "gpusAllocatable": 6},
        }
        body = {
            "apiVersion": FEDERATEDCLUSTERS.api_version,
            "kind": "FederatedCluster",
            "metadata": {"name": self.name},
            "status": status,
        }
        await self.client.apply(
            FEDERATEDCLUSTERS, body, field_manager=FieldManager.EDGE, subresource="status"
        )

    async def push_every(self, interval: timedelta) -> None:
        """Push until cancelled."""
        while True:
            await self.push()
            await asyncio.sleep(interval.total_seconds())

    async def get(self) -> dict[str, Any]:
        return await self.client.get(FEDERATEDCLUSTERS, self.name)

    async def phase(self) -> str | None:
        found: str | None = (await self.get()).get("status", {}).get("phase")
        return found

    async def remove(self) -> None:
        with suppress(NotFound):
            await self.client.delete(FEDERATEDCLUSTERS, self.name)


# Macs -------------------------------------------------------------------------------------------
class Mac:
    """A Mac with its MetalNode, account and Lease: `ahead` is its clock minus the true one."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str, *, ahead: timedelta = ZERO
    ) -> None:
        self.client = client
        self.namespace = namespace
        self.name = name
        self.ahead = ahead

    async def register(self, *, lease: bool = True) -> None:
        await self.create_account()  # before anybody can miss it
        spec = {"leaseName": self.name, "serviceAccountName": self.name}
        await self._create(METALNODES, {"spec": spec})
        if lease:
            await self.create_lease()

    async def create_account(self) -> None:
        await self._create(SERVICEACCOUNTS, {})

    async def create_lease(self) -> None:
        await self._create(LEASES, {})

    async def _create(self, resource: Any, rest: dict[str, Any]) -> None:
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        await self.client.create(
            resource, {**head, "metadata": {"name": self.name}, **rest}, self.namespace
        )

    async def beat(
        self,
        *,
        report: str | None = None,
        duration: int | None = None,
        ahead: timedelta = ZERO,
    ) -> datetime:
        """Renew the Lease, as the agent does: by merge patch."""
        stamp = datetime.now(UTC) + self.ahead + ahead
        spec: dict[str, Any] = {"renewTime": format_micro_time(stamp), "holderIdentity": "mac"}
        if duration is not None:
            spec["leaseDurationSeconds"] = duration
        body: dict[str, Any] = {"spec": spec}
        if report is not None:
            body["metadata"] = {"annotations": {REPORT_ANNOTATION: report}}
        await self.client.merge_patch(LEASES, self.name, self.namespace, body)
        return stamp

    async def beat_every(self, interval: timedelta) -> None:
        """Beat until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(interval.total_seconds())

    async def get(self) -> dict[str, Any]:
        return await self.client.get(METALNODES, self.name, self.namespace)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get()).get("status", {})
        return found

    async def connected(self) -> tuple[str, str] | None:
        """Status and reason of AgentConnected."""
        for condition in (await self.status()).get("conditions", ()):
            if condition["type"] == "AgentConnected":
                return condition["status"], condition["reason"]
        return None

    async def message(self) -> str:
        for condition in (await self.status()).get("conditions", ()):
            if condition["type"] == "AgentConnected":
                return str(condition["message"])
        return ""


# What happened ----------------------------------------------------------------------------------
class History:
    """The values that a view of each object took, as a watch of its own saw them, and when."""

    def __init__(
        self,
        client: KubeClient,
        resource: Any,
        kind: Any,
        view: Callable[[Any], Any],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        clock = SystemClock()
        self._view = view
        self._informer: Informer[Any] = Informer(
            client, resource, decode=kind, namespaces=namespaces, clock=clock, settings=EAGER
        )
        self._informer.add_handler(self._changed)
        self.steps: dict[str, list[tuple[Any, datetime]]] = {}

    def _changed(self, change: Any) -> None:
        if change.new is None:
            return
        steps = self.steps.setdefault(change.key, [])
        value = self._view(change.new)
        if not steps or steps[-1][0] != value:
            steps.append((value, datetime.now(UTC)))

    def of(self, key: str) -> list[Any]:
        """The values of that object, in order."""
        return [value for value, _ in self.steps.get(key, [])]

    async def mark(self, key: str, value: Any) -> int:
        """Wait until this watch has seen the object at that value; how many it has seen by then."""
        await eventually(lambda: self.of(key)[-1:] == [value], f"{key} is seen at {value}")
        return len(self.of(key))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[History]:
        async with background(self._informer.run()):
            await self._informer.wait_synced()
            yield self


def phases(client: KubeClient) -> History:
    """The phases of all sites."""
    return History(
        client, FEDERATEDCLUSTERS, CachedFederatedCluster, lambda site: site.status.phase
    )


def connections(client: KubeClient, namespace: str) -> History:
    """The status of AgentConnected of all Macs of a namespace."""

    def view(node: CachedMetalNode) -> str | None:
        condition = node.status.condition("AgentConnected")
        return None if condition is None else condition.status

    return History(client, METALNODES, CachedMetalNode, view, (namespace,))
