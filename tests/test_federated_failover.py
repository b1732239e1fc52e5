"""Two hubs with leader election, as processes: whoever leads, nobody is demoted for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.kube.client import KubeClient
from tests.support.background import background
from tests.support.controller import ControllerProcess, running_controller
from tests.support.hubs import Site, phases
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped"), pytest.mark.slow]

INTERVAL = timedelta(seconds=3)
TUNING = {
    "leader": {"lease_duration": "4s", "renew_deadline": "3s", "retry_period": "500ms"},
    "phase": {"default_interval": "3s"},
}
LEADS = 'leader_election_master_status{name="llmkube-controller"} 1.0'


async def test_a_frozen_leader_is_replaced_and_nobody_is_demoted_for_it(
    shipped: ControlPlane, admin: KubeClient, unique: Callable[[str], str]
) -> None:
    account = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    flags = ("--controllers=federatedcluster", "--leader-elect")
    fine, dies = Site(admin, unique("site")), Site(admin, unique("site"))
    slow = Site(admin, unique("site"), ahead=-timedelta(hours=1))
    for site in (fine, dies, slow):
        await site.register()
    pushing = background(*(site.push_every(INTERVAL / 3) for site in (fine, slow)))
    async with (
        pushing,
        phases(admin).running() as history,
        running_controller(account, *flags, tuning=TUNING) as one,
        running_controller(account, *flags, tuning=TUNING) as other,
    ):
        async with background(dies.push_every(INTERVAL / 3)):
            for site in (fine, dies, slow):
                await becomes(site, "Connected")
        leader, follower = (one, other) if await leads(one) else (other, one)
        before = {site.name: await history.mark(site.name, "Connected") for site in (fine, slow)}
        leader.process.signal(signal.SIGSTOP)
        await becomes(dies, "Unreachable")
        assert await leads(follower)
        leader.process.signal(signal.SIGCONT)
        await eventually(lambda: follows(leader), "the old leader knows that it is none")
        await history.mark(dies.name, "Unreachable")
        for site in (fine, slow):
            assert history.of(site.name)[before[site.name] :] == []
        assert history.of(dies.name)[-3:] == ["Connected", "Stale", "Unreachable"]
        await both_tell(one, other, dies)
    for site in (fine, dies, slow):
        await site.remove()


async def becomes(site: Site, phase: str) -> None:
    async def is_it() -> bool:
        found = await site.phase()
        assert found == phase, found
        return True

    await eventually(is_it, f"{site.name} is {phase}", within=timedelta(seconds=90))


async def leads(controller: ControllerProcess) -> bool:
    _, exposition = await controller.get("metrics", "/metrics")
    return LEADS in exposition


async def follows(controller: ControllerProcess) -> bool:
    return not await leads(controller)


async def both_tell(one: ControllerProcess, other: ControllerProcess, site: Site) -> None:
    """Leaders and followers alike show each site's series, until the site is gone."""
    series = f'llmkube_federatedcluster_phase{{name="{site.name}",phase="Unreachable"}} 1'
    for controller in (one, other):

        async def shown(controller: ControllerProcess = controller) -> bool:
            return series in (await controller.get("metrics", "/metrics"))[1]

        await eventually(shown, "the series is there")
    await site.remove()
    for controller in (one, other):

        async def gone(controller: ControllerProcess = controller) -> bool:
            return site.name not in (await controller.get("metrics", "/metrics"))[1]

        await eventually(gone, "its series are gone")
