"""The hub against the real API server, under its own account and the shipped policies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.clock import SystemClock
from llmkube.informers.options import ReflectorSettings
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.resources import EVENTS
from tests.conftest import ClientFor
from tests.support.background import background
from tests.support.faultproxy import WATCHES, WRITES, Answer, Drop, FaultProxy, status_body
from tests.support.hubs import PHASES, Site, leading, phases, running_hub
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
INTERVAL = PHASES.default_interval
SOON = timedelta(seconds=20)
MakeSite = Callable[..., Any]


@pytest.fixture
async def hub_client(shipped: ControlPlane, client_for: ClientFor) -> KubeClient:
    return await client_for(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)


@pytest.fixture
async def make_site(admin: KubeClient, unique: Callable[[str], str]) -> AsyncIterator[MakeSite]:
    """A factory of registered sites, removed when the test ends."""
    made: list[Site] = []

    async def make(*, ahead: timedelta = timedelta(0), interval: int | None = None) -> Site:
        site = Site(admin, unique("site"), ahead=ahead)
        await site.register(interval)
        made.append(site)
        return site

    yield make
    await asyncio.gather(*(site.remove() for site in made))


@pytest.fixture
async def proxy(shipped: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(shipped) as proxy:
        yield proxy


@pytest.fixture
async def proxied(shipped: ControlPlane, proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    """The hub's account, through the fault proxy."""
    path = await shipped.service_account_kubeconfig(
        SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT, server=proxy.server, ca_pem=proxy.ca_pem
    )
    async with AsyncExitStack() as stack:
        client = KubeClient(await load_access(path), clock=SystemClock())
        yield await stack.enter_async_context(client)


async def becomes(site: Site, phase: str, *, within: timedelta = SOON) -> None:
    async def is_it() -> bool:
        found = await site.phase()
        assert found == phase, found
        return True

    await eventually(is_it, f"{site.name} is {phase}", within=within)


async def events_of(client: KubeClient, site: Site, reason: str) -> list[dict[str, Any]]:
    found = await client.list(EVENTS, "default")
    return [e for e in found if e["regarding"]["name"] == site.name and e["reason"] == reason]


# One site ----------------------------------------------------------------------------------------
async def test_a_site_without_heartbeat_is_unreachable(
    hub_client: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client):
        site = await make_site()
        await becomes(site, "Unreachable")


async def test_a_site_that_falls_silent_goes_stale_then_unreachable_and_comes_back(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client), phases(admin).running() as history:
        site = await make_site()
        await becomes(site, "Unreachable")
        await site.push()
        await becomes(site, "Connected")
        silent_since = site.pushed_at
        assert silent_since is not None
        await becomes(site, "Unreachable", within=12 * INTERVAL + SOON)
        await site.push()
        await becomes(site, "Connected")
        await history.mark(site.name, "Connected")
        steps = history.steps[site.name][-4:]
        assert [phase for phase, _ in steps] == ["Connected", "Stale", "Unreachable", "Connected"]
        assert steps[1][1] - silent_since > 3 * INTERVAL
        assert steps[2][1] - silent_since > 10 * INTERVAL
        changed = await eventually(
            lambda: events_of(admin, site, "PhaseChanged"), "Events about it"
        )
        assert any("from Connected to Stale" in event["note"] for event in changed)


async def test_the_hub_writes_phase_and_nothing_else(
    hub_client: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client):
        site = await make_site()
        await site.push()
        await becomes(site, "Connected")
    found = await site.get()
    managed = {entry["manager"]: entry["fieldsV1"] for entry in found["metadata"]["managedFields"]}
    assert managed["llmkube-hub"] == {"f:status": {"f:phase": {}}}
    assert found["status"]["capacity"] == {"nodes": 3, "gpusTotal": 8, "gpusAllocatable": 6}


async def test_a_site_that_pushes_in_time_costs_no_write_and_no_reconcile(
    proxied: KubeClient, proxy: FaultProxy, make_site: MakeSite
) -> None:
    async with running_hub(proxied) as hub:
        site = await make_site(interval=3000)
        await site.push()
        await becomes(site, "Connected")
        await hub.settled()
        proxy.forget()
        hub.runs.clear()
        for _ in range(20):
            await site.push()
        last = site.pushed_at
        await eventually(
            lambda: hub.reconciler.book.get(site.name).stamp == last, "the last push seen"
        )
        assert proxy.count(WRITES) == 0
        assert hub.runs == []


