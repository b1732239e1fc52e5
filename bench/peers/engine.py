"""One watcher of Leases as a process: `python -m bench.peers.engine SUBJECT KUBECONFIG OBJECTS`.

Each subject fills a cache of all Leases and hands every later event on. The process prints a JSON
line when its cache is full (seconds since its request began, longest stall of its event loop
meanwhile, growth of its memory), and on SIGUSR1 how many events it has seen since.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

TICK = 0.002


class Probe:
    """What the process reports about itself."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = 0
        self.began = asyncio.Event()
        self.full = asyncio.Event()
        self._stall = 0.0
        self._rss = 0
        self._since = 0.0
        self._cpu = 0.0

    async def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do the work, and report when the cache is full."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._say_seen)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work)
            await self.began.wait()
            ticking = tasks.create_task(self._tick())
            await self.full.wait()
            elapsed = time.perf_counter() - self._since
            await asyncio.sleep(1)  # a collection or a late handler still counts as a stall
            ticking.cancel()
            cpu = time.process_time() - self._cpu
            gc.collect()
            rss = psutil.Process().memory_info().rss
            self.seen = 0
            report = {"sync": elapsed, "stall": self._stall, "cpu": cpu, "rss": rss}
            print(json.dumps(report | {"growth": rss - self._rss}), flush=True)

    def begin(self) -> None:
        """The subject is imported and connected: from here on it is measured."""
        gc.collect()
        self._rss = psutil.Process().memory_info().rss
        self._since, self._cpu = time.perf_counter(), time.process_time()
        self.began.set()

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            self._stall = max(self._stall, time.perf_counter() - before - TICK)

    def _say_seen(self) -> None:
        print(json.dumps({"seen": self.seen}), flush=True)


async def ours(probe: Probe, kubeconfig: Path, coalesce: timedelta) -> None:
    """The shared informer, a queue and a worker behind it, as in the controller."""
    import structlog

    from llmkube.api.cached import CachedLease
    from llmkube.clock import SystemClock
    from llmkube.informers.informer import Informer
    from llmkube.informers.memory import freeze_after_sync
    from llmkube.informers.queue import WorkQueue
    from llmkube.informers.store import Change
    from llmkube.informers.worker import DONE, Outcome, run_workers
    from llmkube.kube.client import KubeClient
    from llmkube.kube.config import load_access
    from llmkube.kube.resources import LEASES
    from llmkube.metrics import Metrics

    clock, metrics = SystemClock(), Metrics()
    queue = WorkQueue("bench", clock, metrics.queue("bench"))

    async def reconcile(_key: str) -> Outcome:
        return DONE

    def enqueue(change: Change[CachedLease]) -> None:
        probe.seen += 1
        queue.add(change.key, initial=change.first_sight)

    async with KubeClient(await load_access(kubeconfig), clock=clock, metrics=metrics) as client:
        informer = Informer(
            client,
            LEASES,
            decode=CachedLease,
            pace=lambda: coalesce,
            clock=clock,
            metrics=metrics.reflector("leases"),
        )
        informer.add_handler(enqueue)

        await client.server_version()
        probe.begin()

        async def sync() -> None:
            await freeze_after_sync([informer.wait_synced])
            while len(queue):
                await asyncio.sleep(TICK)
            probe.full.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(informer.run())
            tasks.create_task(sync())
            tasks.create_task(
                run_workers(
                    queue,
                    reconcile,
                    concurrency=8,
                    log=structlog.get_logger(),
                    metrics=metrics.reconcile("bench"),
                )
            )


async def kubernetes_asyncio(probe: Probe, kubeconfig: Path) -> None:
    """A list and the library's own Watch, into a dict."""
    from kubernetes_asyncio import client, config, watch

    await config.load_kube_config(str(kubeconfig))
    async with client.ApiClient() as api:
        leases = client.CoordinationV1Api(api)
        await client.VersionApi(api).get_code()
        probe.begin()
        listed = await leases.list_lease_for_all_namespaces()
        cache = {(one.metadata.namespace, one.metadata.name): one for one in listed.items}
        probe.full.set()
        version = listed.metadata.resource_version
        del listed
        async with watch.Watch() as stream:
            events = stream.stream(leases.list_lease_for_all_namespaces, resource_version=version)
            async for event in events:
                one = event["object"]
                cache[one.metadata.namespace, one.metadata.name] = one
                probe.seen += 1


async def kopf(probe: Probe, kubeconfig: Path) -> None:
    """An event handler that keeps each body."""
    import kopf as framework

    os.environ["KUBECONFIG"] = str(kubeconfig)
    logging.getLogger("kopf").setLevel(logging.ERROR)
    registry = framework.OperatorRegistry()
    cache: dict[str, Any] = {}

    @framework.on.login(registry=registry)
    async def login(**details: Any) -> Any:
        return framework.login_with_kubeconfig(**details)

    @framework.on.startup(registry=registry)
    async def configure(settings: framework.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        probe.begin()

    @framework.on.event("coordination.k8s.io", "v1", "leases", registry=registry)
    async def seen(body: Any, **_: Any) -> None:
        cache[body["metadata"]["uid"]] = dict(body)
        probe.seen += 1
        if len(cache) >= probe.wanted:
            probe.full.set()

    await framework.operator(registry=registry, clusterwide=True, standalone=True)


async def main(subject: str, kubeconfig: Path, objects: int) -> None:
    """Run one subject for ever."""
    probe = Probe(objects)
    work = {
        "llmkube": lambda: ours(probe, kubeconfig, timedelta(0)),
        "llmkube, coalescing": lambda: ours(probe, kubeconfig, timedelta(milliseconds=50)),
        "kubernetes_asyncio": lambda: kubernetes_asyncio(probe, kubeconfig),
        "kopf": lambda: kopf(probe, kubeconfig),
    }[subject]
    await probe.run(work())


if __name__ == "__main__":
    name, path, count = sys.argv[1:]
    if name.startswith("llmkube"):
        import structlog
        import uvloop

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        uvloop.run(main(name, Path(path), int(count)))
    else:
        asyncio.run(main(name, Path(path), int(count)))
