"""The shell and its status writes against the real API server: what each rule protects from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.cached import CachedMetalNode
from llmkube.api.names import FieldManager
from llmkube.clock import Now, SystemClock
from llmkube.informers.informer import Informer
from llmkube.informers.worker import TerminalError
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import Conflict
from llmkube.kube.events import EventRecorder, ObjectRef
from llmkube.kube.resources import METALNODES
from llmkube.reconcilers.live import read_live
from llmkube.reconcilers.shell import ATTEMPTS, Applied, Live, Shell
from llmkube.reconcilers.status import Ownership, StatusWriter, Target
from llmkube.rules.decision import Decision, EventNote, EventType
from tests.support.background import background
from tests.support.faultproxy import WATCHES, WRITES, FaultProxy
from tests.support.hubs import EAGER
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

OWNERSHIP = Ownership(
    METALNODES,
    FieldManager.HEARTBEAT,
    fields=("agentVersion", "capacity"),
    conditions=("AgentConnected",),
)
NOTE = EventNote(EventType.NORMAL, "Tested", "Test", "for the test")


@dataclass(frozen=True, slots=True)
class Seen:
    target: Target
    live: Live


Decide = Callable[[Seen], Decision]


class Reconciler(Shell[Seen, Decision]):
    """Decides what the test tells it to, and remembers what it was shown."""

    def __init__(self, client: KubeClient, nodes: Informer[CachedMetalNode]) -> None:
        clock = SystemClock()
        recorder = Recorder(client, clock, "test", "test")
        super().__init__(
            clock=clock,
            writer=StatusWriter(client, OWNERSHIP),
            recorder=recorder,
            guard=nodes.guard(),
        )
        self.client = client
        self.nodes = nodes
        self.told = recorder.told
        self.rule: Decide = lambda _: Decision()
        self.seen: list[Seen] = []
        self.acted: list[Applied[Seen, Decision]] = []
        self.forgotten: list[str] = []

    async def observe(self, key: str, now: Now, live: Live) -> Seen | None:
        if Live.TARGET in live:
            node = await read_live(self.client, METALNODES, CachedMetalNode, key)
        else:
            node = self.nodes.store.get(key)
        return None if node is None else Seen(Target.of(node, node.status), live)

    def decide(self, seen: Seen, now: Now) -> Decision:
        self.seen.append(seen)
        return self.rule(seen)

    async def act(self, applied: Applied[Seen, Decision]) -> None:
        self.acted.append(applied)

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


class Recorder(EventRecorder):
    """Keeps the reasons of what it is told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[str] = []

    def event(
        self,
        regarding: ObjectRef,
        type: str,  # noqa: A002 - the recorder's own word
        reason: str,
        action: str,
        note: str,
    ) -> None:
        self.told.append(reason)


@dataclass
class World:
    """One MetalNode, the reconciler that writes it, and the proxy between."""

    admin: KubeClient
    proxy: FaultProxy
    reconciler: Reconciler
    namespace: str
    name: str = "m1"

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    async def create(self) -> None:
        await self.admin.create(
            METALNODES,
            {
                "apiVersion": METALNODES.api_version,
                "kind": "MetalNode",
                "metadata": {"name": self.name},
                "spec": {"leaseName": "lease", "serviceAccountName": "account"},
            },
            self.namespace,
        )
        await self.cached()

    async def cached(self) -> None:
        """Wait until the cache shows the object as it is."""
        version = (await self.get())["metadata"]["resourceVersion"]

        def is_it() -> bool:
            node = self.reconciler.nodes.store.get(self.key)
            return node is not None and node.metadata.resource_version == version

        await eventually(is_it, "the cache is up to date")

    async def get(self) -> dict[str, Any]:
        return await self.admin.get(METALNODES, self.name, self.namespace)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get()).get("status", {})
        return found

    async def edit(self, status: Mapping[str, Any]) -> None:
        """As `kubectl edit` would: another manager writes the status."""
        await self.admin.merge_patch(
            METALNODES,
            self.name,
            self.namespace,
            {"status": status},
            field_manager="kubectl-edit",
            subresource="status",
        )

    def always(self, status: Mapping[str, Any], **rest: Any) -> None:
        self.reconciler.rule = lambda _: Decision(status=status, **rest)


