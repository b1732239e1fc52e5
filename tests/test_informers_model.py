"""The cache equals the server after any script of events and faults, on virtual time.

A model of the server's promises, the real reflector and informer. What the real API server does
under the same faults is tests/test_informers_faults.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmkube.api.cached import CachedLease
from llmkube.informers.events import EventDecoder
from llmkube.informers.informer import Informer
from llmkube.informers.options import ReflectorSettings
from llmkube.informers.reflector import Reflector
from llmkube.informers.store import Change
from llmkube.informers.telemetry import SILENT
from llmkube.kube.resources import LEASES
from tests.support.background import background
from tests.support.modelserver import Fault, ModelServer
from tests.support.virtualtime import VirtualClock, VirtualLoop, virtual, virtual_clock

SMALL_PAGES = ReflectorSettings(page_size=2, slice_size=1)
KEYS = st.sampled_from(["ns/a", "ns/b", "ns/c", "ns/d", "ns/e"])
TEN_MINUTES = 600.0


def informer(
    server: ModelServer,
    clock: VirtualClock,
    settings: ReflectorSettings = SMALL_PAGES,
    uniform: Callable[[], float] = lambda: 0.5,
) -> Informer[CachedLease]:
    """The real informer with the model in place of the client."""
    made: Informer[CachedLease] = Informer(
        None,  # type: ignore[arg-type]
        LEASES,
        decode=CachedLease,
        clock=clock,
        settings=settings,
    )
    made._reflectors[None] = Reflector(
        server,
        made,
        EventDecoder(CachedLease),
        made.view._watches[0],
        clock=clock,
        settings=settings,
        metrics=SILENT,
        log=structlog.get_logger(),
        uniform=uniform,
    )
    return made


class Mirror:
    """A handler that rebuilds the store from changes alone."""

    def __init__(self) -> None:
        self.objects: dict[str, CachedLease] = {}
        self.changes: list[Change[CachedLease]] = []

    def __call__(self, change: Change[CachedLease]) -> None:
        assert self.objects.get(change.key) == change.old, "each change begins where the last ended"
        assert change.old != change.new, "a change changes something"
        self.changes.append(change)
        if change.new is None:
            del self.objects[change.key]
        else:
            self.objects[change.key] = change.new


def good_versions(server: ModelServer) -> dict[str, str]:
    return {
        key: obj["metadata"]["resourceVersion"]
        for key, obj in server.objects.items()
        if obj["spec"]["leaseDurationSeconds"] != "soon"
    }


def versions(made: Informer[CachedLease]) -> dict[str, str]:
    return {obj.key: obj.metadata.resource_version for obj in made.store}


class InformerMachine(RuleBasedStateMachine):
    """Any script of writes, compactions, faults and waiting."""

    @initialize()
    def start(self) -> None:
        self.loop = VirtualLoop()
        self.loop.run_until_complete(self.set_up())

    async def set_up(self) -> None:
        self.server = ModelServer()
        self.server.write("ns/a")
        self.informer = informer(self.server, virtual_clock())
        self.mirror = Mirror()
        self.informer.add_handler(self.mirror)
        self.task = asyncio.ensure_future(self.informer.run())

    def run(self, seconds: float) -> None:
        async def step() -> None:
            await self.server.publish()
            await asyncio.sleep(seconds)

        self.loop.run_until_complete(step())

    @rule(key=KEYS, new_uid=st.booleans())
    def write(self, key: str, new_uid: bool) -> None:
        self.server.write(key, new_uid=new_uid)

    @rule(key=KEYS)
    def write_malformed(self, key: str) -> None:
        self.server.write(key, good=False)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.server.delete(key)

    @rule()
    def compact(self) -> None:
        self.server.compact()

    @rule(faults=st.lists(st.sampled_from(list(Fault)), min_size=1, max_size=4))
    def disturb(self, faults: list[Fault]) -> None:
        self.server.faults.extend(faults)

    @rule(seconds=st.sampled_from([0.0, 0.0005, 0.0015, 0.01, 1.0, 30.0, 500.0]))
    def let_pass(self, seconds: float) -> None:
        self.run(seconds)

    @invariant()
    def handlers_have_seen_what_the_store_has(self) -> None:
        if hasattr(self, "informer"):
            assert self.mirror.objects == {obj.key: obj for obj in self.informer.store}
            assert not self.task.done(), "a reflector never gives up"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.server.faults.clear()
        self.run(TEN_MINUTES)
        try:
            assert self.informer.synced
            assert versions(self.informer) == good_versions(self.server)
            assert set(self.informer.bad) == set(self.server.objects) - set(
                self.informer.store.keys()
            )
            self.handlers_have_seen_what_the_store_has()
            before = self.server.requests
            self.run(3600)
            # A watch lives for 5 to 10 minutes: 12 an hour at most, and nothing else.
            assert self.server.requests - before <= 13
        finally:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self.task)
            self.loop.close()


InformerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)
TestInformerMachine = InformerMachine.TestCase


# Each fault, for ever ---------------------------------------------------------------------------
class Endless:
    """A queue of faults that never runs dry."""

    def __init__(self, fault: Fault, every: int = 1) -> None:
        self.fault, self.every, self.count = fault, every, 0

    def popleft(self) -> Any:
        self.count += 1
        return self.fault if self.count % self.every == 0 else None

    def clear(self) -> None:
        self.every = 10**9


@pytest.mark.parametrize("fault", list(Fault))
def test_no_fault_makes_it_spin_or_give_up(fault: Fault) -> None:
    @virtual
    async def test() -> None:
        server = ModelServer()
        server.write("ns/a")
        server.faults = Endless(fault)  # type: ignore[assignment]
        made = informer(server, virtual_clock())
        async with background(made.run()):
            await asyncio.sleep(3600)
            # 30 s of back-off with half of the jitter is 45 s: 80 attempts, and some at the start.
            assert 40 <= server.requests <= 110
            assert not made.synced
            assert made.sync_error
            server.faults.clear()
            await asyncio.sleep(120)
            assert made.synced
            assert versions(made) == good_versions(server)

    test()


@pytest.mark.parametrize("fault", list(Fault))
def test_after_any_fault_on_a_watch_nothing_is_missed(fault: Fault) -> None:
    @virtual
    async def test() -> None:
        server = ModelServer()
        server.write("ns/a")
        made = informer(server, virtual_clock())
        mirror = Mirror()
        made.add_handler(mirror)
        async with background(made.run()):
            await made.wait_synced()
            for n in range(10):
                server.faults.append(fault)
                await asyncio.sleep(601)  # the watch ends, and the next one meets the fault
                server.write(f"ns/n{n}")
                server.delete(f"ns/n{n - 1}")
                await server.publish()
                await asyncio.sleep(200)
                assert versions(made) == good_versions(server)
        assert len(mirror.changes) == 1 + 10 + 9, "and nothing twice"

    test()


# What the view says -----------------------------------------------------------------------------
async def synced(server: ModelServer) -> tuple[Informer[CachedLease], Callable[[], float]]:
    made = informer(server, virtual_clock())
    return made, asyncio.get_running_loop().time


def since(value: timedelta | None) -> float | None:
    return None if value is None else value.total_seconds()


@virtual
async def test_the_start_is_an_outage_without_end_until_the_stream_is_open() -> None:
    server = ModelServer()
    made, _ = await synced(server)
    assert not made.view.up
    assert made.view.up_since is None
    async with background(made.run()):
        await made.wait_synced()
        await asyncio.sleep(1)
        assert made.view.up
        assert made.view.last_outage == timedelta.max


@virtual
async def test_an_orderly_end_is_an_outage_of_milliseconds() -> None:
    server = ModelServer()
    made, _ = await synced(server)
    async with background(made.run()):
        await asyncio.sleep(3000)
        assert made.view.up
        assert made.view.last_outage < timedelta(seconds=1)
        assert made.view.sight.outages[0].length == timedelta.max, "the start is not forgotten"


@virtual
async def test_silence_counts_from_the_last_sign_of_life() -> None:
    server = ModelServer()
    made, now = await synced(server)
    states: list[tuple[float, bool]] = []
    made.view.add_listener(lambda: states.append((now(), made.view.up)))
    server.faults.extend([None, Fault.SILENT, Fault.REFUSED])  # type: ignore[list-item]
    async with background(made.run()):
        await asyncio.sleep(60)
        assert not made.view.catching_up("ns/a", made.view._clock.monotonic()), (
            "a start shows a list"
        )
        opened = since(made.view.up_since)
        await asyncio.sleep(12)
        assert not made.view.up
        assert since(made.view.down_since) == opened
        await asyncio.sleep(20)
        assert made.view.up
        assert made.view.last_outage > timedelta(seconds=70)
        back = made.view.up_since
        assert back is not None
        assert made.view.catching_up("ns/a", back)
        assert not made.view.catching_up("ns/a", back + timedelta(seconds=5))
    assert [up for _, up in states] == [True, False, True]


@virtual
async def test_a_stream_that_ends_at_once_was_no_sight() -> None:
    server = ModelServer()
    server.write("ns/a")
    made, _ = await synced(server)
    async with background(made.run()):
        await made.wait_synced()
        await asyncio.sleep(10)
        server.faults = Endless(Fault.EMPTY)  # type: ignore[assignment]
        await asyncio.sleep(700)
        assert not made.view.up
        down = since(made.view.down_since)
        assert down is not None
        await asyncio.sleep(600)
        assert since(made.view.down_since) == down, "it did not flicker"
        server.faults.clear()
        await asyncio.sleep(100)
        assert made.view.up
        assert made.view.last_outage > timedelta(seconds=600)


@virtual
async def test_health_complains_of_an_ended_task_and_of_one_that_does_not_try() -> None:
    limit = timedelta(minutes=3)
    server = ModelServer()
    server.faults = Endless(Fault.FORBIDDEN)  # type: ignore[assignment]
    made, _ = await synced(server)
    async with background(made.run()):
        for _ in range(100):
            await asyncio.sleep(30)
            assert made.view.complaint(limit) is None, "an API server that refuses is no fault"
        assert "Forbidden" in (made.sync_error or "")
    assert "has ended" in (made.view.complaint(limit) or "")
    assert not made.view.task_alive


@virtual
async def test_whoever_waits_for_sync_learns_of_failure() -> None:
    server = ModelServer()
    server.faults = Endless(Fault.MISSING)  # type: ignore[assignment]
    made, _ = await synced(server)
    waiting = asyncio.ensure_future(made.wait_synced())
    async with background(made.run()):
        await asyncio.sleep(100)
        assert not waiting.done()
    with pytest.raises(Exception, match="NotFound: what"):
        await waiting


# The event loop ---------------------------------------------------------------------------------
@virtual
async def test_neither_a_big_list_nor_a_burst_holds_up_the_loop() -> None:
    server = ModelServer()
    for n in range(3000):
        server.write(f"ns/n{n}")
    made = informer(server, virtual_clock(), ReflectorSettings(page_size=3000, slice_size=100))
    turns: list[int] = []  # changes in each turn of the event loop

    def count(_change: Change[CachedLease]) -> None:
        if not turns or turns[-1] < 0:
            turns.append(0)
            asyncio.get_running_loop().call_soon(lambda: turns.append(-1))
        turns[-1] += 1

    made.add_handler(count)
    async with background(made.run()):
        await made.wait_synced()
        for n in range(3000, 6000):
            server.write(f"ns/n{n}")
        await server.publish()
        await asyncio.sleep(1)
        assert len(made.store) == 6000
    assert [turn for turn in turns if turn > 0] == [100] * 60


@virtual
async def test_a_handler_that_breaks_on_each_event_does_not_flood_the_log() -> None:
    server = ModelServer()
    made = informer(server, virtual_clock())
    logged: list[str] = []

    class Log:
        def exception(self, event: str, **_: Any) -> None:
            logged.append(event)

        def info(self, event: str, **_: Any) -> None:
            pass

    made._log = Log()
    seen: list[str] = []
    made.add_handler(lambda _change: 1 / 0)  # type: ignore[arg-type, return-value]
    made.add_handler(lambda change: seen.append(change.key))
    async with background(made.run()):
        await made.wait_synced()
        for n in range(120):
            server.write(f"ns/n{n}")
            await server.publish()
            await asyncio.sleep(1)
    assert len(seen) == 120
    assert len(logged) == 2, "once a minute"