async def test_a_deleted_site_is_forgotten_and_its_namesake_starts_anew(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client) as hub:
        site = await make_site()
        await site.push()
        await becomes(site, "Connected")
        await site.remove()
        await eventually(lambda: hub.reconciler.book.get(site.name) is None, "it is forgotten")
        await site.register()
        await becomes(site, "Unreachable")


# Clocks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ahead", [-HOUR, HOUR], ids=["an hour slow", "an hour fast"])
async def test_a_site_with_a_wrong_clock_is_connected_by_its_fourth_push(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite, ahead: timedelta
) -> None:
    async with running_hub(hub_client) as hub:
        site = await make_site(ahead=ahead)
        await push_seen(hub, site, times=4)
        await becomes(site, "Connected")
        await eventually(lambda: events_of(admin, site, "ClockSkew"), "an Event about its clock")


async def push_seen(hub: Any, site: Site, *, times: int) -> None:
    """Push, and wait until the hub has seen it: else it might see only the last of several."""
    for _ in range(times):
        await site.push()
        stamp = site.pushed_at

        def seen(stamp: datetime | None = stamp) -> bool:
            record = hub.reconciler.book.get(site.name)
            return record is not None and record.stamp == stamp

        await eventually(seen, "the push is seen")


async def test_a_clock_that_steps_back_costs_at_most_one_demotion(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client) as hub, phases(admin).running() as history:
        site = await make_site()
        await push_seen(hub, site, times=5)
        await becomes(site, "Connected")
        before = await history.mark(site.name, "Connected")
        site.ahead = -HOUR
        await push_seen(hub, site, times=4)
        await becomes(site, "Connected")
        await history.mark(site.name, "Connected")
        later = history.of(site.name)[before:]
        assert later in ([], ["Unreachable", "Connected"])


async def test_a_stamp_that_moves_back_is_never_held_back(
    hub_client: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client) as hub:
        site = await make_site(interval=3000)  # 100 s here: the calm of the start lasts for minutes
        await push_seen(hub, site, times=1)
        await becomes(site, "Connected")
        site.ahead = -HOUR
        await push_seen(hub, site, times=1)
        await becomes(site, "Unreachable")
        assert hub.reconciler.book.get(site.name).backwards


# Intervals ---------------------------------------------------------------------------------------
async def test_a_shorter_interval_demotes_nobody_before_the_next_push(
    hub_client: KubeClient, make_site: MakeSite
) -> None:
    async with running_hub(hub_client):
        site = await make_site(interval=300)  # 10 s here
        await site.push()
        await becomes(site, "Connected")
        await site.set_interval(5)  # a sixth of a second here
        await asyncio.sleep(20 * 5 / 30)
        assert await site.phase() == "Connected"
        await site.push()
        await becomes(site, "Unreachable")


