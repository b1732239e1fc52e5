"""The queue, awaited: waiters, the one timer, shutdown, and nothing lost on the way."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import pytest

from llmkube.informers.queue import QueueShutDown, WorkQueue
from llmkube.metrics import Metrics
from tests.support.clock import FakeClock
from tests.support.virtualtime import virtual, virtual_clock

SECOND = timedelta(seconds=1)


def queue() -> WorkQueue:
    return WorkQueue("test", virtual_clock())


@virtual
async def test_a_waiter_gets_what_is_added() -> None:
    q = queue()
    waiter = asyncio.ensure_future(q.get())
    await asyncio.sleep(0)
    q.add("a")
    assert await waiter == "a"


@virtual
async def test_a_deadline_wakes_a_waiter_at_that_instant() -> None:
    q = queue()
    loop = asyncio.get_running_loop()
    q.add_at("late", 500 * SECOND)
    q.add_at("early", 100 * SECOND)
    assert await q.get() == "early"
    assert loop.time() == pytest.approx(100, abs=0.002)
    assert await q.get() == "late"
    assert loop.time() == pytest.approx(500, abs=0.002)


@virtual
async def test_a_deadline_that_has_passed_already_wakes_a_waiter_at_once() -> None:
    q = queue()
    waiter = asyncio.ensure_future(q.get())
    await asyncio.sleep(5)
    q.add_at("a", 4 * SECOND)
    async with asyncio.timeout(1):
        assert await waiter == "a"


@virtual
async def test_ten_thousand_deadlines_are_one_timer() -> None:
    q = queue()
    loop = asyncio.get_running_loop()
    for n in range(10_000):
        q.add_at(f"k{n}", (20_000 - n) * SECOND)
    live = [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
    assert len(live) == 1


@virtual
async def test_the_earliest_of_several_instants_wins_and_the_others_do_not_fire() -> None:
    q = queue()
    for seconds in (30, 10, 20):
        q.add_at("a", seconds * SECOND)
    assert await q.get() == "a"
    assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.002)
    q.done("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(q.get(), 100)


@virtual
async def test_a_cancelled_waiter_passes_the_word_on() -> None:
    q = queue()
    first = asyncio.ensure_future(q.get())
    second = asyncio.ensure_future(q.get())
    await asyncio.sleep(0)
    q.add("a")  # tells the first one to look ...
    first.cancel()  # ... which is cancelled before it can
    assert await asyncio.wait_for(second, 1) == "a"


@virtual
async def test_a_waiter_cancelled_before_anything_came_leaves_nothing_behind() -> None:
    q = queue()
    gone = asyncio.ensure_future(q.get())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    q.add("a")
    assert await asyncio.wait_for(q.get(), 1) == "a"


@virtual
async def test_shutdown_wakes_all_waiters_and_drains_what_is_ready() -> None:
    q = queue()
    waiters = [asyncio.ensure_future(q.get()) for _ in range(3)]
    await asyncio.sleep(0)
    q.shut_down()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(result, QueueShutDown) for result in results)


@virtual
async def test_after_shutdown_ready_keys_are_handed_out_and_no_others() -> None:
    q = queue()
    q.add("ready")
    q.add_at("later", 5 * SECOND)
    q.shut_down()
    q.add("refused")
    assert await q.get() == "ready"
    q.add("ready")
    q.done("ready")
    with pytest.raises(QueueShutDown):
        await q.get()


@virtual
async def test_an_add_while_shutting_down_during_processing_is_refused() -> None:
    q = queue()
    q.add("a")
    assert await q.get() == "a"
    q.add("a")  # before the shutdown: runs once more
    q.shut_down()
    q.add("a")
    q.done("a")
    assert await q.get() == "a"
    q.done("a")
    with pytest.raises(QueueShutDown):
        await q.get()


@virtual
async def test_a_timer_that_fires_early_only_looks_again() -> None:
    clock = FakeClock()
    q = WorkQueue("test", clock)
    q.add_at("a", clock.mono + 10 * SECOND)
    waiter = asyncio.ensure_future(q.get())
    await asyncio.sleep(60)  # the loop's time passes, the clock of the queue stands still
    assert not waiter.done()
    clock.advance(10 * SECOND)
    q.wake()
    assert await asyncio.wait_for(waiter, 1) == "a"


@virtual
async def test_stress_no_key_lost_and_none_in_two_hands() -> None:
    q = queue()
    rng = random.Random(7)
    holders: dict[str, int] = {}
    wanted: dict[str, int] = {}
    seen: dict[str, int] = {}

    async def worker() -> None:
        while True:
            key = await q.get()
            holders[key] = holders.get(key, 0) + 1
            assert holders[key] == 1
            seen[key] = wanted[key]
            try:
                await asyncio.sleep(rng.random() / 100)
            finally:
                holders[key] -= 1
                q.done(key)

    workers = [asyncio.ensure_future(worker()) for _ in range(8)]
    for version in range(3000):
        key = f"k{rng.randrange(20)}"
        wanted[key] = version
        choice = rng.random()
        if choice < 0.6:
            q.add(key, initial=choice < 0.2)
        else:
            q.add_at(key, timedelta(seconds=asyncio.get_running_loop().time() + rng.random() / 50))
        if choice > 0.95:  # a worker dies while it waits or works, another takes its place
            victim = workers.pop(rng.randrange(8))
            victim.cancel()
            workers.append(asyncio.ensure_future(worker()))
        await asyncio.sleep(rng.random() / 500)
    await asyncio.sleep(10)
    assert seen == wanted
    assert len(q) == 0
    assert not any(holders.values())
    failed = [w for w in workers if w.done()]
    assert not failed
    for each in workers:
        each.cancel()


@virtual
async def test_metrics_follow_the_queue() -> None:
    metrics = Metrics()
    q = WorkQueue("mac", virtual_clock(), metrics.queue("mac"))

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"name": "mac", "controller": "mac"})

    q.add("a")
    q.add("a")
    q.add("b")
    assert value("workqueue_depth") == 2
    assert value("workqueue_adds_total") == 2
    await asyncio.sleep(3)
    key = await q.get()
    assert value("workqueue_queue_duration_seconds_sum") == pytest.approx(3)
    await asyncio.sleep(5)
    assert value("workqueue_unfinished_work_seconds") == pytest.approx(5)
    assert value("workqueue_longest_running_processor_seconds") == pytest.approx(5)
    q.add_rate_limited(key)
    q.done(key)
    assert value("workqueue_work_duration_seconds_sum") == pytest.approx(5)
    assert value("workqueue_retries_total") == 1
    assert value("workqueue_depth") == 1
    assert value("workqueue_unfinished_work_seconds") == 0


@virtual
async def test_a_paused_queue_forgets_what_waits_and_ignores_what_is_added() -> None:
    metrics = Metrics()
    q = WorkQueue("mac", virtual_clock(), metrics.queue("mac"))
    q.add("ready")
    q.add_at("later", 5 * SECOND)
    q.add_rate_limited("failing")
    q.pause()
    q.add("ignored")
    q.add_at("ignored", 1 * SECOND)
    q.add_rate_limited("ignored")
    labels = {"name": "mac", "controller": "mac"}
    assert metrics.registry.get_sample_value("workqueue_depth", labels) == 0
    assert q.failures("failing") == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(q.get(), 100)
    q.resume()
    q.add("a")
    assert await q.get() == "a"
    waited = metrics.registry.get_sample_value("workqueue_queue_duration_seconds_sum", labels)
    assert waited == pytest.approx(0), "the time as a follower is no waiting"


@virtual
async def test_a_key_in_work_when_the_queue_is_paused_can_be_given_back() -> None:
    q = queue()
    q.add("a")
    assert await q.get() == "a"
    q.add("a")
    q.pause()
    q.done("a")
    assert len(q) == 0
    q.resume()
    q.add("a")
    assert await q.get() == "a"
