"""How many Macs the controller verifies in a minute, with stub verifier pods.

Everything is real but the pods: a stand-in for scheduler and kubelet ends each of them at once with
the answer that every address is reachable. So what is measured is the road of a check through the
controller and the API server: three writes to start it, the pod's own, two to end it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from bench.load import Watcher, for_each
from bench.macs import NAMESPACE, Fleet, condition_status
from bench.macs import Plan as MacsPlan
from bench.report import Figure
from bench.subject import ours, running
from devcluster.controlplane import ControlPlane
from devcluster.kubelet import Ended, Kubelet, Pod
from llmkube.api.names import ConditionType
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import METALNODES, SERVICEACCOUNTS
from llmkube.verifier.protocol import (
    CHECK_VARIABLE,
    AddressResult,
    CheckReport,
    Outcome,
    decode_request,
    encode_report,
)

PART = "verifications"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    macs: int = 500


async def run(cluster: ControlPlane, client: KubeClient, plan: Plan) -> list[Figure]:
    """Verify every Mac of a new fleet once."""
    fleet = Fleet(client, MacsPlan(macs=plan.macs))
    await fleet.prepare()
    await _pods_are_allowed(client)
    await for_each(fleet.names, fleet.beat)
    watcher = Watcher(client, METALNODES, _reachable, NAMESPACE)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watcher.run())
        async with (
            Kubelet.start(cluster.admin_kubeconfig, runner=_all_reachable),
            running(ours("heartbeat", "verification"), cluster.admin_kubeconfig) as process,
        ):
            await watcher.until(lambda: _verified(watcher) > 0, seconds=120)
            before, first, began = process.usage().cpu, _verified(watcher), time.perf_counter()
            await watcher.until(lambda: _verified(watcher) == plan.macs, seconds=900)
            took, cpu = time.perf_counter() - began, process.usage().cpu - before
        watching.cancel()
    await fleet.remove()
    done = plan.macs - first

    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(PART, f"{name}, {plan.macs} Macs", "llmkube", value, unit)

    return [
        figure("verifications per minute", done / took * 60, ""),
        figure("CPU per verification", cpu / done * 1e6, "µs"),
    ]


async def _pods_are_allowed(client: KubeClient) -> None:
    """Return when the namespace has its default ServiceAccount, without which no pod is taken."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.get(SERVICEACCOUNTS, "default", NAMESPACE)
            except NotFound:
                await asyncio.sleep(0.1)
            else:
                return


async def _all_reachable(pod: Pod, _stop: asyncio.Event) -> Ended:
    """What a verifier answers for which every address is right."""
    environment = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}
    request = decode_request(environment[CHECK_VARIABLE])
    results = tuple(AddressResult(address, Outcome.REACHABLE) for address in request.addresses)
    return Ended(0, encode_report(CheckReport(request.input_hash, results)))


def _reachable(status: dict[str, Any]) -> str | None:
    return condition_status(status, ConditionType.REACHABLE)


def _verified(watcher: Watcher) -> int:
    return sum(value == "True" for value in watcher.values.values())
