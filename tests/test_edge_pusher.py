"""The push loop in this process, on the real API server: live intervals, refusals, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.cli.credentials import TokenOptions, write
from llmkube.cli.fleet_registration import FleetOptions, register_site, unregister_site
from llmkube.clock import SystemClock
from llmkube.edge.edge import silent, stuck
from llmkube.edge.local import LocalCluster
from llmkube.edge.metrics import EdgeMetrics
from llmkube.edge.pusher import Pusher, PushState
from llmkube.edge.settings import EdgeSettings
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.resources import FEDERATEDCLUSTERS
from llmkube.metrics import Metrics
from tests.support.faultproxy import Answer, FaultProxy, LoseAnswer
from tests.support.wait import eventually

SETTINGS = EdgeSettings(look_again=timedelta(milliseconds=300))
Unique = Callable[[str], str]
WRITES = r"PATCH .*/status"


@pytest.fixture
async def hub(
    admin: KubeClient, control_plane: ControlPlane, unique: Unique, tmp_path: Path
) -> AsyncIterator[tuple[KubeClient, str, FaultProxy]]:
    """The edge's client through a fault proxy, the site's name, and the proxy."""
    name = unique("push")
    async with FaultProxy.start(control_plane) as proxy:
        token = TokenOptions(server=proxy.server, certificate_authority=proxy.ca_pem.decode())
        write(await register_site(admin, FleetOptions(name, token=token)), tmp_path / "kubeconfig")
        access = await load_access(tmp_path / "kubeconfig")
        async with KubeClient(access, clock=SystemClock()) as client:
            yield client, name, proxy
    await unregister_site(admin, name, None)


@asynccontextmanager
async def pushing(
    client: KubeClient, name: str, local: KubeClient, settings: EdgeSettings = SETTINGS
) -> AsyncIterator[Pusher]:
    pusher = make_pusher(client, name, local, settings)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(pusher.run())
        yield pusher
        task.cancel()


def make_pusher(
    client: KubeClient, name: str, local: KubeClient, settings: EdgeSettings = SETTINGS
) -> Pusher:
    metrics = EdgeMetrics(Metrics())
    return Pusher(client, LocalCluster(local), name, SystemClock(), settings, metrics)


async def set_interval(admin: KubeClient, name: str, seconds: int) -> None:
    body = {"spec": {"heartbeatIntervalSeconds": seconds}}
    await admin.merge_patch(FEDERATEDCLUSTERS, name, None, body)


async def stamp(admin: KubeClient, name: str) -> str:
    status = (await admin.get(FEDERATEDCLUSTERS, name)).get("status") or {}
    return str(status.get("lastHeartbeatTime", ""))


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
async def test_an_interval_that_becomes_shorter_counts_before_the_next_push_was_due(
    admin: KubeClient, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, _ = hub
    await set_interval(admin, name, 3600)
    async with pushing(client, name, admin) as pusher:
        await eventually(lambda: pusher.state.last_success is not None, "the first push")
        first = await stamp(admin, name)
        assert pusher.state.interval == timedelta(hours=1)
        await set_interval(admin, name, 5)
        await eventually(lambda: pusher.state.interval == timedelta(seconds=5), "it is noticed")

        async def moved() -> bool:
            return await stamp(admin, name) != first

        await eventually(moved, "the next push")
        await set_interval(admin, name, 3600)
        await eventually(lambda: pusher.state.interval == timedelta(hours=1), "by a push's answer")


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(Answer(429, headers={"Retry-After": "7"}), "tried again", id="overloaded"),
        pytest.param(Answer(503, b"down"), "tried again", id="down"),
        pytest.param(Answer(200, b"<html>"), "tried again", id="not an API server"),
        pytest.param(Answer(403), "fleet register", id="no rights"),
        pytest.param(Answer(404), "fleet register", id="no such site"),
        pytest.param(Answer(422), "update llmkube", id="a field the server does not take"),
    ],
)
async def test_a_push_that_fails_says_what_to_do_and_the_next_one_arrives(
    fault: Answer, words: str, admin: KubeClient, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, proxy = hub
    pusher = make_pusher(client, name, admin)
    with proxy.playing(fault, WRITES):
        pause = await pusher.attempt()
        assert words in pusher.state.trouble
        assert timedelta(seconds=1) <= pause <= SETTINGS.retry_cap
        assert pusher.state.last_success is None
    if fault.status == 429:
        assert pause == timedelta(seconds=7)
    assert await pusher.attempt() == SETTINGS.default_interval
    assert pusher.state.trouble == ""
    assert await stamp(admin, name)


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
async def test_a_busy_datacenter_is_left_alone_for_as_long_as_it_asks(
    admin: KubeClient, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, proxy = hub
    with proxy.playing(Answer(429, headers={"Retry-After": "2"}), WRITES):
        async with pushing(client, name, admin):
            await eventually(lambda: proxy.count(WRITES) >= 3, "it has tried three times")
    times = [request.at for request in proxy.requests if request.method == "PATCH"]
    assert all(later - earlier >= 2 for earlier, later in pairwise(times))


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
async def test_a_push_whose_answer_is_lost_is_simply_pushed_again(
    admin: KubeClient, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, proxy = hub
    pusher = make_pusher(client, name, admin)
    with proxy.playing(LoseAnswer(), WRITES):
        await pusher.attempt()
    arrived = await stamp(admin, name)
    assert arrived
    await pusher.attempt()
    assert await stamp(admin, name) > arrived


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
async def test_an_object_nested_without_end_costs_its_source_only(
    admin: KubeClient, control_plane: ControlPlane, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, _ = hub
    deep = b'{"metadata":{},"items":[{"status":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}"
    async with FaultProxy.start(control_plane) as hostile:
        access = await load_access(hostile.admin_kubeconfig)
        async with KubeClient(access, clock=SystemClock()) as local:
            pusher = make_pusher(client, name, local)
            with hostile.playing(Answer(200, deep), "GET .*/nodes"):
                assert await pusher.attempt() == SETTINGS.default_interval
    status = (await admin.get(FEDERATEDCLUSTERS, name))["status"]
    assert status["lastHeartbeatTime"]
    assert "capacity" not in status


@pytest.mark.cluster
@pytest.mark.usefixtures("shipped")
async def test_a_slow_local_cluster_does_not_hold_up_the_heartbeat(
    admin: KubeClient, control_plane: ControlPlane, hub: tuple[KubeClient, str, FaultProxy]
) -> None:
    client, name, _ = hub
    async with FaultProxy.start(control_plane) as slow:
        access = await load_access(slow.admin_kubeconfig)
        async with KubeClient(access, clock=SystemClock()) as local:
            settings = replace(SETTINGS, collect_timeout=timedelta(milliseconds=500))
            pusher = make_pusher(client, name, local, settings)
            with slow.frozen():
                assert await pusher.attempt() == SETTINGS.default_interval
            assert await stamp(admin, name)


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        pytest.param(PushState(timedelta(seconds=30), HOUR), True, False, id="just started"),
        pytest.param(
            PushState(timedelta(seconds=30), HOUR, HOUR - timedelta(seconds=90)),
            True,
            True,
            id="three intervals of silence are Connected",
        ),
        pytest.param(
            PushState(timedelta(seconds=30), HOUR, HOUR - timedelta(seconds=91), "why"),
            True,
            False,
            id="an outage is no reason to restart",
        ),
        pytest.param(
            PushState(timedelta(seconds=30), HOUR - timedelta(minutes=3, seconds=1), HOUR),
            False,
            True,
            id="a loop that tries nothing is stuck",
        ),
        pytest.param(
            PushState(timedelta(days=1), HOUR - timedelta(minutes=14), HOUR),
            True,
            True,
            id="a long interval is looked at every five minutes",
        ),
    ],
)
def test_health(state: PushState, live: bool, ready: bool) -> None:
    settings: Any = EdgeSettings()
    assert (stuck(state, HOUR, settings) is None, silent(state, HOUR) is None) == (live, ready)
