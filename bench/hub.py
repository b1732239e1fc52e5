"""The FederatedCluster hub against its peers: start, heartbeats, silence, memory, lateness."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.load import Sheet, Watcher, at_rate, flat_out, for_each, in_turn
from bench.report import Figure, percentile
from bench.subject import Running, Subject, chosen, ours, peers, running
from devcluster.controlplane import ControlPlane
from llmkube.api.names import FieldManager
from llmkube.api.times import format_micro_time
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import FEDERATEDCLUSTERS

PART = "hub"
QUIET_INTERVAL = 3600  # seconds: nothing changes by itself while throughput is measured
BOUNDARY_INTERVAL = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. kopf takes minutes to start with few sites, and is spared more."""

    sites: int = 2000
    rate: float = 200.0
    seconds: float = 20.0
    probes: int = 100
    kopf_at_most: int = 2000


def subjects(plan: Plan) -> list[Subject]:
    """Ours, the optional peers of $LLMKUBE_BENCH_HUB_PEER, and kopf, which leaves finalizers."""
    kopf = Path(__file__).parent / "peers" / "kopf_hub.py"
    argv = [sys.executable, "-m", "kopf", "run", "-A", "--standalone", "--log-format=plain"]
    slow = [Subject("kopf", [*argv, "--quiet", str(kopf)])]
    return [
        ours("federatedcluster"),
        *peers("LLMKUBE_BENCH_HUB_PEER"),
        *(slow if plan.sites <= plan.kopf_at_most else ()),
    ]


async def run(
    cluster: ControlPlane, client: KubeClient, plan: Plan, only: Sequence[str] = ()
) -> list[Figure]:
    """Measure every subject (or `only` those named) on the same objects."""
    hub = _Hub(client, plan)
    await hub.prepare()
    figures = await in_turn(
        PART,
        f"{plan.sites} sites",
        chosen(subjects(plan), only),
        lambda subject, sheet: _measure(hub, cluster, subject, sheet),
        hub.clear_phases,
    )
    await hub.remove()
    return figures


async def _measure(hub: _Hub, cluster: ControlPlane, subject: Subject, sheet: Sheet) -> None:
    client_seconds = await hub.own_writes()
    await hub.clear_phases()
    await hub.push_all()

    async with hub.watching() as watcher:
        began = time.perf_counter()
        async with running(subject, cluster.admin_kubeconfig) as process:
            await watcher.until(lambda: hub.all_connected(watcher), seconds=300)
            sheet.add("cold start", cold := time.perf_counter() - began, "s")
            sheet.add("the client's own writes of the same", client_seconds, "s")
            sheet.add("cold start ÷ the client's own writes", cold / client_seconds, "", 1.2)

            sheet.add("CPU when nothing happens", await _idle(process, hub.plan.seconds), "%", 0.3)
            per_push, rss = await _pushes(hub, process)
            sheet.add(f"CPU per push at {hub.plan.rate:.0f}/s", per_push, "µs", 200)
            flat_out_rate, flat_out_cpu = await _flat_out(hub, process)
            sheet.add("pushes a second, flat out", flat_out_rate, "")
            sheet.add("CPU per push, flat out", flat_out_cpu, "µs")
            sheet.add("resident memory", rss / 1e6, "MB", 115)

            latencies, trip = await hub.latencies(watcher), await hub.round_trip()
            median = percentile(latencies, 0.5)
            sheet.add("push after silence → phase p50", median * 1e3, "ms", 2.5)
            sheet.add("push after silence → phase p99", percentile(latencies, 0.99) * 1e3, "ms")
            sheet.add("push after silence → phase max", max(latencies) * 1e3, "ms", 15)
            sheet.add("a push's own round trip p50", trip * 1e3, "ms")
            sheet.add("push → phase ÷ a push's own round trip, p50", median / trip, "", 1)
            lateness = await hub.boundary_lateness(watcher)
            sheet.add("boundary → phase max", max(lateness), "s", 0.05)


async def _idle(process: Running, seconds: float) -> float:
    """Percent of one core while nothing happens."""
    await asyncio.sleep(2)  # the start's own aftermath is not idleness
    before = process.usage().cpu
    await asyncio.sleep(seconds)
    return (process.usage().cpu - before) / seconds * 100


async def _pushes(hub: _Hub, process: Running) -> tuple[float, int]:
    """(µs of CPU per push, resident bytes after them)."""
    before = process.usage()
    pushed = await at_rate(hub.names, hub.push, rate=hub.plan.rate, seconds=hub.plan.seconds)
    await asyncio.sleep(1)  # what is under way
    after = process.usage()
    return (after.cpu - before.cpu) / pushed * 1e6, after.rss


async def _flat_out(hub: _Hub, process: Running) -> tuple[float, float]:
    """(pushes a second that the API server takes at most, µs of CPU per push)."""
    before, began = process.usage().cpu, time.perf_counter()
    pushed = await flat_out(hub.names, hub.push, seconds=hub.plan.seconds / 2)
    rate = pushed / (time.perf_counter() - began)
    await asyncio.sleep(1)  # what is under way
    return rate, (process.usage().cpu - before) / pushed * 1e6


