"""Leader election on a real Lease: paused leaders, hung and absent API servers, hand-overs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from devcluster.controlplane import ControlPlane
from llmkube.clock import Clock, SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import NotLeader
from llmkube.kube.resources import CONFIGMAPS, LEASES
from llmkube.leader import LeaderElector, LeaderSettings
from llmkube.metrics import Metrics
from tests.support.background import background
from tests.support.clock import FakeClock
from tests.support.contender import LEASE, RECORD, SETTINGS
from tests.support.faultproxy import EVERYTHING, Answer, FaultProxy, LoseAnswer, Swallow
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
PATIENT = LeaderSettings(
    lease_duration=timedelta(minutes=10),
    renew_deadline=timedelta(minutes=5),
    retry_period=timedelta(milliseconds=200),
)


@dataclass
class Contender:
    """An elector in this process, and what became of its work."""

    elector: LeaderElector
    began: int = 0
    ended: int = 0
    task: asyncio.Task[None] | None = None
    metrics: Metrics = field(default_factory=Metrics)

    async def work(self) -> None:
        self.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    @property
    def working(self) -> bool:
        return self.began > self.ended

    async def leads(self, within: timedelta = timedelta(seconds=60)) -> None:
        await eventually(lambda: self.working and self.elector.is_leader, "it leads", within=within)

    def status(self) -> float | None:
        labels = {"name": LEASE}
        return self.metrics.registry.get_sample_value("leader_election_master_status", labels)


def contender(
    client: KubeClient,
    namespace: str,
    name: str,
    settings: LeaderSettings = SETTINGS,
    clock: Clock | None = None,
) -> Contender:
    metrics = Metrics()
    elector = LeaderElector(
        client,
        clock or SystemClock(),
        namespace=namespace,
        name=LEASE,
        identity=name,
        settings=settings,
        metrics=metrics.leader(LEASE),
    )
    return Contender(elector, metrics=metrics)


@asynccontextmanager
async def running(one: Contender) -> AsyncIterator[Contender]:
    """The contender contends while the block lasts."""
    one.task = asyncio.ensure_future(one.elector.run(one.work))
    try:
        yield one
    finally:
        one.task.cancel()
        await asyncio.wait({one.task})


async def spec(admin: KubeClient, namespace: str) -> dict:
    return (await admin.get(LEASES, LEASE, namespace))["spec"]


@pytest.fixture
async def proxy(control_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(control_plane) as started:
        yield started


@pytest.fixture
async def proxied(proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    """A client behind the proxy."""
    async with KubeClient(await load_access(proxy.admin_kubeconfig), clock=SystemClock()) as client:
        yield client


# Processes --------------------------------------------------------------------------------------


class Process:
    """A contender in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.words: Counter[str] = Counter()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.words[line.decode().strip()] += 1

    async def says(self, word: str, more_than: int = 0) -> None:
        await eventually(
            lambda: self.words[word] > more_than, f"it says {word}", within=timedelta(seconds=60)
        )


@asynccontextmanager
async def process(control_plane: ControlPlane, namespace: str, name: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.contender",
        str(control_plane.admin_kubeconfig),
        namespace,
        name,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Process(started)
    try:
        async with background(one.listen()):
            yield one
    finally:
        started.kill()
        await started.wait()


async def writers(admin: KubeClient, namespace: str, since: str, seen: list[str]) -> None:
    """Note who wrote the record, in the order of the API server."""
    selector = f"metadata.name={RECORD}"
    async with admin.watch(
        CONFIGMAPS, namespace, field_selector=selector, resource_version=since
    ) as stream:
        rest = b""
        while data := await stream.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line)
                if event["type"] == "MODIFIED":
                    seen.append(event["object"]["data"]["writer"])