@pytest.fixture
async def world(crds: ControlPlane, admin: KubeClient, namespace: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy.start(crds))
        access = await load_access(proxy.admin_kubeconfig)
        client = KubeClient(access, clock=SystemClock())
        await stack.enter_async_context(client)
        nodes: Informer[CachedMetalNode] = Informer(
            client,
            METALNODES,
            decode=CachedMetalNode,
            namespaces=[namespace],
            clock=SystemClock(),
            settings=EAGER,
        )
        reconciler = Reconciler(client, nodes)
        await stack.enter_async_context(background(nodes.run()))
        await nodes.wait_synced()
        world = World(admin, proxy, reconciler, namespace)
        await world.create()
        yield world


def condition(status: str = "True") -> dict[str, Any]:
    return {
        "type": "AgentConnected",
        "status": status,
        "reason": "Tested",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }


# Writing -----------------------------------------------------------------------------------------
async def test_a_change_is_written_once_and_no_write_follows(world: World) -> None:
    world.always({"agentVersion": "v1", "capacity": None, "conditions": [condition()]})
    await world.reconciler.reconcile(world.key)
    assert (await world.status()) == {"agentVersion": "v1", "conditions": [condition()]}
    world.proxy.forget()
    await world.reconciler.reconcile(world.key)  # waits for the echo of the write, then compares
    assert world.proxy.count(WRITES) == 0
    assert [applied.wrote for applied in world.reconciler.acted] == [True, False]


async def test_an_unknown_condition_compares_like_any_other(world: World) -> None:
    world.always({"conditions": [condition("Unknown")]})
    await world.reconciler.reconcile(world.key)
    await world.reconciler.reconcile(world.key)
    assert world.proxy.count(WRITES) == 1


async def test_a_field_left_out_is_removed_whoever_wrote_it_last(world: World) -> None:
    world.always({"agentVersion": "v1", "capacity": {"chip": "x", "gpuCores": 8}})
    await world.reconciler.reconcile(world.key)
    await world.edit({"agentVersion": "v2", "capacity": {"chip": "y", "metalVersion": "z"}})
    await world.cached()
    world.always({"capacity": {"chip": "x"}})
    await world.reconciler.reconcile(world.key)
    assert (await world.status()) == {"capacity": {"chip": "x"}}


async def test_what_another_owner_wrote_stays(world: World) -> None:
    other = {**condition(), "type": "Reachable"}
    await world.edit({"hostIP": "192.0.2.1", "conditions": [other]})
    await world.cached()
    world.always({"agentVersion": "v1", "conditions": [condition()]})
    await world.reconciler.reconcile(world.key)
    status = await world.status()
    assert status["hostIP"] == "192.0.2.1"
    assert sorted(c["type"] for c in status["conditions"]) == ["AgentConnected", "Reachable"]


# Conflicts ---------------------------------------------------------------------------------------
async def test_a_conflict_means_read_live_and_decide_again(world: World) -> None:
    async with world_with_frozen_watch(world):
        await world.edit({"hostIP": "192.0.2.1"})
        world.always({"agentVersion": "v1"})
        await world.reconciler.reconcile(world.key)
    assert [seen.live for seen in world.reconciler.seen] == [Live.NOTHING, Live.TARGET]
    assert (await world.status()) == {"agentVersion": "v1", "hostIP": "192.0.2.1"}


async def test_a_decision_on_a_re_created_namesake_does_not_land(world: World) -> None:
    async with world_with_frozen_watch(world):
        old = (await world.get())["metadata"]["uid"]
        await world.admin.delete(METALNODES, world.name, world.namespace)
        body = {
            "apiVersion": METALNODES.api_version,
            "kind": "MetalNode",
            "metadata": {"name": world.name},
            "spec": {"leaseName": "other", "serviceAccountName": "other"},
        }
        await world.admin.create(METALNODES, body, world.namespace)
        world.reconciler.rule = lambda seen: Decision(
            status={"agentVersion": "old" if seen.target.uid == old else "new"}
        )
        await world.reconciler.reconcile(world.key)
    assert (await world.status())["agentVersion"] == "new"


