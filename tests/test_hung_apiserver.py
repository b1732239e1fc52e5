"""An API server that hangs for less than the inactivity limit: open streams, and nobody is heard.

Senders with short timeouts run out of time while it hangs, and so does the answer to the live read
that their demotion waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import ApiError
from llmkube.kube.resources import LEASES, NAMESPACES
from tests.conftest import ClientFor
from tests.support.background import background
from tests.support.controller import running_controller
from tests.support.hubs import (
    Mac,
    Running,
    Site,
    connections,
    phases,
    running_heartbeats,
    running_hub,
)
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

HANG = timedelta(seconds=6)
"""Twice as long as senders count here, and a fraction of the inactivity limit."""
CALM = timedelta(seconds=5)
"""The longest that expiry is held back here: three intervals of a second, and two more."""
SENDERS = 12


@pytest.fixture
async def controller_client(client_for: ClientFor) -> KubeClient:
    return await client_for(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)


async def keep_sending(send: Callable[[], Awaitable[object]], *, again: float = 1) -> None:
    """Send each second; have little patience, and try again `again` seconds later."""
    while True:
        try:
            async with asyncio.timeout(0.5):
                await send()
        except (ApiError, TimeoutError):
            await asyncio.sleep(again)
        else:
            await asyncio.sleep(1)


@asynccontextmanager
async def hanging(cluster: ControlPlane) -> AsyncIterator[None]:
    cluster.pause_apiserver()
    try:
        yield
    finally:
        cluster.resume_apiserver()


async def test_the_client_tells_of_what_should_have_been_quick(
    shipped: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    told: list[timedelta] = []
    admin.add_late_listener(lambda asked, now: told.append(now - asked))
    await admin.get(NAMESPACES, namespace)
    assert told == []
    lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": {"name": "one"}}
    async with hanging(shipped), asyncio.TaskGroup() as asking:
        asking.create_task(admin.get(NAMESPACES, namespace))
        asking.create_task(admin.create(LEASES, lease, namespace))
        asking.create_task(admin.list_page(LEASES, namespace, limit=10))
        await asyncio.sleep(1.5)
        shipped.resume_apiserver()
    assert len(told) == 1, "creations pass webhooks, and lists may be long"
    assert told[0] > timedelta(seconds=1)


async def test_no_site_is_demoted_but_the_dead_one(
    shipped: ControlPlane,
    controller_client: KubeClient,
    admin: KubeClient,
    unique: Callable[[str], str],
) -> None:
    sites = [Site(admin, unique("site")) for _ in range(SENDERS)]
    dead = Site(admin, unique("site"))
    await asyncio.gather(*(site.register() for site in (*sites, dead)))
    async with (
        background(*(keep_sending(site.push) for site in sites)),
        running_hub(controller_client) as hub,
        phases(admin).running() as history,
    ):
        async with background(keep_sending(dead.push)):
            before = {
                site.name: await history.mark(site.name, "Connected") for site in (*sites, dead)
            }
            await past_the_calm(hub)
        async with hanging(shipped):
            await asyncio.sleep(HANG.total_seconds())
        await eventually(lambda: history.of(dead.name)[-1] == "Unreachable", "the dead is told")
        assert history.of(dead.name)[before[dead.name] :] == ["Stale", "Unreachable"]
        for site in sites:
            assert history.of(site.name)[before[site.name] :] == []
    await asyncio.gather(*(site.remove() for site in (*sites, dead)))


async def test_no_mac_is_disconnected_but_the_dead_one(
    shipped: ControlPlane,
    controller_client: KubeClient,
    admin: KubeClient,
    namespace: str,
    unique: Callable[[str], str],
) -> None:
    macs = [Mac(admin, namespace, unique("mac")) for _ in range(SENDERS)]
    dead = Mac(admin, namespace, unique("mac"))
    await asyncio.gather(*(mac.register() for mac in (*macs, dead)))
    key = f"{namespace}/{{}}".format
    async with (
        background(*(keep_sending(mac.beat) for mac in macs)),
        running_heartbeats(controller_client, namespace) as controller,
        connections(admin, namespace).running() as history,
    ):
        async with background(keep_sending(dead.beat)):
            before = {mac.name: await history.mark(key(mac.name), "True") for mac in (*macs, dead)}
            await past_the_calm(controller)
        async with hanging(shipped):
            await asyncio.sleep(HANG.total_seconds())
        await eventually(lambda: history.of(key(dead.name))[-1] == "False", "the dead is told")
        for mac in macs:
            assert history.of(key(mac.name))[before[mac.name] :] == []


async def test_nor_does_the_loss_of_the_leadership_meanwhile(
    shipped: ControlPlane, admin: KubeClient, unique: Callable[[str], str]
) -> None:
    """The live reads end with the term; what is left to tell of the hang are the renewals."""
    path = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    tuning = {
        "leader": {"lease_duration": "3s", "renew_deadline": "2s", "retry_period": "0.5s"},
        "phase": {"default_interval": "1s", "second": "0.033s"},
    }
    sites = [Site(admin, unique("site")) for _ in range(SENDERS)]
    await asyncio.gather(*(site.register() for site in sites))
    flags = ("--leader-elect", "--controllers=federatedcluster")
    async with (
        background(*(keep_sending(site.push, again=2) for site in sites)),
        running_controller(path, *flags, tuning=tuning) as controller,
        phases(admin).running() as history,
    ):
        before = {site.name: await history.mark(site.name, "Connected") for site in sites}
        await asyncio.sleep(2 * CALM.total_seconds())
        terms = len(controller.logged("controller started"))
        async with hanging(shipped):
            await asyncio.sleep(2 * HANG.total_seconds())
        await eventually(
            lambda: len(controller.logged("controller started")) > terms, "it leads again"
        )
        await asyncio.sleep(CALM.total_seconds())
        for site in sites:
            assert history.of(site.name)[before[site.name] :] == []
    await asyncio.gather(*(site.remove() for site in sites))


async def past_the_calm(running: Running) -> None:
    """The start holds expiry back, too: let that pass, or it would hide what we look for."""
    clock, (view, *_) = SystemClock(), [informer.view for informer in running.informers]
    started = view.up_since
    assert started is not None
    await eventually(lambda: clock.monotonic() > started + CALM, "the calm is over")