class _Hub:
    """The bench's sites and its own client."""

    def __init__(self, client: KubeClient, plan: Plan) -> None:
        self.client = client
        self.plan = plan
        self.names = [f"site-{number:05d}" for number in range(plan.sites)]

    async def prepare(self) -> None:
        """Make the sites."""
        await for_each(self.names, lambda name: self.create(name, QUIET_INTERVAL))
        await self.push_all()

    async def own_writes(self) -> float:
        """Seconds that this client itself needs to write every phase, until it sees them."""
        async with self.watching() as watcher:
            began = time.perf_counter()
            await for_each(self.names, self._write_phase)
            await watcher.until(lambda: self.all_connected(watcher), seconds=300)
            return time.perf_counter() - began

    async def round_trip(self) -> float:
        """Median seconds of one push, asked for by itself."""
        trips = []
        for name in self.names[: self.plan.probes]:
            began = time.perf_counter()
            await self.push(name)
            trips.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
        return percentile(trips, 0.5)

    async def create(self, name: str, interval: int) -> None:
        body = {
            "apiVersion": FEDERATEDCLUSTERS.api_version,
            "kind": FEDERATEDCLUSTERS.kind,
            "metadata": {"name": name},
            "spec": {"displayName": f"Site {name}", "heartbeatIntervalSeconds": interval},
        }
        await self.client.apply(FEDERATEDCLUSTERS, body, field_manager="bench")

    async def push(self, name: str, stamp: datetime | None = None) -> datetime:
        """One heartbeat as an edge sends it; returns its stamp."""
        stamp = stamp or datetime.now(UTC)
        status = {
            "lastHeartbeatTime": format_micro_time(stamp),
            "observedVersion": "v0.1.0",
            "capacity": {"nodes": 4, "gpusTotal": 32, "gpusAllocatable": 30},
            "inference": {
                "models": 3,
                "servicesTotal": 5,
                "servicesReady": 5,
                "servicesFailed": 0,
            },
        }
        await self._apply_status(name, status, FieldManager.EDGE)
        return stamp

    async def push_all(self) -> None:
        await for_each(self.names, self.push)

    async def _write_phase(self, name: str) -> None:
        await self._apply_status(name, {"phase": "Connected"}, FieldManager.HUB)

    async def _apply_status(self, name: str, status: Mapping[str, object], manager: str) -> None:
        body = {
            "apiVersion": FEDERATEDCLUSTERS.api_version,
            "kind": FEDERATEDCLUSTERS.kind,
            "metadata": {"name": name},
            "status": status,
        }
        await self.client.apply(
            FEDERATEDCLUSTERS, body, field_manager=manager, subresource="status"
        )

    async def clear_phases(self) -> None:
        """As if no hub had ever run."""

        async def clear(name: str) -> None:
            body = {"status": {"phase": None}}
            await self.client.merge_patch(FEDERATEDCLUSTERS, name, None, body, subresource="status")

        await for_each(self.names, clear)

    async def remove(self) -> None:
        async def remove(name: str) -> None:
            body = {"metadata": {"finalizers": None}}
            await self.client.merge_patch(FEDERATEDCLUSTERS, name, None, body)
            with suppress(NotFound):
                await self.client.delete(FEDERATEDCLUSTERS, name)

        await for_each(self.names, remove)

    def watching(self) -> AbstractAsyncContextManager[Watcher]:
        watcher = Watcher(self.client, FEDERATEDCLUSTERS, lambda status: status.get("phase"))
        return watcher.watching()

    def all_connected(self, watcher: Watcher) -> bool:
        return watcher.all(self.names, "Connected")

    async def latencies(self, watcher: Watcher) -> list[float]:
        """Seconds from the answer to a push until the phase's write is seen, after silence."""
        probes = self.names[: self.plan.probes]
        old = timedelta(seconds=11 * QUIET_INTERVAL)
        await for_each(probes, lambda name: self.push(name, datetime.now(UTC) - old))
        await watcher.until(lambda: watcher.all(probes, "Unreachable"), seconds=60)
        seconds = []
        for name in probes:
            await self.push(name)
            answered = time.time()
            await watcher.until(lambda: watcher.all([name], "Connected"), seconds=30)  # noqa: B023
            seconds.append(max(0.0, watcher.changed[name] - answered))
            await asyncio.sleep(0.02)
        return seconds

    async def boundary_lateness(self, watcher: Watcher) -> list[float]:
        """Seconds from 3 × the interval after the last push until Stale is written."""
        probes = [f"edge-{number:03d}" for number in range(self.plan.probes)]
        await for_each(probes, lambda name: self.create(name, BOUNDARY_INTERVAL))
        stamps: dict[str, datetime] = {}
        began = time.perf_counter()
        for number, name in enumerate(probes):
            due = began + number * BOUNDARY_INTERVAL / len(probes)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            stamps[name] = await self.push(name)
        await watcher.until(lambda: watcher.all(probes, "Stale"), seconds=60)
        for name in probes:
            await self.client.merge_patch(
                FEDERATEDCLUSTERS, name, None, {"metadata": {"finalizers": None}}
            )
            await self.client.delete(FEDERATEDCLUSTERS, name)
        return [
            watcher.changed[name] - stamps[name].timestamp() - 3 * BOUNDARY_INTERVAL
            for name in probes
        ]
