"""Heartbeats against the real API server, under the controller's own account."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.api.times import parse_time
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.resources import EVENTS, LEASES, METALNODES, NAMESPACES, SERVICEACCOUNTS
from tests.conftest import ClientFor
from tests.support.background import background
from tests.support.faultproxy import WATCHES, Answer, Drop, FaultProxy, status_body
from tests.support.hubs import HEARTBEATS, Mac, connections, leading, running_heartbeats
from tests.support.reports import report_text
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
TIMEOUT = HEARTBEATS.default_timeout
RECEIVED = ("True", "HeartbeatReceived")
EXPIRED = ("False", "HeartbeatExpired")
NEVER = ("False", "NeverConnected")
NO_LEASE = ("False", "LeaseNotFound")
REVOKED = ("False", "ServiceAccountNotFound")
MakeMac = Callable[..., Awaitable[Mac]]


@pytest.fixture
async def controller_client(shipped: ControlPlane, client_for: ClientFor) -> KubeClient:
    return await client_for(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)


@pytest.fixture
def make_mac(admin: KubeClient, namespace: str, unique: Callable[[str], str]) -> MakeMac:
    """A factory of registered Macs."""

    async def make(*, ahead: timedelta = timedelta(0), lease: bool = True) -> Mac:
        mac = Mac(admin, namespace, unique("mac"), ahead=ahead)
        await mac.register(lease=lease)
        return mac

    return make


@pytest.fixture
async def proxy(shipped: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(shipped) as proxy:
        yield proxy


@pytest.fixture
async def proxied(shipped: ControlPlane, proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    """The controller's account, through the fault proxy."""
    path = await shipped.service_account_kubeconfig(
        SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT, server=proxy.server, ca_pem=proxy.ca_pem
    )
    async with AsyncExitStack() as stack:
        client = KubeClient(await load_access(path), clock=SystemClock())
        yield await stack.enter_async_context(client)


async def becomes(mac: Mac, wanted: tuple[str, str]) -> None:
    async def is_it() -> bool:
        found = await mac.connected()
        assert found == wanted, found
        return True

    await eventually(is_it, f"{mac.name} is {wanted}")


async def beat_seen(controller: Any, mac: Mac, **beat: Any) -> datetime:
    """Beat, and wait until the controller has seen it."""
    stamp = await mac.beat(**beat)
    key = f"{mac.namespace}/{mac.name}"

    def seen() -> bool:
        record = controller.reconciler.book.get(key)
        return record is not None and record.stamp == stamp

    await eventually(seen, "the beat is seen")
    return stamp


async def events_of(client: KubeClient, mac: Mac, reason: str) -> list[dict[str, Any]]:
    found = await client.list(EVENTS, mac.namespace)
    return [e for e in found if e["regarding"]["name"] == mac.name and e["reason"] == reason]


# A Mac's life ------------------------------------------------------------------------------------
async def test_a_mac_from_registration_to_silence_and_back(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace):
        mac = await make_mac()
        await becomes(mac, NEVER)
        stamp = await mac.beat()
        await becomes(mac, RECEIVED)
        mirrored = parse_time((await mac.status())["lastHeartbeatTime"])
        assert mirrored == stamp.replace(microsecond=0)
        await becomes(mac, EXPIRED)
        assert mirrored.strftime("%H:%M:%SZ") in await mac.message()
        await mac.beat()
        await becomes(mac, RECEIVED)
        await eventually(lambda: events_of(admin, mac, "HeartbeatExpired"), "an Event about it")
        await eventually(lambda: events_of(admin, mac, "HeartbeatReceived"), "and about its end")
        assert await events_of(admin, mac, "NeverConnected") == []