# Restarts, failover, blindness -------------------------------------------------------------------
async def test_a_restart_demotes_nobody_who_goes_on_pushing_nor_forgets_who_does_not(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    alive, slow, dead = await make_site(), await make_site(ahead=-HOUR), await make_site()
    async with (
        background(alive.push_every(INTERVAL), slow.push_every(INTERVAL)),
        phases(admin).running() as history,
    ):
        async with running_hub(hub_client):
            await dead.push()
            for site in (alive, slow, dead):
                await becomes(site, "Connected")
        before = {site.name: await history.mark(site.name, "Connected") for site in (alive, slow)}
        async with running_hub(hub_client):
            await becomes(dead, "Unreachable", within=15 * INTERVAL + SOON)
        for site in (alive, slow):
            assert history.of(site.name)[before[site.name] :] == []
        await history.mark(dead.name, "Unreachable")
        assert history.of(dead.name)[-3:] == ["Connected", "Stale", "Unreachable"]


async def test_a_follower_has_seen_what_the_leader_saw(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    slow = await make_site(ahead=-HOUR)
    async with (
        background(slow.push_every(INTERVAL / 4)),
        running_hub(hub_client, leads=False) as follower,
    ):
        async with running_hub(hub_client):
            await becomes(slow, "Connected")
            await eventually(
                lambda: follower.reconciler.book.get(slow.name).forward >= 2,
                "the follower trusts the site, too",
            )
        async with phases(admin).running() as history, leading(follower):
            await eventually(lambda: slow.name in follower.runs, "the new leader has decided")
            await asyncio.sleep(2 * INTERVAL.total_seconds())
            assert history.of(slow.name) == ["Connected"]


@pytest.mark.parametrize("how", ["cut", "half-open"])
async def test_a_blind_hub_demotes_nobody(
    proxied: KubeClient, proxy: FaultProxy, admin: KubeClient, make_site: MakeSite, how: str
) -> None:
    site = await make_site()
    patient = ReflectorSettings(backoff_base=0.1 * SECOND, backoff_cap=0.2 * SECOND)
    async with (
        background(site.push_every(INTERVAL / 2)),
        running_hub(proxied, reflector=patient) as hub,
        phases(admin).running() as history,
    ):
        await becomes(site, "Connected")
        before = await history.mark(site.name, "Connected")
        seen = hub.reconciler.book.get(site.name)
        await blind(proxy, how, for_=6 * INTERVAL)
        await eventually(
            lambda: hub.reconciler.book.get(site.name).stamp > seen.stamp, "the hub sees again"
        )
        await asyncio.sleep(2 * INTERVAL.total_seconds())
        assert history.of(site.name)[before:] == []


async def blind(proxy: FaultProxy, how: str, *, for_: timedelta) -> None:
    if how == "cut":
        with proxy.playing(Drop(), WATCHES):
            proxy.cut(WATCHES)
            await asyncio.sleep(for_.total_seconds())
        return
    with proxy.frozen(WATCHES):
        await asyncio.sleep(for_.total_seconds())
    proxy.cut(WATCHES)


async def test_who_died_while_the_hub_was_blind_is_demoted_after_the_calm(
    proxied: KubeClient, proxy: FaultProxy, make_site: MakeSite
) -> None:
    async with running_hub(proxied):
        site = await make_site()
        await site.push()
        await becomes(site, "Connected")
        with proxy.playing(Drop(), WATCHES):
            proxy.cut(WATCHES)
            await asyncio.sleep(5 * INTERVAL.total_seconds())
            assert await site.phase() == "Connected"
        await becomes(site, "Stale", within=5 * INTERVAL + SOON)


async def test_a_demotion_that_was_refused_once_is_not_forgotten(
    proxied: KubeClient, proxy: FaultProxy, make_site: MakeSite
) -> None:
    refusals = r"^PATCH .*/status"
    async with running_hub(proxied):
        site = await make_site()
        await site.push()
        await becomes(site, "Connected")
        proxy.forget()
        with proxy.playing(Answer(422, status_body(422, "Invalid")), refusals):
            await eventually(lambda: proxy.count(refusals) == 1, "a policy refuses the write")
        await site.push()  # once more, then it is dead for good
        await becomes(site, "Unreachable", within=12 * INTERVAL + SOON)


async def test_an_answer_that_the_watch_overtook_is_no_step_back(
    proxied: KubeClient, proxy: FaultProxy, make_site: MakeSite
) -> None:
    site = await make_site(ahead=-HOUR)
    reads = rf"^GET .*/federatedclusters/{site.name}"
    async with running_hub(proxied) as hub:
        await push_seen(hub, site, times=4)
        await becomes(site, "Connected")
        with proxy.frozen(reads):
            await eventually(lambda: proxy.open_count(reads) == 1, "a demotion is to be confirmed")
            await asyncio.sleep(0.3)  # the API server has answered, and the answer is on its way
            await push_seen(hub, site, times=1)
        await eventually(lambda: proxy.open_count(reads) == 0, "the answer is there")
        await eventually(lambda: len(hub.queue) == 0, "it was decided upon")
        record = hub.reconciler.book.get(site.name)
        assert record.stamp == site.pushed_at
        assert (record.forward, record.backwards) == (2, False)
        assert await site.phase() == "Connected"


# Many sites --------------------------------------------------------------------------------------
@pytest.mark.slow
async def test_200_sites_of_which_half_stop(
    hub_client: KubeClient, admin: KubeClient, make_site: MakeSite
) -> None:
    sites = [await make_site(interval=90) for _ in range(200)]
    interval = 90 * PHASES.second
    stopping, staying = sites[:100], sites[100:]
    async with (
        running_hub(hub_client),
        phases(admin).running() as history,
        background(*(site.push_every(interval) for site in staying)),
    ):
        async with background(*(site.push_every(interval) for site in stopping)):
            for site in sites:
                await becomes(site, "Connected")
        for site in stopping:
            await becomes(site, "Unreachable", within=12 * interval + SOON)
        await asyncio.gather(*(site.push() for site in stopping))
        for site in stopping:
            await becomes(site, "Connected")
            await history.mark(site.name, "Connected")
    for site in stopping:
        assert history.of(site.name)[-4:] == ["Connected", "Stale", "Unreachable", "Connected"]
        assert history.of(site.name).count("Stale") == 1
    for site in staying:
        assert "Stale" not in history.of(site.name)
