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
from tests.support.recording import recording
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


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


async def connect(macs: list[Mac], *, connected: bool = True) -> None:
    """All at once, as far as one client can."""
    for first in range(0, len(macs), 16):
        await asyncio.gather(
            *(mac.connect(connected=connected) for mac in macs[first : first + 16])
        )


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
    checks = scaled(max_concurrent=20, timeout=timedelta(minutes=2))
    runner = answering(all_reachable)
    async with Kubelet.start(shipped.admin_kubeconfig, runner=runner):
        async with verifying(controller, namespaces=(fleet.namespace,), checks=checks):
            await eventually(
                lambda: _verified(fleet, 500), "all are verified", within=timedelta(minutes=4)
            )
            for first in range(0, 500, 16):
                await asyncio.gather(
                    *(m.connect(connected=False) for m in macs[first : first + 16])
                )
            await eventually(lambda: _verified(fleet, 0), "all are disconnected")
        await connect(macs)
        async with (
            recording(admin, PODS, fleet.namespace) as pods,
            verifying(controller, namespaces=(fleet.namespace,), checks=checks),
        ):
            await eventually(lambda: _verified(fleet, 20), "the first are verified")
            new = await fleet.add("new", report=reporting("127.0.0.1"))
            await new.becomes("True", "Verified")
            assert await _verified_count(fleet) < 480, "the new one was not last"
            await eventually(
                lambda: _verified(fleet, 501), "all are verified", within=timedelta(minutes=4)
            )

            async def none_left() -> bool:
                return not await fleet.verifier_pods()

            await eventually(none_left, "no pod is left")
        assert pods.most_at_once() <= 20
        assert len(pods.added()) == 501, "one check each"


async def _verified_count(fleet: Fleet) -> int:
    found = await fleet.admin.list(METALNODES, fleet.namespace)
    conditions = [c for n in found for c in n.get("status", {}).get("conditions", [])]
    return sum(c["type"] == "Reachable" and c["status"] == "True" for c in conditions)


async def _verified(fleet: Fleet, count: int) -> bool:
    await asyncio.sleep(0.5)  # a list of 500 is work for the server under test
    found = await _verified_count(fleet)
    assert found >= count if count else found == 0, f"{found} are verified"
    return True