async def test_conflicts_without_end_are_left_to_the_back_off(world: World) -> None:
    other = 0

    async def disturb() -> None:
        nonlocal other
        other += 1
        await world.edit({"hostIP": f"192.0.2.{other}"})

    inner = world.reconciler.observe

    async def observe(key: str, now: Now, live: Live) -> Seen | None:
        seen = await inner(key, now, live)
        await disturb()
        return seen

    world.reconciler.observe = observe  # type: ignore[method-assign]
    world.always({"agentVersion": "v1"})
    with pytest.raises(Conflict):
        await world.reconciler.reconcile(world.key)
    assert len(world.reconciler.seen) == ATTEMPTS


@asynccontextmanager
async def world_with_frozen_watch(world: World) -> AsyncIterator[None]:
    """The cache stands still."""
    with world.proxy.frozen(WATCHES):
        await asyncio.sleep(0)
        yield


# Demotions ---------------------------------------------------------------------------------------
async def test_a_demotion_is_decided_once_more_on_a_live_read(world: World) -> None:
    def rule(seen: Seen) -> Decision:
        confirmed = Live.EVIDENCE in seen.live
        return Decision(
            status={"agentVersion": "live" if confirmed else "cached"}, confirm_live=True
        )

    world.reconciler.rule = rule
    await world.reconciler.reconcile(world.key)
    assert [seen.live for seen in world.reconciler.seen] == [Live.NOTHING, Live.EVIDENCE]
    assert (await world.status())["agentVersion"] == "live"


async def test_an_unchanged_cache_is_not_trusted_after_our_own_write(world: World) -> None:
    world.reconciler.guard._bound = timedelta(milliseconds=100)
    world.always({"agentVersion": "v1"})
    with world.proxy.frozen(WATCHES):
        await world.reconciler.reconcile(world.key)
        await world.reconciler.reconcile(world.key)
    assert world.reconciler.seen[-1].live == Live.TARGET
    assert world.proxy.count(WRITES) == 1


# Events, wake-ups, ends --------------------------------------------------------------------------
async def test_events_go_out_after_the_write_and_the_key_comes_back(world: World) -> None:
    at = timedelta(days=9)
    world.always({"agentVersion": "v1"}, events=(NOTE,), wake_at=at)
    outcome = await world.reconciler.reconcile(world.key)
    assert outcome.wake_at == at
    assert world.reconciler.told == ["Tested"]


async def test_a_refused_status_announces_nothing_and_keeps_its_deadline(world: World) -> None:
    at = timedelta(days=9)
    world.always({"conditions": [condition("Maybe")]}, events=(NOTE,), wake_at=at)
    with pytest.raises(TerminalError, match="Apply config/crd again") as refused:
        await world.reconciler.reconcile(world.key)
    assert refused.value.wake_at == at
    assert world.reconciler.told == []
    assert world.reconciler.acted == []


async def test_an_object_that_went_meanwhile_is_forgotten(world: World) -> None:
    world.always({"agentVersion": "v1"}, events=(NOTE,))
    async with world_with_frozen_watch(world):
        await world.admin.delete(METALNODES, world.name, world.namespace)
        outcome = await world.reconciler.reconcile(world.key)
    assert outcome.wake_at is None
    assert world.reconciler.forgotten == [world.key]
    assert world.reconciler.told == []


async def test_nothing_is_written_when_the_gate_is_shut(world: World) -> None:
    class Fenced(Exception):
        pass

    def shut() -> None:
        raise Fenced

    world.reconciler.client.write_gate = shut
    world.always({"agentVersion": "v1"}, events=(NOTE,))
    with pytest.raises(Fenced):
        await world.reconciler.reconcile(world.key)
    assert (await world.status()) == {}
    assert world.reconciler.told == []