async def test_nobody_expires_before_the_timeout(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with (
        running_heartbeats(controller_client, namespace),
        connections(admin, namespace).running() as history,
    ):
        mac = await make_mac()
        stamp = await mac.beat()
        await becomes(mac, EXPIRED)
        steps = await eventually(
            lambda: [s for s in history.steps[f"{namespace}/{mac.name}"] if s[0] == "False"][-1:],
            "the expiry is seen",
        )
        assert steps[0][1] - stamp > TIMEOUT


async def test_each_write_carries_what_a_valid_report_says(
    controller_client: KubeClient, namespace: str, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace):
        mac = await make_mac()
        await mac.beat(report=report_text())
        await becomes(mac, RECEIVED)
    status = await mac.status()
    assert status["agentVersion"] == "v0.1.0"
    assert status["capacity"] == {
        "chip": "Apple M5 Max",
        "gpuCores": 40,
        "memory": "128Gi",
        "memoryBytes": 137438953472,
        "metalVersion": "Metal 4",
    }
    managers = {e["manager"]: e["fieldsV1"] for e in (await mac.get())["metadata"]["managedFields"]}
    owned = managers["llmkube-heartbeat"]["f:status"]
    assert set(owned) == {"f:conditions", "f:lastHeartbeatTime", "f:agentVersion", "f:capacity"}
    assert set(owned["f:conditions"]) == {'k:{"type":"AgentConnected"}'}


async def test_a_bad_report_costs_neither_the_connection_nor_the_last_good_capacity(
    controller_client: KubeClient, namespace: str, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace):
        mac = await make_mac()
        await mac.beat(report=report_text())
        await becomes(mac, RECEIVED)
        await becomes(mac, EXPIRED)
        await mac.beat(report="{")
        await becomes(mac, RECEIVED)
        assert (await mac.status())["capacity"]["chip"] == "Apple M5 Max"


# Leases, accounts, namesakes ---------------------------------------------------------------------
async def test_a_lease_that_appears_vanishes_and_returns(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace):
        mac = await make_mac(lease=False)
        await becomes(mac, NO_LEASE)
        await mac.create_lease()
        await becomes(mac, NEVER)
        await mac.beat()
        await becomes(mac, RECEIVED)
        await admin.delete(LEASES, mac.name, namespace)
        await becomes(mac, NO_LEASE)
        await mac.create_lease()
        await becomes(mac, EXPIRED)  # it was connected once, and lastHeartbeatTime says when
        await mac.beat()
        await becomes(mac, RECEIVED)


async def test_a_revoked_mac_is_cut_off_at_once_whatever_still_beats(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace) as controller:
        mac = await make_mac()
        async with background(mac.beat_every(SECOND / 10)):
            await becomes(mac, RECEIVED)
            await admin.delete(SERVICEACCOUNTS, mac.name, namespace)
            await becomes(mac, REVOKED)
            controller.runs.clear()
            await beats_land(controller, mac, 10)
            assert await mac.connected() == REVOKED
            assert len(controller.runs) <= 2  # its beats cost nothing any more
            await mac.create_account()
            await becomes(mac, RECEIVED)


async def beats_land(controller: Any, mac: Mac, count: int) -> None:
    """Wait until the controller has seen that many more beats."""
    seen: set[datetime] = set()

    def enough() -> bool:
        seen.add(controller.reconciler.book.get(f"{mac.namespace}/{mac.name}").stamp)
        return len(seen) > count

    await eventually(enough, f"{count} beats are seen")


async def test_an_account_that_only_the_cache_lacks_is_not_missing(
    proxied: KubeClient, proxy: FaultProxy, namespace: str, make_mac: MakeMac
) -> None:
    async with running_heartbeats(proxied, namespace):
        with proxy.frozen(r"^GET .*/serviceaccounts\?.*watch="):
            mac = await make_mac()
            await mac.beat()
            await becomes(mac, RECEIVED)


async def test_a_re_created_metalnode_starts_anew(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace):
        mac = await make_mac()
        await mac.beat()
        await becomes(mac, RECEIVED)
        for resource in (METALNODES, LEASES, SERVICEACCOUNTS):
            await admin.delete(resource, mac.name, namespace)
        await mac.register()
        await becomes(mac, NEVER)
        assert "lastHeartbeatTime" not in await mac.status()
        await mac.beat()
        await becomes(mac, RECEIVED)


# Clocks and durations ----------------------------------------------------------------------------
@pytest.mark.parametrize("ahead", [-5 * HOUR, 5 * HOUR], ids=["slow", "fast"])
async def test_a_mac_whose_clock_is_wrong_by_hours_is_connected_from_its_second_beat_on(
    controller_client: KubeClient,
    namespace: str,
    admin: KubeClient,
    make_mac: MakeMac,
    ahead: timedelta,
) -> None:
    async with running_heartbeats(controller_client, namespace) as controller:
        mac = await make_mac(ahead=ahead)
        await beat_seen(controller, mac)
        await becomes(mac, EXPIRED)
        await beat_seen(controller, mac)
        await becomes(mac, RECEIVED)
        assert "clock" in await mac.message()
        await eventually(lambda: events_of(admin, mac, "ClockSkew"), "an Event about its clock")
        await becomes(mac, EXPIRED)


async def test_a_clock_that_steps_back_disconnects_nobody(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with (
        running_heartbeats(controller_client, namespace) as controller,
        connections(admin, namespace).running() as history,
    ):
        mac = await make_mac()
        await beat_seen(controller, mac)
        await becomes(mac, RECEIVED)
        before = await history.mark(f"{namespace}/{mac.name}", "True")
        mac.ahead = -5 * HOUR
        async with background(mac.beat_every(TIMEOUT / 8)):
            await asyncio.sleep(2 * TIMEOUT.total_seconds())
        assert history.of(f"{namespace}/{mac.name}")[before:] == []


async def test_a_changed_duration_applies_from_the_next_renewal(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace) as controller:
        mac = await make_mac()
        await beat_seen(controller, mac, duration=600)  # 12 s here
        await becomes(mac, RECEIVED)
        shorter = {"spec": {"leaseDurationSeconds": 15}}
        await admin.merge_patch(LEASES, mac.name, namespace, shorter)
        await asyncio.sleep(1.0)  # more than 15 scaled seconds, and no renewal
        assert await mac.connected() == RECEIVED
        await mac.beat(duration=15)
        await becomes(mac, EXPIRED)


async def test_a_removed_renew_time_is_silence(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace) as controller:
        mac = await make_mac()
        await beat_seen(controller, mac)
        await becomes(mac, RECEIVED)
        await admin.merge_patch(LEASES, mac.name, namespace, {"spec": {"renewTime": None}})
        await becomes(mac, EXPIRED)


# Restarts, failover, blindness -------------------------------------------------------------------
async def test_a_restart_in_each_state(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    never, lost, gone, alive = [await make_mac() for _ in range(4)]
    slow = await make_mac(ahead=-HOUR)
    beating = background(*(mac.beat_every(TIMEOUT / 6) for mac in (alive, slow)))
    async with beating, connections(admin, namespace).running() as history:
        async with running_heartbeats(controller_client, namespace):
            await lost.beat()
            await gone.beat()
            for mac in (lost, gone, alive, slow):
                await becomes(mac, RECEIVED)
            await admin.delete(LEASES, gone.name, namespace)
            await becomes(never, NEVER)
            await becomes(lost, EXPIRED)
            await becomes(gone, NO_LEASE)
            await lost.beat()
            await becomes(lost, RECEIVED)
        before = {
            mac.name: await history.mark(f"{namespace}/{mac.name}", "True") for mac in (alive, slow)
        }
        async with running_heartbeats(controller_client, namespace):
            await becomes(lost, EXPIRED)
            assert await never.connected() == NEVER
            assert await gone.connected() == NO_LEASE
        for mac in (alive, slow):
            assert history.of(f"{namespace}/{mac.name}")[before[mac.name] :] == []


async def test_a_follower_has_seen_what_the_leader_saw(
    controller_client: KubeClient, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    slow = await make_mac(ahead=-HOUR)
    key = f"{namespace}/{slow.name}"
    async with (
        background(slow.beat_every(TIMEOUT / 8)),
        running_heartbeats(controller_client, namespace, leads=False) as follower,
    ):
        async with running_heartbeats(controller_client, namespace):
            await becomes(slow, RECEIVED)
        async with connections(admin, namespace).running() as history, leading(follower):
            await eventually(lambda: key in follower.runs, "the new leader has decided")
            await asyncio.sleep(TIMEOUT.total_seconds())
            assert history.of(key) == ["True"]


@pytest.mark.parametrize("how", ["cut", "half-open"])
async def test_a_blind_controller_disconnects_nobody(
    proxied: KubeClient,
    proxy: FaultProxy,
    namespace: str,
    admin: KubeClient,
    make_mac: MakeMac,
    how: str,
) -> None:
    mac = await make_mac()
    slow = await make_mac(ahead=-HOUR)
    async with (
        background(mac.beat_every(TIMEOUT / 6), slow.beat_every(TIMEOUT / 6)),
        running_heartbeats(proxied, namespace),
        connections(admin, namespace).running() as history,
    ):
        for each in (mac, slow):
            await becomes(each, RECEIVED)
        before = {
            key: await history.mark(key, "True")
            for key in (f"{namespace}/{each.name}" for each in (mac, slow))
        }
        if how == "cut":
            with proxy.playing(Drop(), WATCHES):
                proxy.cut(WATCHES)
                await asyncio.sleep(2 * TIMEOUT.total_seconds())
        else:
            with proxy.frozen(WATCHES):
                await asyncio.sleep(2 * TIMEOUT.total_seconds())
            proxy.cut(WATCHES)
        await asyncio.sleep(TIMEOUT.total_seconds())
        for key, count in before.items():
            assert history.of(key)[count:] == []


async def test_a_namespace_that_is_forbidden_holds_up_no_other(
    proxied: KubeClient, proxy: FaultProxy, namespace: str, admin: KubeClient, make_mac: MakeMac
) -> None:
    other = f"{namespace}-b"
    await admin.create(
        NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}}
    )
    here, there = await make_mac(), Mac(admin, other, "mac")
    await there.register()
    watch = rf"/namespaces/{other}/leases\?.*watch="
    forbidden = Answer(403, status_body(403, "Forbidden"))
    async with (
        running_heartbeats(proxied, namespace, other),
        connections(admin, other).running() as history,
    ):
        for mac in (here, there):
            await mac.beat()
            await becomes(mac, RECEIVED)
        before = await history.mark(f"{other}/mac", "True")
        with proxy.playing(forbidden, watch):
            proxy.cut(watch)
            await becomes(here, EXPIRED)
            await here.beat()
            await becomes(here, RECEIVED)
            await becomes(here, EXPIRED)
            assert history.of(f"{other}/mac")[before:] == [], "nobody looks there: not his silence"
        await becomes(there, EXPIRED)
    await admin.delete(NAMESPACES, other)


# Writes ------------------------------------------------------------------------------------------
STATUS_WRITES = r"^PATCH .*/metalnodes/.*/status"
OTHERS = r"^(GET (?!.*watch=)|POST |PUT |DELETE |PATCH (?!.*/metalnodes/.*/status))"


async def test_however_a_mac_beats_it_costs_one_status_write_an_interval_and_nothing_else(
    proxied: KubeClient, proxy: FaultProxy, namespace: str, make_mac: MakeMac
) -> None:
    slower = replace(HEARTBEATS, write_interval=2 * SECOND)
    async with running_heartbeats(proxied, namespace, settings=slower) as controller:
        mac = await make_mac()
        await mac.beat(duration=600)
        await becomes(mac, RECEIVED)
        await controller.settled()
        proxy.forget()
        started = asyncio.get_running_loop().time()
        for number in range(60):  # fast, 61 s apart by its own stamps, another version each time
            report = report_text(agentVersion=f"v{number}")
            await mac.beat(duration=600, ahead=number * timedelta(seconds=61), report=report)
            await asyncio.sleep(0.1)
        passed = asyncio.get_running_loop().time() - started
        assert 1 <= proxy.count(STATUS_WRITES) <= 1 + passed / 2
        assert proxy.count(OTHERS) == 0 or only_events(proxy)


def only_events(proxy: FaultProxy) -> bool:
    """The skew of its clock, which it shows here on purpose, is told once."""
    return proxy.count(OTHERS) == proxy.count(r"^POST .*/events") <= 1


async def test_in_steady_state_a_beat_costs_no_reconcile(
    controller_client: KubeClient, namespace: str, make_mac: MakeMac
) -> None:
    async with running_heartbeats(controller_client, namespace) as controller:
        mac = await make_mac()
        await beat_seen(controller, mac, duration=600)
        await becomes(mac, RECEIVED)
        await controller.settled()
        await beat_seen(controller, mac, duration=600)
        controller.runs.clear()
        for _ in range(20):
            await beat_seen(controller, mac, duration=600)
        assert len(controller.runs) <= 1  # the late echo of the first write at most


# Hostile reports ---------------------------------------------------------------------------------
def hostile_reports() -> dict[str, str]:
    deep = "[" * 5000 + "]" * 5000
    many = [{"address": f"10.0.{n // 250}.{n % 250}", "source": "lan"} for n in range(4_000)]
    return {
        "empty": "",
        "not JSON": "\x1b[31m{",
        "200 KiB": report_text(padding="x" * 200_000),
        "4,000 candidates": report_text(candidates=many),
        "deep nesting": report_text(candidates=...)[:-1] + f',"candidates":{deep}}}',
        "NaN": report_text(capacity={"memoryBytes": float("nan")}),
        "2^63": report_text(capacity={"memoryBytes": 2**63}),
        "a lone surrogate": report_text(agentVersion="\ud800"),
        "a duplicate key": report_text()[:-1] + ',"version":1}',
        "wrong base64": report_text(ingressSPKI="!!!"),
        "not a certificate": report_text(ingressCertificate="AAAA"),
    }


@pytest.mark.slow
async def test_hostile_reports_cost_nobody_his_connection(
    controller_client: KubeClient, namespace: str, make_mac: MakeMac
) -> None:
    reports = hostile_reports()
    async with running_heartbeats(controller_client, namespace) as controller:
        honest = await asyncio.gather(*(make_mac() for _ in range(200)))
        hostile = {kind: await make_mac() for kind in reports}
        await asyncio.gather(
            *(mac.beat(duration=600) for mac in honest),
            *(mac.beat(duration=600, report=reports[kind]) for kind, mac in hostile.items()),
        )
        for mac in (*honest, *hostile.values()):
            await becomes(mac, RECEIVED)
        for kind, mac in hostile.items():
            status = await mac.status()
            assert "capacity" not in status, kind
            assert "agentVersion" not in status, kind
        node = controller.informers[1].store.get(f"{namespace}/{hostile['200 KiB'].name}")
        assert 16 * 1024 < len(node.report) < 17 * 1024, "only that it is too long is kept"