@pytest.mark.slow
async def test_a_paused_leader_is_replaced_and_writes_nothing_when_it_wakes(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    record = await admin.create(
        CONFIGMAPS,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": RECORD}},
        namespace,
    )
    seen: list[str] = []
    since = record["metadata"]["resourceVersion"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background(writers(admin, namespace, since, seen)))
        old = await stack.enter_async_context(process(control_plane, namespace, "old"))
        await old.says("wrote", more_than=5)
        new = await stack.enter_async_context(process(control_plane, namespace, "new"))
        for _ in range(2):
            old.process.send_signal(signal.SIGSTOP)
            await new.says("wrote", more_than=new.words["wrote"] + 5)
            lost = old.words["lost"]
            old.process.send_signal(signal.SIGCONT)
            await old.says("lost", more_than=lost)
            await new.says("wrote", more_than=new.words["wrote"] + 5)
            old, new = new, old
        assert old.process.returncode is None, "losing the lease must not end the process"
        assert new.process.returncode is None
    changes = [writer for at, writer in enumerate(seen) if at == 0 or seen[at - 1] != writer]
    takeovers = (await spec(admin, namespace))["leaseTransitions"]
    assert takeovers >= 2
    assert changes[:3] == ["old", "new", "old"]
    assert len(changes) <= takeovers + 1, "a write by one who had been replaced"


# Hung and absent API servers --------------------------------------------------------------------


async def test_a_leader_whose_calls_hang_stops_before_another_may_begin(
    proxied: KubeClient, proxy: FaultProxy, admin: KubeClient, namespace: str
) -> None:
    async with running(contender(proxied, namespace, "hung")) as hung:
        await hung.leads()
        async with running(contender(admin, namespace, "next")) as following:
            with proxy.playing(Swallow()), proxy.frozen(EVERYTHING):
                await eventually(lambda: not hung.working, "the hung leader's work has ended")
                assert not following.working
                with pytest.raises(NotLeader):
                    hung.elector.check_can_write()
                await following.leads()
            assert hung.task is not None
            assert not hung.task.done(), "it contends again"


async def test_an_outage_restarts_nobody(
    proxied: KubeClient, proxy: FaultProxy, namespace: str
) -> None:
    async with running(contender(proxied, namespace, "only")) as only:
        await only.leads()
        with proxy.playing(Answer(503, b"away")):
            await eventually(lambda: not only.working, "the work has ended")
            await eventually(lambda: proxy.count("^GET .*/leases") > 3, "it goes on contending")
            assert only.status() == 0
        await only.leads()
        assert only.began == 2
        assert only.status() == 1
        assert only.task is not None
        assert not only.task.done()


async def test_a_short_outage_costs_no_leadership(
    proxied: KubeClient, proxy: FaultProxy, namespace: str
) -> None:
    async with running(contender(proxied, namespace, "only", PATIENT)) as only:
        await only.leads()
        proxy.forget()
        with proxy.playing(Answer(500, b"oops")):
            await eventually(lambda: proxy.count("^PUT") >= 3, "renewals fail")
        await eventually(
            lambda: any(r.status == 200 for r in proxy.requests), "a renewal goes through again"
        )
        assert only.began == 1


async def test_a_lost_answer_is_made_up_for_by_looking(
    proxied: KubeClient, proxy: FaultProxy, namespace: str
) -> None:
    async with running(contender(proxied, namespace, "only", PATIENT)) as only:
        await only.leads()
        with proxy.playing(LoseAnswer(), "^PUT"):
            await eventually(lambda: proxy.count("^PUT") >= 2, "renewals are acted on unanswered")
        labels = {"name": LEASE}
        await eventually(
            lambda: only.metrics.registry.get_sample_value(
                "leader_election_slowpath_total", labels
            ),
            "it looked who holds the lease",
        )
        assert only.began == 1
        assert only.working


# Losing and leaving -----------------------------------------------------------------------------


async def test_leaving_hands_over_at_once(admin: KubeClient, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        async with running(contender(admin, namespace, "first", PATIENT)) as first:
            await first.leads()
            second = await stack.enter_async_context(
                running(contender(admin, namespace, "second", PATIENT))
            )
        assert not first.working
        await second.leads()  # long before the ten minutes of the lease are over
        found = await spec(admin, namespace)
        assert found["holderIdentity"] == "second"
        assert found["leaseTransitions"] == 1
    found = await spec(admin, namespace)
    assert found["holderIdentity"] == ""
    assert found["leaseDurationSeconds"] == 1


async def test_leaving_a_server_that_hangs_is_quick(
    proxied: KubeClient, proxy: FaultProxy, namespace: str
) -> None:
    one = contender(proxied, namespace, "only", PATIENT)
    task = asyncio.ensure_future(one.elector.run(one.work))
    await one.leads()
    with proxy.playing(Swallow(), "^PUT"):
        task.cancel()
        _, running = await asyncio.wait({task}, timeout=15)
    assert not running, "the release is bounded by its own second, not by a request's half minute"
    assert one.ended == 1


async def test_the_lease_is_freed_only_when_the_work_has_ended(
    admin: KubeClient, namespace: str
) -> None:
    one = contender(admin, namespace, "only", PATIENT)
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        one.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            asked.set()
            await release.wait()
            one.elector.check_can_write()  # what is in hand may still be written

    task = asyncio.ensure_future(one.elector.run(slow))
    await eventually(lambda: one.began == 1, "it leads")
    task.cancel()
    await asked.wait()
    assert (await spec(admin, namespace))["holderIdentity"] == "only"
    release.set()
    await asyncio.wait({task})
    assert (await spec(admin, namespace))["holderIdentity"] == ""


async def test_a_lease_that_ran_out_while_the_work_stopped_is_not_touched(
    admin: KubeClient, namespace: str
) -> None:
    clock = FakeClock()
    one = contender(admin, namespace, "laptop", PATIENT, clock)

    async def sleepy() -> None:
        one.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            clock.suspend(PATIENT.renew_deadline)

    task = asyncio.ensure_future(one.elector.run(sleepy))
    await eventually(lambda: one.began == 1, "it leads")
    task.cancel()
    await asyncio.wait({task})
    assert (await spec(admin, namespace))["holderIdentity"] == "laptop"


async def test_a_deleted_lease_is_a_lost_one(admin: KubeClient, namespace: str) -> None:
    async with running(contender(admin, namespace, "only", PATIENT)) as only:
        await only.leads()
        await admin.delete(LEASES, LEASE, namespace)
        await eventually(lambda: only.ended == 1, "it steps down")
        await only.leads()


async def test_a_lease_that_another_took_is_lost_at_once(admin: KubeClient, namespace: str) -> None:
    async with running(contender(admin, namespace, "only", PATIENT)) as only:
        await only.leads()
        thief = {"spec": {"holderIdentity": "thief"}}
        await admin.merge_patch(LEASES, LEASE, namespace, thief)
        await eventually(lambda: only.ended == 1, "it steps down")
        assert not only.elector.is_leader
        assert only.status() == 0


async def test_a_lease_that_someone_edited_is_kept(admin: KubeClient, namespace: str) -> None:
    async with running(contender(admin, namespace, "only", PATIENT)) as only:
        await only.leads()
        noted = await admin.merge_patch(
            LEASES, LEASE, namespace, {"metadata": {"annotations": {"note": "hands off"}}}
        )

        async def renewed() -> bool:
            lease = await admin.get(LEASES, LEASE, namespace)
            return bool(lease["spec"]["renewTime"] != noted["spec"]["renewTime"])

        await eventually(renewed, "it goes on renewing")
        lease = await admin.get(LEASES, LEASE, namespace)
        assert lease["metadata"]["annotations"] == {"note": "hands off"}
        assert only.began == 1


async def test_after_a_suspend_the_gate_is_closed_before_anything_else_happens(
    admin: KubeClient, namespace: str
) -> None:
    clock = FakeClock()
    async with running(contender(admin, namespace, "laptop", SETTINGS, clock)) as laptop:
        await laptop.leads()
        laptop.elector.check_can_write()
        clock.suspend(SETTINGS.renew_deadline)
        with pytest.raises(NotLeader):
            laptop.elector.check_can_write()
        await eventually(lambda: laptop.ended == 1, "it steps down")
        await laptop.leads()


async def test_work_that_fails_frees_the_lease_and_is_told(
    admin: KubeClient, namespace: str
) -> None:
    one = contender(admin, namespace, "failing", PATIENT)

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await one.elector.run(fail)
    assert (await spec(admin, namespace))["holderIdentity"] == ""


async def test_work_that_does_not_stop_ends_the_process_instead_of_contending(
    admin: KubeClient, namespace: str
) -> None:
    settings = LeaderSettings(
        SETTINGS.lease_duration,
        SETTINGS.renew_deadline,
        SETTINGS.retry_period,
        stop_timeout=timedelta(milliseconds=300),
    )
    one = contender(admin, namespace, "stubborn", settings)
    release = asyncio.Event()

    async def stubborn() -> None:
        one.began += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await release.wait()

    task = asyncio.ensure_future(one.elector.run(stubborn))
    await eventually(lambda: one.began == 1, "it leads")
    await admin.delete(LEASES, LEASE, namespace)
    await asyncio.wait({task}, timeout=30)
    release.set()
    with pytest.raises(RuntimeError, match="did not stop"):
        await task
    assert not one.elector.is_leader


async def test_times_are_microseconds_in_utc(admin: KubeClient, namespace: str) -> None:
    clock = FakeClock()  # at full seconds: the API server wants six digits all the same
    async with running(contender(admin, namespace, "only", PATIENT, clock)) as only:
        await only.leads()
        found = await spec(admin, namespace)
    assert found["renewTime"] == found["acquireTime"] == "2026-01-01T00:00:00.000000Z"
