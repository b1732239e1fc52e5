"""What Prometheus reads from the controller as a process: followers, Macs that come and go, and
scrapes while it works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, LEADER_LEASE, SYSTEM_NAMESPACE
from llmkube.api.times import format_micro_time
from llmkube.controller.options import ControllerName
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import LEASES, METALNODES
from tests.support.background import background
from tests.support.controller import ControllerProcess, running_controller
from tests.support.hubs import Mac, Site
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

Unique = Callable[[str], str]
Series = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
async def account(shipped: ControlPlane) -> Path:
    return await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)


@pytest.fixture
async def sites(admin: KubeClient, unique: Unique) -> AsyncIterator[list[Site]]:
    made = [Site(admin, unique("site")) for _ in range(10)]
    for site in made:
        await site.register()
    yield made
    for site in made:
        await site.remove()


async def scrape(controller: ControllerProcess) -> dict[Series, float]:
    status, text = await controller.get("metrics", "/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def named(name: str, /, **labels: str) -> Series:
    return name, frozenset(labels.items())


async def test_a_follower_counts_from_zero_and_has_no_queue_until_it_leads(
    shipped: ControlPlane, admin: KubeClient, namespace: str, sites: list[Site]
) -> None:
    taken = {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": LEADER_LEASE, "namespace": namespace},
        "spec": {
            "holderIdentity": "another",
            "leaseDurationSeconds": 600,
            "renewTime": format_micro_time(datetime.now(UTC)),
        },
    }
    await admin.create(LEASES, taken, namespace)
    async with running_controller(
        shipped.admin_kubeconfig, "--leader-elect", f"--leader-elect-namespace={namespace}"
    ) as follower:
        for site in sites:
            await site.push()  # handlers see it; nobody may take it
        found = await scrape(follower)
        for name in ControllerName:
            assert found[named("workqueue_depth", name=name, controller=name)] == 0
            for result in ("success", "error", "requeue", "requeue_after"):
                total = named("controller_runtime_reconcile_total", controller=name, result=result)
                assert found[total] == 0
        assert found[named("leader_election_master_status", name=LEADER_LEASE)] == 0
        await admin.merge_patch(LEASES, LEADER_LEASE, namespace, {"spec": {"holderIdentity": ""}})
        for site in sites:
            await eventually(
                lambda site=site: is_connected(site), "it leads", within=timedelta(seconds=60)
            )
        found = await scrape(follower)
        assert found[named("leader_election_master_status", name=LEADER_LEASE)] == 1


async def is_connected(site: Site) -> bool:
    return await site.phase() == "Connected"


async def test_the_series_of_a_mac_come_with_it_and_go_with_it(
    account: Path, admin: KubeClient, namespace: str, unique: Unique
) -> None:
    mac = Mac(admin, namespace, unique("mac"))
    labels = {"namespace": namespace, "name": mac.name}
    async with running_controller(account, "--controllers=heartbeat") as controller:
        await mac.register()
        beat = await mac.beat()

        async def shown() -> bool:
            found = await scrape(controller)
            assert found.get(named("llmkube_metalnode_connected", **labels)) == 1
            stamp = found.get(named("llmkube_metalnode_heartbeat_timestamp_seconds", **labels))
            assert stamp == pytest.approx(beat.timestamp(), abs=1)
            return True

        async def gone() -> bool:
            return not any(("name", mac.name) in series for _, series in await scrape(controller))

        await eventually(shown, "its series are there")
        await admin.delete(METALNODES, mac.name, namespace)
        await eventually(gone, "its series are gone")


async def test_scrapes_and_reconciles_do_not_trip_over_each_other(
    account: Path, admin: KubeClient, sites: list[Site]
) -> None:
    tuning = {"phase": {"second": "2ms", "default_interval": "60ms"}}

    async def churn(site: Site) -> None:  # each push is a reconcile, and each silence another
        while True:
            await site.push()
            await asyncio.sleep(0.3)

    async with running_controller(
        account, "--controllers=federatedcluster", tuning=tuning
    ) as controller:
        total = named(
            "controller_runtime_reconcile_total",
            controller="federatedcluster",
            result="requeue_after",
        )
        async with background(*(churn(site) for site in sites)):
            scrapes = 0
            while scrapes < 100 or (await scrape(controller))[total] < 100:
                await asyncio.gather(*(scrape(controller) for _ in range(4)))
                scrapes += 4
        found = await scrape(controller)
        controller_label = {"controller": "federatedcluster"}
        assert found[named("controller_runtime_reconcile_panics_total", **controller_label)] == 0
