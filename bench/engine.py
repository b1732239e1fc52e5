"""The engine alone: decoding, store, queue; and a cache of Leases against its peers.

The first half needs no server: microseconds of pure CPU. The second half runs each subject as a
process of its own against the real API server: the same Leases with 1.6 KB of report, listed, then
renewed at a steady rate. Read `bench.peers.engine` for what the subjects do.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from bench.load import at_rate, for_each
from bench.report import Figure
from devcluster.controlplane import ControlPlane
from devcluster.process import Process
from llmkube.api.cached import CachedLease
from llmkube.api.names import REPORT_ANNOTATION
from llmkube.api.times import format_micro_time
from llmkube.clock import SystemClock
from llmkube.informers.events import EventDecoder
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.informers.splitter import LineSplitter
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import LEASES
from llmkube.metrics import Metrics

PART = "engine"
SUBJECTS = ("llmkube", "llmkube, coalescing", "kubernetes_asyncio", "kopf")
NAMESPACE = "bench-engine"
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    objects: int = 10_000
    rate: float = 200.0
    seconds: float = 20.0


async def run(cluster: ControlPlane, client: KubeClient, plan: Plan) -> list[Figure]:
    """Both halves."""
    figures = await asyncio.to_thread(pure)
    await _create(client, plan.objects)
    for subject in SUBJECTS:
        figures += await _measure(cluster, client, plan, subject)
    await cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    return figures


# Pure CPU ---------------------------------------------------------------------------------------
def pure() -> list[Figure]:
    """Microseconds per event, each the best of several rounds over the same 2,000 events."""
    lines = [_event(n) for n in range(2000)]
    stream = b"".join(line + b"\n" for line in lines)
    decoder = EventDecoder(CachedLease)
    events = [decoder.event(line) for line in lines]
    figures = [
        _figure("split a stream into lines", lambda: _split(stream), len(lines)),
        _figure("decode an event", lambda: [decoder.event(line) for line in lines], len(lines), 10),
        _figure("store an event, one handler", _storing([e.object for e in events]), len(lines), 5),
        _figure("queue: add, get, done, with metrics", _queueing(len(lines)), len(lines)),
    ]
    peer = _figure("decode an event", _unmarshalling([line.decode() for line in lines]), len(lines))
    return [*figures, replace(peer, subject="kubernetes_asyncio")]


def _unmarshalling(texts: Sequence[str]) -> Callable[[], None]:
    """What kubernetes_asyncio does with each line of a watch."""
    from kubernetes_asyncio.client import ApiClient
    from kubernetes_asyncio.watch import Watch

    async def unmarshal() -> None:
        watch = Watch()
        for text in texts:
            watch.unmarshal_event(text, "V1Lease")
        client: ApiClient = watch._api_client
        await client.close()

    return lambda: asyncio.run(unmarshal())


def _figure(
    name: str, work: Callable[[], object], count: int, target: float | None = None
) -> Figure:
    rounds = []
    for _ in range(_REPEATS):
        gc.collect()
        began = time.process_time()
        work()
        rounds.append((time.process_time() - began) / count * 1e6)
    return Figure(PART, name, "llmkube", min(rounds), "µs", target)


def _split(stream: bytes) -> int:
    splitter, count = LineSplitter(2**26), 0
    for start in range(0, len(stream), 16384):  # about what one TLS record brings
        count += len(splitter.feed(stream[start : start + 16384]))
    return count


def _storing(objects: Sequence[CachedLease]) -> Callable[[], None]:
    clock = SystemClock()
    informer: Informer[CachedLease] = Informer(
        None,  # type: ignore[arg-type]  # it is never run
        LEASES,
        decode=CachedLease,
        clock=clock,
    )
    seen: list[str] = []
    informer.add_handler(lambda change: seen.append(change.key))

    def work() -> None:
        now = clock.now()
        for obj in objects:
            informer.put(obj, now, first_sight=False)
        for obj in objects:
            informer.delete(obj, now)

    return work


def _queueing(count: int) -> Callable[[], None]:
    keys = [f"ns/llmkube-metal-mac-{n}" for n in range(count)]

    async def cycle() -> None:
        queue = WorkQueue("bench", SystemClock(), Metrics().queue("bench"))
        for key in keys:
            queue.add(key)
            queue.done(await queue.get())

    return lambda: asyncio.run(cycle())


def _event(number: int) -> bytes:
    obj = {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", **_lease(number)}
    fields = {"f:metadata": {"f:annotations": {".": {}, f"f:{REPORT_ANNOTATION}": {}}}}
    obj["metadata"] |= {
        "uid": f"3f0a1c52-7d1e-4a55-9a53-{number:012}",
        "resourceVersion": str(100_000 + number),
        "creationTimestamp": "2026-11-30T12:00:00Z",
        "managedFields": [{"manager": "llmkube-agent", "operation": "Apply", "fieldsV1": fields}],
    }
    return json.dumps({"type": "MODIFIED", "object": obj}, separators=(",", ":")).encode()


# Against the API server -------------------------------------------------------------------------
async def _create(client: KubeClient, objects: int) -> None:
    from llmkube.kube.resources import NAMESPACES

    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await client.create(NAMESPACES, namespace)
    await for_each(range(objects), lambda n: client.create(LEASES, _typed(n)))


async def _measure(
    cluster: ControlPlane, client: KubeClient, plan: Plan, subject: str
) -> list[Figure]:
    with tempfile.NamedTemporaryFile(prefix="llmkube-bench-", suffix=".log") as log:
        argv = [sys.executable, "-m", "bench.peers.engine", subject]
        process = Process.start(
            subject,
            [*argv, str(cluster.admin_kubeconfig), str(plan.objects)],
            log=Path(log.name),
            env={**os.environ},
        )
        try:
            synced = await _said(process, "sync")
            per_event, delivered = await _renew(client, plan, process)
        finally:
            await process.stop()
    mine = subject.startswith("llmkube")

    def figure(name: str, value: float, unit: str, target: float | None = None) -> Figure:
        return Figure(PART, name, subject, value, unit, target if mine else None)

    return [
        figure(f"sync, {plan.objects} Leases", synced["sync"], "s"),
        figure("CPU of the sync", synced["cpu"], "s"),
        figure("longest stall of the event loop", synced["stall"] * 1e3, "ms"),
        figure("memory per object", synced["growth"] / plan.objects, "B", 4096),
        figure("resident memory", synced["rss"] / 1e6, "MB"),
        figure(f"CPU per event at {plan.rate:.0f}/s", per_event, "µs", 200),
        figure("events delivered", delivered * 100, "%"),
    ]


async def _renew(client: KubeClient, plan: Plan, process: Process) -> tuple[float, float]:
    """Renew Leases at the rate; µs of CPU for each, and the share that arrived."""
    await asyncio.sleep(2)
    usage = psutil.Process(process.pid)
    before = usage.cpu_times()
    done = await at_rate(
        range(plan.objects),
        lambda n: client.merge_patch(
            LEASES,
            _name(n),
            NAMESPACE,
            {"spec": {"renewTime": format_micro_time(datetime.now(UTC))}},
        ),
        rate=plan.rate,
        seconds=plan.seconds,
    )
    await asyncio.sleep(1)
    after = usage.cpu_times()
    os.kill(process.pid, signal.SIGUSR1)
    seen = (await _said(process, "seen"))["seen"]
    cpu = after.user + after.system - before.user - before.system
    return cpu / done * 1e6, seen / done


async def _said(process: Process, word: str) -> dict[str, Any]:
    """The line of JSON with that word in it, once the process has printed it."""
    async with asyncio.timeout(timedelta(minutes=5).total_seconds()):
        while True:
            process.check_alive()
            for line in process.output().splitlines():
                if line.startswith("{") and word in (found := json.loads(line)):
                    return dict(found)
            await asyncio.sleep(0.1)


def _name(number: int) -> str:
    return f"llmkube-metal-mac-{number:05}"


def _lease(number: int) -> dict[str, Any]:
    capacity = {"chip": "Apple M5 Max", "gpuCores": 40, "memoryBytes": 137438953472}
    report = {
        "version": 1,
        "agentVersion": "v0.1.0",
        "ingressPort": 9443,
        "ingressSPKI": "q" * 43 + "=",
        "ingressCertificate": "M" * 1000,
        "candidates": [
            {"address": f"100.101.{number // 250 % 250}.{n}", "source": "tailnet"} for n in range(6)
        ],
        "capacity": capacity | {"metalVersion": "Metal 4"},
    }
    annotations = {REPORT_ANNOTATION: json.dumps(report)}
    meta = {"name": _name(number), "namespace": NAMESPACE, "annotations": annotations}
    spec = {
        "holderIdentity": f"{number:032x}",
        "leaseDurationSeconds": 120,
        "renewTime": "2026-11-30T12:00:00.000000Z",
    }
    return {"metadata": meta, "spec": spec}


def _typed(number: int) -> dict[str, Any]:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **_lease(number)}


async def main(plan: Plan) -> list[Figure]:
    """This part alone, on a control plane of its own."""
    from contextlib import AsyncExitStack

    from tests.conftest import open_client

    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(ControlPlane.start())
        client = await open_client(stack, cluster.admin_kubeconfig)
        return await run(cluster, client, plan)


if __name__ == "__main__":
    from bench import report

    size = int(sys.argv[1]) if len(sys.argv) > 1 else Plan.objects
    table = asyncio.run(main(Plan(objects=size)))
    report.show(table, {"runs": "1"})
