"""Stopping the controller: in time whatever hangs, at once when asked twice, and no word lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, LEADER_LEASE, SYSTEM_NAMESPACE
from llmkube.controller.tuning import Tuning
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import EVENTS, LEASES
from tests.support.controller import ControllerProcess, running_controller
from tests.support.faultproxy import FaultProxy, Swallow
from tests.support.hubs import Site
from tests.support.wait import eventually

MANIFEST = Path(__file__).resolve().parent.parent / "config" / "manager" / "deployment.yaml"
STATUS_WRITES = r"^PATCH .*/status"
PATIENT_LEADER = {"lease_duration": "3m", "renew_deadline": "2m", "stop_timeout": "100s"}
Unique = Callable[[str], str]


def test_a_stop_takes_at_most_ten_seconds_and_the_deployment_grants_more() -> None:
    tuning = Tuning()
    scrapes = timedelta(seconds=1)  # `health.serving` waits so long for those under way
    longest = tuning.life.drain + tuning.life.last_events + tuning.leader.release_timeout + scrapes
    assert longest <= timedelta(seconds=10)
    pod = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]
    assert longest < timedelta(seconds=pod["terminationGracePeriodSeconds"])


@pytest.fixture
async def proxy(shipped: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(shipped) as running:
        yield running


@pytest.fixture
async def account(shipped: ControlPlane, proxy: FaultProxy) -> Path:
    """The controller's own, through the proxy."""
    return await shipped.service_account_kubeconfig(
        SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT, server=proxy.server, ca_pem=proxy.ca_pem
    )


@pytest.fixture
async def site(admin: KubeClient, unique: Unique) -> AsyncIterator[Site]:
    site = Site(admin, unique("site"))
    await site.register()
    yield site
    await site.remove()


def started(controller: ControllerProcess) -> bool:
    return bool(controller.logged("controller started"))


async def ended(controller: ControllerProcess, within: float) -> int:
    async with asyncio.timeout(within):
        return await controller.process.wait()


@pytest.mark.cluster
async def test_a_stop_is_bounded_while_every_write_hangs(
    account: Path, proxy: FaultProxy, site: Site, admin: KubeClient
) -> None:
    tuning = {"life": {"drain": "1s"}, "leader": PATIENT_LEADER}
    flags = ("--leader-elect", "--controllers=federatedcluster")
    async with running_controller(account, *flags, tuning=tuning) as controller:
        await eventually(lambda: started(controller), "it leads", within=timedelta(seconds=60))
        proxy.forget()
        with proxy.playing(Swallow(), r"^(PATCH|PUT|POST) "):
            await site.push()
            await eventually(lambda: proxy.count(STATUS_WRITES), "a write hangs")
            controller.process.signal(signal.SIGTERM)
            assert await ended(controller, within=30) == 0  # a renewal has a minute
        assert controller.logged("lease not released, it will expire")
        assert controller.logged("stopped")
    await admin.delete(LEASES, LEADER_LEASE, SYSTEM_NAMESPACE)  # it would bar others for minutes


@pytest.mark.cluster
async def test_a_second_sigterm_ends_it_at_once(
    account: Path, proxy: FaultProxy, site: Site
) -> None:
    tuning = {"life": {"drain": "90s"}, "leader": PATIENT_LEADER}
    async with running_controller(
        account, "--controllers=federatedcluster", tuning=tuning
    ) as controller:
        await eventually(lambda: started(controller), "it works", within=timedelta(seconds=60))
        proxy.forget()
        with proxy.playing(Swallow(), STATUS_WRITES):
            await site.push()
            await eventually(lambda: proxy.count(STATUS_WRITES), "a write hangs")
            controller.process.signal(signal.SIGTERM)
            await eventually(lambda: _stopping(controller), "it drains")
            controller.process.signal(signal.SIGTERM)
            assert await ended(controller, within=30) == 1


@pytest.mark.cluster
async def test_the_event_of_the_last_reconcile_is_told(
    account: Path, proxy: FaultProxy, site: Site, admin: KubeClient
) -> None:
    tuning: dict[str, Any] = {"phase": {"default_interval": "1s"}}
    flag = "--controllers=federatedcluster"  # no lease is released: nothing else takes time
    async with running_controller(account, flag, tuning=tuning) as controller:

        async def connected() -> bool:
            await site.push()
            return await site.phase() == "Connected"

        await eventually(connected, "it is connected", within=timedelta(seconds=60))
        proxy.forget()
        with proxy.frozen(STATUS_WRITES):
            await eventually(lambda: proxy.count(STATUS_WRITES), "it is silent for too long")
            controller.process.signal(signal.SIGTERM)
            await eventually(lambda: _stopping(controller), "it drains")
        assert await ended(controller, within=30) == 0
    assert await site.phase() == "Stale"
    uid = (await site.get())["metadata"]["uid"]
    events = await admin.list(EVENTS, "default", field_selector=f"regarding.uid={uid}")
    assert any("from Connected to Stale" in event["note"] for event in events)


def _stopping(controller: ControllerProcess) -> bool:
    return bool(controller.logged("stopping: letting the reconciles in hand finish"))
