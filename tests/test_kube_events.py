"""The Event recorder against the real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import NotLeader
from llmkube.kube.events import EventRecorder, ObjectRef
from llmkube.kube.resources import CONFIGMAPS, EVENTS, NAMESPACES
from tests.support.accounts import create_account, grant
from tests.support.background import background
from tests.support.clock import FakeClock
from tests.support.faultproxy import WRITES, Answer, FaultProxy, LoseAnswer, status_body
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster

PACE = timedelta(seconds=61)


def recorder(client: KubeClient, clock: FakeClock | SystemClock | None = None) -> EventRecorder:
    return EventRecorder(client, clock or SystemClock(), "llmkube-tests", "one")


@pytest.fixture
def about(namespace: str) -> ObjectRef:
    return ObjectRef(CONFIGMAPS, namespace, "kube-root-ca.crt", "some-uid", "1")


@pytest.fixture
async def proxy(control_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(control_plane) as running:
        yield running


async def told(admin: KubeClient, about: ObjectRef) -> list[dict]:
    selector = f"regarding.uid={about.uid}"
    return await admin.list(EVENTS, about.event_namespace, field_selector=selector)


async def test_an_event_is_written_beside_other_work(admin: KubeClient, about: ObjectRef) -> None:
    events = recorder(admin)
    async with background(events.run()):
        events.event(about, "Warning", "ClockSkew", "Observe", "set the clock right")
        (event,) = await eventually(lambda: told(admin, about), "the Event is there")
    assert (event["type"], event["reason"], event["note"]) == (
        "Warning",
        "ClockSkew",
        "set the clock right",
    )
    assert event["regarding"]["name"] == about.name
    assert event["reportingController"] == "llmkube-tests"


async def test_repetitions_become_a_series(admin: KubeClient, about: ObjectRef) -> None:
    clock = FakeClock()
    events = recorder(admin, clock)
    for _ in range(3):
        events.event(about, "Normal", "Connected", "Observe", "it is back")
        await events.flush()
    clock.advance(PACE)
    await events.flush()
    (event,) = await told(admin, about)
    assert event["series"]["count"] == 3
    assert event["series"]["lastObservedTime"] == "2026-01-01T00:00:00.000000Z"


async def test_a_series_whose_event_has_expired_begins_anew(
    admin: KubeClient, about: ObjectRef
) -> None:
    clock = FakeClock()
    events = recorder(admin, clock)
    events.event(about, "Normal", "Connected", "Observe", "it is back")
    await events.flush()
    (event,) = await told(admin, about)
    await admin.delete(EVENTS, event["metadata"]["name"], about.namespace)
    events.event(about, "Normal", "Connected", "Observe", "it is back")
    clock.advance(PACE)
    await events.flush()
    (event,) = await told(admin, about)
    assert event["series"]["count"] == 2


async def test_a_cluster_scoped_object_is_taken(admin: KubeClient, namespace: str) -> None:
    about = ObjectRef(NAMESPACES, "", namespace, f"uid-of-{namespace}", "1")
    events = recorder(admin)
    events.event(about, "Normal", "Seen", "Observe", "ü" * 2000)
    await events.flush()
    (event,) = await told(admin, about)
    assert event["metadata"]["namespace"] == "default"
    assert event["note"].endswith("…")


async def test_create_and_patch_are_all_the_rights_it_needs(
    admin: KubeClient, client_for, namespace: str, about: ObjectRef
) -> None:
    await create_account(admin, namespace, "teller")
    rules = [
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}
    ]
    await grant(admin, namespace, "teller", rules)
    clock = FakeClock()
    events = recorder(await client_for(namespace, "teller"), clock)
    for _ in range(2):
        events.event(about, "Normal", "Connected", "Observe", "it is back")
        await events.flush()
        clock.advance(PACE)
    await events.flush()
    (event,) = await told(admin, about)
    assert event["series"]["count"] == 2
    assert events.dropped == 0


async def test_an_event_that_is_refused_is_dropped_and_the_next_one_told(
    admin: KubeClient, namespace: str, about: ObjectRef
) -> None:
    gone = ObjectRef(CONFIGMAPS, "no-such-namespace", "x", "another-uid", "1")
    events = recorder(admin)
    events.event(gone, "Normal", "Seen", "Observe", "x")
    events.event(about, "Normal", "Seen", "Observe", "x")
    await events.flush()
    assert events.dropped == 1
    assert await told(admin, about)


async def test_who_may_not_write_drops_and_is_silent(admin: KubeClient, about: ObjectRef) -> None:
    def closed() -> None:
        raise NotLeader("not the leader")

    events = recorder(admin)
    admin.write_gate = closed
    events.event(about, "Normal", "Seen", "Observe", "x")
    with capture_logs() as records:
        await events.flush()
    assert events.dropped == 1
    assert records == []


async def test_a_last_flush_beside_the_loop_tells_nothing_twice(
    proxy: FaultProxy, admin: KubeClient, about: ObjectRef
) -> None:
    async with KubeClient(await load_access(proxy.admin_kubeconfig), clock=SystemClock()) as client:
        events = recorder(client)
        with proxy.frozen(WRITES):
            async with background(events.run()):
                events.event(about, "Normal", "Seen", "Observe", "x")
                await eventually(lambda: proxy.count(WRITES), "the loop is writing it")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(events.flush(), 0.3)
            assert proxy.count(WRITES) == 1


async def test_a_busy_server_is_left_alone_for_a_while(
    proxy: FaultProxy, admin: KubeClient, about: ObjectRef
) -> None:
    clock = FakeClock()
    async with KubeClient(await load_access(proxy.admin_kubeconfig), clock=clock) as client:
        events = recorder(client, clock)
        for number in range(5):
            events.event(about, "Normal", "Seen", "Observe", f"note {number}")
        busy = Answer(429, status_body(429, "TooManyRequests"), {"Retry-After": "20"})
        with proxy.playing(busy, WRITES):
            await events.flush()
            await events.flush()
            assert proxy.count(WRITES) == 1, "the rest waits with it"
        clock.advance(timedelta(seconds=19))
        await events.flush()
        assert proxy.count(WRITES) == 1
        clock.advance(timedelta(seconds=2))
        await events.flush()
    assert len(await told(admin, about)) == 5
    assert events.dropped == 0


async def test_an_answer_that_was_lost_makes_no_second_event(
    proxy: FaultProxy, admin: KubeClient, about: ObjectRef
) -> None:
    clock = FakeClock()
    async with KubeClient(await load_access(proxy.admin_kubeconfig), clock=clock) as client:
        events = recorder(client, clock)
        events.event(about, "Normal", "Seen", "Observe", "once")
        with proxy.playing(LoseAnswer(), WRITES):
            await events.flush()
        clock.advance(timedelta(seconds=10))
        await events.flush()
    assert len(await told(admin, about)) == 1


async def test_what_cannot_be_told_for_long_is_given_up(
    proxy: FaultProxy, about: ObjectRef
) -> None:
    clock = FakeClock()
    async with KubeClient(await load_access(proxy.admin_kubeconfig), clock=clock) as client:
        events = recorder(client, clock)
        events.event(about, "Normal", "Seen", "Observe", "x")
        with proxy.playing(Answer(503), WRITES):
            await events.flush()
            clock.advance(timedelta(minutes=11))
            await events.flush()
    assert events.dropped == 1
