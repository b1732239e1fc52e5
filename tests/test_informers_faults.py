"""The real API server behind the fault proxy: each fault ends with the cache equal to the server,
after a bounded number of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane, Options
from llmkube.api.cached import TOO_LONG, CachedLease, CachedMeta
from llmkube.api.names import REPORT_ANNOTATION
from llmkube.clock import SystemClock
from llmkube.informers.informer import Informer
from llmkube.informers.options import ReflectorSettings
from llmkube.informers.store import Change
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.resources import CONFIGMAPS, LEASES, NAMESPACES, SERVICEACCOUNTS
from llmkube.metrics import Metrics
from tests.support.background import background
from tests.support.faultproxy import (
    EXPIRED,
    EXPIRED_LINE,
    LISTS,
    WATCHES,
    Answer,
    Drop,
    EmptyStream,
    FaultProxy,
    Preface,
    Slow,
    Swallow,
    event_line,
    status_body,
)
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster

# Every duration a tenth or less of the real one; the relations stay.
FAST = ReflectorSettings(
    page_size=3,
    inactivity_timeout=timedelta(seconds=2),
    short_watch=timedelta(milliseconds=100),
    backoff_base=timedelta(milliseconds=80),
    backoff_cap=timedelta(milliseconds=500),
    backoff_reset=timedelta(seconds=10),
)
SECOND = timedelta(seconds=1)


class World:
    """A namespace, a client that goes straight to the server, and an informer behind the proxy."""

    def __init__(self, admin: KubeClient, proxy: FaultProxy, namespace: str) -> None:
        self.admin, self.proxy, self.namespace = admin, proxy, namespace
        self.metrics = Metrics()
        self.changes: list[Change[CachedLease]] = []
        self.client: KubeClient | None = None

    def informer(self, settings: ReflectorSettings = FAST, **options: Any) -> Informer[CachedLease]:
        assert self.client is not None
        made = Informer(
            self.client,
            LEASES,
            decode=CachedLease,
            namespaces=[self.namespace],
            clock=SystemClock(),
            settings=settings,
            metrics=self.metrics.reflector("leases"),
            **options,
        )
        made.add_handler(self.changes.append)
        return made

    async def write(self, name: str, beat: int = 1, **annotations: str) -> None:
        meta = {"name": name, "namespace": self.namespace, "annotations": annotations}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta}
        spec = {"spec": {"leaseDurationSeconds": beat}}
        await self.admin.apply(LEASES, body | spec, field_manager="test")

    async def delete(self, name: str) -> None:
        await self.admin.delete(LEASES, name, self.namespace)

    async def equal(self, informer: Informer[CachedLease], within: timedelta = 20 * SECOND) -> None:
        """The cache shows exactly what the server has, and the watch is up."""

        async def same() -> bool:
            there = await self.admin.list(LEASES, self.namespace)
            expected = {
                f"{self.namespace}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
                for one in there
            }
            found = {one.key: one.metadata.resource_version for one in informer.store}
            assert found == expected
            return informer.view.up

        await eventually(same, "the cache equals the server", within=within)

    def restarts(self, reason: str) -> float:
        labels = {"reflector": "leases", "reason": reason}
        name = "llmkube_reflector_restarts_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def world(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> AsyncIterator[World]:
    async with FaultProxy.start(control_plane) as proxy:
        made = World(admin, proxy, namespace)
        access = await load_access(proxy.admin_kubeconfig)
        async with KubeClient(access, clock=SystemClock(), request_timeout=5 * SECOND) as client:
            made.client = client
            yield made


async def test_a_paged_list_and_live_events(world: World) -> None:
    for n in range(8):
        await world.write(f"l{n}")
    informer = world.informer()
    async with background(informer.run()):
        await informer.wait_synced()
        assert len(informer.store) == 8
        assert world.proxy.count(LISTS) == 3, "pages of 3"
        assert all(change.first_sight for change in world.changes)
        await world.equal(informer)
        await world.write("l0", beat=2)
        await world.write("new")
        await world.delete("l7")
        await world.equal(informer)
    live = [change for change in world.changes if not change.first_sight]
    shown = [(c.key.split("/")[1], c.old is None, c.new is None) for c in live]
    assert shown == [("l0", False, False), ("new", True, False), ("l7", False, True)]


async def test_a_cut_connection(world: World) -> None:
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        for n in range(5):
            assert world.proxy.cut(WATCHES) == 1
            await world.write(f"l{n}")
            await world.equal(informer)
        assert world.proxy.count(LISTS) == 1, "it goes on from the last version"
        assert world.proxy.count(WATCHES) <= 12
        assert world.restarts("broken") == 5
    assert len(world.changes) == 5, "nothing twice"


async def test_a_half_open_connection_is_noticed_by_silence(world: World) -> None:
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        with world.proxy.frozen():
            await world.write("unseen")
            await eventually(lambda: world.restarts("silence") >= 1, "silence is noticed")
            assert not informer.view.up
            assert informer.store.get(f"{world.namespace}/unseen") is None
        await world.equal(informer)
        assert informer.view.last_outage >= FAST.inactivity_timeout
        assert world.proxy.count(LISTS) == 1, "silence reconnects, it does not list"
        assert world.proxy.count() <= 8


async def test_a_version_that_the_server_has_not_reached(world: World) -> None:
    """As after a restore of etcd: the watch is accepted, and silent for ever."""
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        for reflector in informer._reflectors.values():
            reflector.resource_version = "999999999"
        world.proxy.cut(WATCHES)
        await world.write("a")
        await eventually(lambda: world.restarts("stuck") == 1, "three silent streams")
        await world.equal(informer)
        assert world.restarts("silence") == 2
        assert world.restarts("expired") == 1
        assert world.proxy.count() <= 9


async def test_a_server_that_accepts_and_never_answers(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    async with background(informer.run()):
        with world.proxy.playing(Swallow()):
            await eventually(lambda: "no answer" in (informer.sync_error or ""), "it times out")
            assert world.proxy.count() <= 3
        await world.equal(informer)


async def test_slow_bytes(world: World) -> None:
    informer = world.informer()
    with world.proxy.playing(Slow(64, timedelta(milliseconds=5))):
        async with background(informer.run()):
            await world.equal(informer)
            for n in range(3):
                await world.write(f"l{n}", note="x" * 2000)
            await world.equal(informer, within=40 * SECOND)
            assert world.proxy.count(LISTS) == 1
            assert world.proxy.count(WATCHES) == 1, "slow is not silent"


@pytest.mark.parametrize("which", [LISTS, WATCHES], ids=["lists", "watches"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Answer(500, b"oops, a text"), "unavailable"),
        (Answer(502, b"<html>bad gateway</html>"), "unavailable"),
        (Answer(503, b""), "unavailable"),
        (Answer(401, status_body(401, "Unauthorized")), "unauthorized"),
        (Answer(403, status_body(403, "Forbidden")), "forbidden"),
        (Answer(404, status_body(404, "NotFound")), "missing"),
        (Answer(404, b"404 page not found"), "missing"),
        (Drop(), "broken"),
    ],
    ids=lambda value: str(getattr(value, "status", value)),
)
async def test_refusals_are_survived(
    world: World, fault: Answer | Drop, reason: str, which: str
) -> None:
    await world.write("before")
    informer = world.informer()
    with ExitStack() as disturbance:
        disturbance.enter_context(world.proxy.playing(fault, which))
        async with background(informer.run()):
            await eventually(lambda: world.restarts(reason) >= 4, f"it meets {reason}")
            # Each attempt is one request, and at most two where the client may repeat.
            assert world.proxy.count(which) <= 2 * world.restarts(reason) + 2
            assert not informer.view.up
            assert informer.view.task_alive
            disturbance.close()
            await world.write("after")
            await world.equal(informer)


@pytest.mark.parametrize("which", [LISTS, WATCHES], ids=["lists", "watches"])
async def test_429_waits_as_long_as_it_is_told(world: World, which: str) -> None:
    informer = world.informer()
    throttled = Answer(429, b"storage is (re)initializing", {"Retry-After": "2"})
    with ExitStack() as disturbance:
        disturbance.enter_context(world.proxy.playing(throttled, which))
        async with background(informer.run()):
            await eventually(lambda: len(_refused(world)) >= 2, "it tries again")
            first, second = _refused(world)[:2]
            assert second - first >= 2
            assert world.restarts("throttled") >= 1
            disturbance.close()
            await world.equal(informer)


def _refused(world: World) -> list[float]:
    """When requests came that were answered with 429."""
    return [request.at for request in world.proxy.requests if request.status == 429]


async def test_410_as_a_status_and_in_the_stream(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        assert world.proxy.inject(EXPIRED_LINE) == 1
        await world.delete("a")
        await world.write("b")
        await world.equal(informer)
        with world.proxy.playing(EXPIRED, WATCHES):
            world.proxy.cut(WATCHES)
            await eventually(lambda: world.restarts("expired") >= 2, "410 as a status")
        await world.delete("b")
        await world.equal(informer)
        assert world.proxy.count() <= 20
    gone = [c for c in world.changes if c.new is None]
    assert [c.key.split("/")[1] for c in gone] == ["a", "b"], "deletes are synthesised"


async def test_410_for_the_list_makes_it_ask_for_the_newest(world: World) -> None:
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        with world.proxy.playing(EXPIRED, LISTS + ".*resourceVersion="):
            world.proxy.inject(EXPIRED_LINE)
            await eventually(lambda: world.restarts("expired") >= 2, "the list expires, too")
        await world.write("a")
        await world.equal(informer)
    assert (
        "resourceVersion="
        not in [r for r in world.proxy.requests if "watch" not in r.target][-1].target
    )


async def test_410_between_two_pages_lists_all_at_once(world: World) -> None:
    for n in range(7):
        await world.write(f"l{n}")
    informer = world.informer()
    with world.proxy.playing(EXPIRED, LISTS + ".*continue="):
        async with background(informer.run()):
            await world.equal(informer)
    last = [r.target for r in world.proxy.requests if "watch" not in r.target][-1]
    assert "limit=" not in last
    assert world.proxy.count(LISTS) == 3


async def test_a_stream_that_always_ends_at_once_is_no_hot_loop(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    with ExitStack() as disturbance:
        disturbance.enter_context(world.proxy.playing(EmptyStream(), WATCHES))
        async with background(informer.run()):
            await informer.wait_synced()
            world.proxy.forget()
            await eventually(lambda: world.restarts("short") >= 6, "six short watches")
            # A list (of one page) and a watch each; the proxy also counts what is under way.
            assert world.proxy.count() <= 2 * world.restarts("short") + 3
            assert not informer.view.up
            disturbance.close()
            await world.write("b")
            await world.equal(informer)


@pytest.mark.parametrize(
    "line",
    [
        b"<html>bad gateway</html>\n",
        b'{"type":"SURPRISE","object":{}}\n',
        b'{"type":"ADDED","object":{"metadata":{"na\n',
        event_line("ERROR", json.loads(status_body(500, "InternalError"))),
        b"\xff\xfe\x00\n",
        event_line("BOOKMARK", {"metadata": {"resourceVersion": ""}}),
        event_line("ADDED", {"metadata": {"name": "x", "namespace": "y", "uid": "u"}, "spec": {}}),
    ],
    ids=["html", "unknown type", "half a line", "ERROR", "binary", "no version", "none either"],
)
async def test_a_garbled_stream_is_listed_anew(world: World, line: bytes) -> None:
    await world.write("a")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        world.proxy.inject(line)
        await world.delete("a")
        await world.write("b")
        await world.equal(informer)
        assert world.restarts("bad_event") == 1
        assert world.proxy.count(LISTS) == 2
        assert world.proxy.count(WATCHES) <= 3


async def test_empty_lines_are_no_events(world: World) -> None:
    informer = world.informer()
    with world.proxy.playing(Preface(b"\n\n"), WATCHES):
        async with background(informer.run()):
            await world.write("a")
            await world.equal(informer)
            assert world.proxy.count(WATCHES) == 1


async def test_a_line_beyond_the_cap_is_refused_and_survived(world: World) -> None:
    informer = world.informer(replace(FAST, line_cap=100_000))
    async with background(informer.run()):
        await world.equal(informer)
        world.proxy.inject(b"x" * 200_000)
        await eventually(lambda: world.restarts("bad_event") == 1, "it stops reading")
        await world.write("a")
        await world.equal(informer)


async def test_a_malformed_object_costs_only_itself(world: World) -> None:
    await world.write("good")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        old = informer.store.get(f"{world.namespace}/good")
        assert old is not None
        meta = {
            "name": "good",
            "namespace": world.namespace,
            "uid": old.metadata.uid,
            "resourceVersion": old.metadata.resource_version,
        }
        bad = {"metadata": meta, "spec": {"leaseDurationSeconds": "soon"}}
        for _ in range(3):
            world.proxy.inject(event_line("MODIFIED", bad))
        await world.write("other")
        await eventually(lambda: f"{world.namespace}/other" in informer.store, "the rest goes on")
        assert f"{world.namespace}/good" not in informer.store
        assert "leaseDurationSeconds" in informer.bad[f"{world.namespace}/good"].why
        counted = world.metrics.registry.get_sample_value(
            "llmkube_reflector_bad_objects_total", {"reflector": "leases"}
        )
        assert counted == 1, "once per version"
        assert world.changes[-2].new is None, "its old value was taken back"
        await world.write("good", beat=7)
        await world.equal(informer)
        assert informer.bad == {}


async def test_duplicates_after_a_reconnect_are_not_passed_on(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        obj = await world.admin.get(LEASES, "a", world.namespace)
        for _ in range(3):
            world.proxy.inject(event_line("ADDED", obj) + event_line("MODIFIED", obj))
        world.proxy.cut(WATCHES)
        await world.write("b")
        await world.equal(informer)
    assert [change.key.split("/")[1] for change in world.changes] == ["a", "b"]


async def test_a_3_mb_object_in_small_pieces(world: World) -> None:
    """etcd takes 1.5 MiB: a real object of 1.2 MB, and a line of 3 MB made up by the proxy."""
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        await world.write("a")
        await world.equal(informer)
        meta = (await world.admin.get(LEASES, "a", world.namespace))["metadata"]
        meta |= {"resourceVersion": meta["resourceVersion"], "name": "huge", "uid": "made-up"}
        meta["annotations"] = {REPORT_ANNOTATION: 'x"' * 1_000_000}
        line = event_line("ADDED", {"metadata": meta, "spec": {}})
        assert len(line) > 3_000_000
        for start in range(0, len(line), 8192):
            world.proxy.inject(line[start : start + 8192])
        huge = await eventually(
            lambda: informer.store.get(f"{world.namespace}/huge"), "the line arrives"
        )
        assert huge.report is TOO_LONG
        assert world.proxy.count() == 2, "no restart"


async def test_a_real_object_as_large_as_etcd_takes(world: World) -> None:
    assert world.client is not None
    informer = Informer(
        world.client,
        CONFIGMAPS,
        decode=CachedMeta,
        namespaces=[world.namespace],
        clock=SystemClock(),
        settings=FAST,
    )
    async with background(informer.run()):
        await eventually(lambda: informer.view.up, "up")
        meta = {"name": "large", "namespace": world.namespace}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
        await world.admin.create(CONFIGMAPS, body | {"data": {"a": "x" * 1_000_000}})
        await eventually(lambda: f"{world.namespace}/large" in informer.store, "it arrives")


async def test_metadata_only_informers_keep_up_and_down(world: World) -> None:
    assert world.client is not None
    informer = Informer(
        world.client,
        SERVICEACCOUNTS,
        decode=CachedMeta,
        namespaces=[world.namespace],
        metadata_only=True,
        clock=SystemClock(),
        settings=FAST,
    )
    async with background(informer.run()):
        await informer.wait_synced()
        assert informer.store.keys() == [f"{world.namespace}/default"]
        meta = {"name": "mac", "namespace": world.namespace}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}
        await world.admin.create(SERVICEACCOUNTS, account)
        await eventually(lambda: f"{world.namespace}/mac" in informer.store, "it appears")
        world.proxy.cut(WATCHES)
        await world.admin.delete(SERVICEACCOUNTS, "mac", world.namespace)
        await eventually(lambda: f"{world.namespace}/mac" not in informer.store, "it is gone")


async def test_several_namespaces_feed_one_store(
    world: World, unique: Callable[[str], str]
) -> None:
    assert world.client is not None
    other = unique("ns")
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}}
    await world.admin.create(NAMESPACES, body)
    first = World(world.admin, world.proxy, world.namespace)
    second = World(world.admin, world.proxy, other)
    await first.write("a")
    await second.write("b")
    informer = Informer(
        world.client,
        LEASES,
        decode=CachedLease,
        namespaces=[world.namespace, other],
        clock=SystemClock(),
        settings=FAST,
        indexes={"namespace": lambda obj: [obj.metadata.namespace]},
    )
    async with background(informer.run()):
        await informer.wait_synced()
        assert sorted(informer.store.keys()) == sorted([f"{world.namespace}/a", f"{other}/b"])
        await eventually(lambda: informer.view.up, "both are up")
        # One of them expires and lists anew: that must not delete what the other one holds.
        with world.proxy.playing(EXPIRED, f"{other}.*watch="):
            world.proxy.cut(f"{other}.*watch=")
            await eventually(lambda: not informer.view.up, "one down is not up")
            await second.delete("b")
            await second.write("c")
            await eventually(lambda: f"{other}/c" in informer.store, "it was listed")
        await eventually(lambda: informer.view.up, "both are up again")
        assert sorted(informer.store.keys()) == sorted([f"{world.namespace}/a", f"{other}/c"])
        assert [o.key for o in informer.store.by_index("namespace", other)] == [f"{other}/c"]
    await world.admin.delete(NAMESPACES, other)


async def test_selectors_and_objects_that_leave_them(world: World) -> None:
    await world.write("a")
    await world.write("b")
    informer = world.informer(field_selector="metadata.name!=b")
    labelled = world.informer(label_selector="team=blue")
    async with background(informer.run(), labelled.run()):
        await informer.wait_synced()
        await labelled.wait_synced()
        assert informer.store.keys() == [f"{world.namespace}/a"]
        assert labelled.store.keys() == []
        patch: dict[str, Any] = {"metadata": {"labels": {"team": "blue"}}}
        await world.admin.merge_patch(LEASES, "b", world.namespace, patch)
        await eventually(lambda: len(labelled.store) == 1, "it enters the selection")
        patch["metadata"]["labels"]["team"] = None
        await world.admin.merge_patch(LEASES, "b", world.namespace, patch)
        await eventually(lambda: len(labelled.store) == 0, "it leaves the selection")


async def test_a_broken_handler_costs_the_others_nothing(world: World) -> None:
    def broken(_change: Change[CachedLease]) -> None:
        raise ZeroDivisionError

    informer = world.informer()
    informer._handlers.insert(0, broken)
    async with background(informer.run()):
        await world.write("a")
        await world.write("b")
        await world.equal(informer)
    assert len(world.changes) == 2


async def test_a_handler_that_comes_late_is_told_what_is_there(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    late: list[Change[CachedLease]] = []
    async with background(informer.run()):
        await informer.wait_synced()
        informer.add_handler(late.append)
        assert [(c.key, c.old, c.first_sight) for c in late] == [
            (f"{world.namespace}/a", None, True)
        ]
        await world.write("b")
        await eventually(lambda: len(late) == 2, "and what comes")


async def test_the_guard_waits_for_the_echo(world: World) -> None:
    await world.write("a")
    informer = world.informer()
    guard = informer.guard(bound=timedelta(seconds=1))
    key = f"{world.namespace}/a"
    async with background(informer.run()):
        await world.equal(informer)
        for beat in range(2, 12):
            await world.write("a", beat=beat)
            live = (await world.admin.get(LEASES, "a", world.namespace))["metadata"]
            guard.wrote(key, live["uid"], live["resourceVersion"])
            assert await guard.wait_fresh(key) == "fresh"
            cached = informer.store.get(key)
            assert cached is not None
            assert cached.spec.lease_duration_seconds == beat
        with world.proxy.frozen(WATCHES):
            await world.write("a", beat=99)
            live = (await world.admin.get(LEASES, "a", world.namespace))["metadata"]
            guard.wrote(key, live["uid"], live["resourceVersion"])
            assert await guard.wait_fresh(key) == "read live"
        await world.equal(informer)
        assert await guard.wait_fresh(key) == "fresh"
        assert len(guard) == 0


# What needs a control plane of its own ----------------------------------------------------------
@pytest.fixture
async def own_plane() -> AsyncIterator[ControlPlane]:
    async with ControlPlane.start(Options()) as cluster:
        yield cluster


@pytest.fixture
async def own_world(own_plane: ControlPlane) -> AsyncIterator[World]:
    clock = SystemClock()
    async with (
        FaultProxy.start(own_plane) as proxy,
        KubeClient(await load_access(own_plane.admin_kubeconfig), clock=clock) as admin,
        KubeClient(await load_access(proxy.admin_kubeconfig), clock=clock) as client,
    ):
        world = World(admin, proxy, "default")
        world.client = client
        yield world


@pytest.mark.slow
async def test_the_api_server_restarts_and_etcd_is_compacted(
    own_plane: ControlPlane, own_world: World
) -> None:
    world = own_world
    for n in range(7):
        await world.write(f"l{n}")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        world.proxy.forget()
        await own_plane.stop_apiserver()
        await eventually(lambda: not informer.view.up, "it is noticed")
        await asyncio.sleep(1)
        await own_plane.start_apiserver()
        await world.write("l0", beat=2)
        await world.delete("l1")
        await world.equal(informer, within=60 * SECOND)
        assert world.proxy.count() <= 60, "a bounded number of requests"

        # While our connection is down the history is compacted, and the server restarted so that
        # its watch cache does not remember either: the old version must expire.
        with world.proxy.playing(Drop()):
            world.proxy.cut_connections()
            await world.write("l2", beat=3)
            await world.delete("l3")
            await own_plane.etcd_compact()
            await own_plane.stop_apiserver()
            await own_plane.start_apiserver()
            await own_plane.etcd_compact()
        await world.equal(informer, within=60 * SECOND)
        assert world.proxy.count(LISTS) >= 1
        assert world.changes[-1].first_sight


@pytest.mark.slow
async def test_a_frozen_api_server(own_plane: ControlPlane, own_world: World) -> None:
    world = own_world
    await world.write("a")
    informer = world.informer()
    async with background(informer.run()):
        await world.equal(informer)
        own_plane.pause_apiserver()
        try:
            await eventually(lambda: world.restarts("silence") >= 1, "silence is noticed")
        finally:
            own_plane.resume_apiserver()
        await world.write("b")
        await world.equal(informer, within=60 * SECOND)
