"""Many Macs: the cap holds, everybody is served, and those who cannot be served hold up nobody."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devcluster.kubelet import Fault, FaultKind, Kubelet
from llmkube.kube.resources import METALNODES, PODS
from tests.support.fleet import Fleet, Mac, all_reachable, answering, reporting, scaled, verifying
from tests.support.recording import Recording, recording
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
async def controller(shipped: ControlPlane) -> Path:
    return await wait_until_pods_are_allowed(shipped)


@pytest.fixture
def fleet(admin: KubeClient, namespace: str) -> Fleet:
    return Fleet(admin, namespace)


async def add_many(fleet: Fleet, prefix: str, count: int) -> list[Mac]:
    """Macs, made sixteen at a time."""
    macs: list[Mac] = []
    for first in range(0, count, 16):
        names = [f"{prefix}-{n}" for n in range(first, min(first + 16, count))]
        macs += await asyncio.gather(
            *(fleet.add(name, report=reporting("127.0.0.1")) for name in names)
        )
    return macs


async def test_25_unschedulable_macs_do_not_hold_up_a_26th(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    lost = await add_many(fleet, "lost", 25)
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)) as kubelet,
        recording(admin, PODS, fleet.namespace) as pods,
    ):
        for mac in lost:
            kubelet.play(Fault(FaultKind.UNSCHEDULABLE), namespace=fleet.namespace, owner=mac.name)
        async with verifying(controller, namespaces=(fleet.namespace,), checks=scaled()):
            await eventually(lambda: _count(fleet, 20), "all slots are taken")
            late = await fleet.add("late", report=reporting("127.0.0.1"))
            await late.becomes("True", "Verified")
            for mac in lost:
                await mac.becomes("Unknown", "VerifierFailed")
            again = await fleet.add("later", report=reporting("127.0.0.1"))
            await again.becomes("True", "Verified")
    assert pods.most_at_once() <= 20


async def _count(fleet: Fleet, count: int) -> bool:
    return len(await fleet.verifier_pods()) >= count


async def test_500_macs_reconnect_at_once(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    """All are verified, never more than the cap at once, and a newly added one is not last."""
    macs = await add_many(fleet, "mac", 500)
    for first in range(0, len(macs), 16):
        await asyncio.gather(*(_was_verified_before(mac) for mac in macs[first : first + 16]))
    space = fleet.namespace
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        recording(admin, PODS, space) as pods,
        recording(admin, METALNODES, space) as nodes,
        verifying(controller, namespaces=(space,), checks=scaled(timeout=timedelta(minutes=2))),
    ):
        await eventually(lambda: len(_verified(nodes)) >= 40, "the first are verified")
        new = await fleet.add("new", report=reporting("127.0.0.1"))
        await eventually(lambda: "new" in _verified(nodes), "the new one is", within=GENEROUS)
        assert len(_verified(nodes)) < 400, "the new one was not last"
        await eventually(lambda: len(_verified(nodes)) == 501, "all are", within=GENEROUS)
        await new.without_pods()
        await eventually(lambda: not pods.alive(), "no pod is left")
    assert pods.most_at_once() <= 20
    assert len(pods.added()) == 501, "one check each"


GENEROUS = timedelta(minutes=12)


async def _was_verified_before(mac: Mac) -> None:
    """As the controller left it when the agent went silent, an hour ago."""
    condition = {
        "type": "Reachable",
        "status": "Unknown",
        "reason": "AgentDisconnected",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:10:00Z",
        "observedGeneration": 1,
    }
    book = {
        "lastStartTime": "2026-01-01T00:00:00Z",
        "lastCheckTime": "2026-01-01T00:00:01Z",
        "inputHash": "0" * 64,
        "consecutiveFailures": 0,
    }
    await mac.write_status({"conditions": [condition], "verification": book})


def _verified(nodes: Recording) -> set[str]:
    """Names of the Macs that were seen to be reachable."""
    return {obj["metadata"]["name"] for _, obj in nodes.events if "hostIP" in obj.get("status", {})}
