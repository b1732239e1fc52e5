"""How many Macs the controller verifies in a minute, with stub verifier pods.

Everything is real but the pods: a stand-in for scheduler and kubelet ends each of them at once with
the answer that every address is reachable. So what is measured is the road of a check through the
controller and the API server: three writes to start it, the pod's own, two to end it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.load import Watcher
from bench.macs import NAMESPACE, Fleet
from bench.macs import Plan as MacsPlan
from bench.report import Figure
from bench.subject import ours, running
from devcluster.controlplane import ControlPlane
from devcluster.kubelet import Kubelet
from llmkube.api.names import ConditionType
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import SERVICEACCOUNTS
from tests.support.fleet import all_reachable, answering
from tests.support.wait import eventually

PART = "verifications"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    macs: int = 500


async def run(cluster: ControlPlane, client: KubeClient, plan: Plan) -> list[Figure]:
    """Verify every Mac of a new fleet once."""
    fleet = Fleet(client, MacsPlan(macs=plan.macs))
    await fleet.prepare()
    await eventually(
        # Without it no pod is taken.
        lambda: client.list(SERVICEACCOUNTS, NAMESPACE, field_selector="metadata.name=default"),
        "the namespace has its default ServiceAccount",
    )
    await fleet.beat_all()
    async with (
        fleet.watching(ConditionType.REACHABLE) as watcher,
        Kubelet.start(cluster.admin_kubeconfig, runner=answering(all_reachable)),
        running(ours("heartbeat", "verification"), cluster.admin_kubeconfig) as process,
    ):
        await watcher.until(lambda: _verified(watcher) > 0, seconds=120)
        before, first, began = process.usage().cpu, _verified(watcher), time.perf_counter()
        await watcher.until(lambda: _verified(watcher) == plan.macs, seconds=900)
        took, cpu = time.perf_counter() - began, process.usage().cpu - before
    await fleet.remove()
    done = plan.macs - first

    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(PART, f"{name}, {plan.macs} Macs", "llmkube", value, unit)

    return [
        figure("verifications per minute", done / took * 60, ""),
        figure("CPU per verification", cpu / done * 1e6, "µs"),
    ]


def _verified(watcher: Watcher) -> int:
    return sum(value == "True" for value in watcher.values.values())
