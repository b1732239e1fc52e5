"""What workers make of a reconcile's outcome: the table in llmkube.informers.worker, row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from llmkube.informers.queue import WorkQueue
from llmkube.informers.worker import DONE, Outcome, TerminalError, run_workers
from llmkube.kube.errors import Conflict, TooManyRequests, Unavailable
from llmkube.metrics import Metrics
from tests.support.background import background
from tests.support.virtualtime import virtual, virtual_clock

SECOND = timedelta(seconds=1)


class Recorder:
    """A log that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, **kw: Any) -> None:
        self.lines.append(("warning", event, kw))

    def error(self, event: str, **kw: Any) -> None:
        self.lines.append(("error", event, kw))

    def exception(self, event: str, **kw: Any) -> None:
        self.lines.append(("exception", event, kw))


class Bench:
    """A queue, workers' surroundings, and the times at which a key was reconciled."""

    def __init__(self, *answers: Outcome | Exception) -> None:
        self.clock = virtual_clock()
        self.metrics = Metrics()
        self.log = Recorder()
        self.queue = WorkQueue("test", self.clock)
        self.answers = list(answers)
        self.runs: list[float] = []

    async def reconcile(self, _key: str) -> Outcome:
        self.runs.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if self.answers else DONE
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def work(
        self, reconcile: Callable[[str], Awaitable[Outcome]] | None = None, **options: Any
    ) -> None:
        await run_workers(
            self.queue,
            reconcile or self.reconcile,
            concurrency=options.pop("concurrency", 2),
            log=self.log,
            metrics=self.metrics.reconcile("test"),
            **options,
        )

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, {"controller": "test", **labels})
        assert value is not None, name
        return value

    def results(self, result: str) -> float:
        return self.count("controller_runtime_reconcile_total", result=result)


@virtual
async def test_success_is_counted_and_not_repeated() -> None:
    bench = Bench()
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(10_000)
    assert len(bench.runs) == 1
    assert bench.results("success") == 1
    assert bench.count("controller_runtime_reconcile_time_seconds_count") == 1


@virtual
async def test_an_error_backs_off_and_success_forgets_it() -> None:
    error = Unavailable("no")
    bench = Bench(error, error, error, DONE, error)
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(1)
        bench.queue.add("a")
        await asyncio.sleep(1)
    gaps = [later - sooner for sooner, later in zip(bench.runs, bench.runs[1:], strict=False)]
    assert gaps[:3] == pytest.approx([0.005, 0.01, 0.02], abs=0.002)
    assert gaps[4] == pytest.approx(0.005, abs=0.002), "the back-off began anew"
    assert bench.results("error") == 4
    assert bench.count("controller_runtime_reconcile_errors_total") == 4
    assert [line[0] for line in bench.log.lines] == ["warning"] * 4
    assert bench.log.lines[0][2]["key"] == "a"


@pytest.mark.parametrize("cls", [TooManyRequests, Unavailable])
def test_retry_after_is_honoured(cls: type[Unavailable]) -> None:
    @virtual
    async def test() -> None:
        bench = Bench(cls("slow down", status=429, retry_after=30 * SECOND))
        async with background(bench.work()):
            bench.queue.add("a")
            await asyncio.sleep(100)
        assert bench.runs[1] - bench.runs[0] == pytest.approx(30, abs=0.01)

    test()


@virtual
async def test_a_conflict_is_tried_again_at_once() -> None:
    bench = Bench(Conflict("changed", status=409))
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(1)
    assert bench.runs[1] - bench.runs[0] < 0.01


@virtual
async def test_a_terminal_error_is_counted_logged_and_tried_again_after_the_longest_back_off() -> (
    None
):
    bench = Bench(Unavailable("no"), TerminalError("spec.hostIP is no address: correct it"))
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(999)
        assert len(bench.runs) == 2
        await asyncio.sleep(5000)
    assert len(bench.runs) == 3, "once more, and it went well"
    assert bench.runs[2] - bench.runs[1] == pytest.approx(1000, abs=0.01)
    assert bench.queue.failures("a") == 0
    assert bench.count("controller_runtime_terminal_reconcile_errors_total") == 1
    assert bench.results("error") == 2
    assert bench.log.lines[-1][0] == "error"
    assert "correct it" in bench.log.lines[-1][2]["why"]


@virtual
async def test_a_terminal_error_does_not_cost_a_deadline() -> None:
    bench = Bench(TerminalError("refused", wake_at=70 * SECOND))
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(5000)
    assert bench.runs[1:] == [pytest.approx(70, abs=0.002)]
    assert bench.count("controller_runtime_terminal_reconcile_errors_total") == 1


@virtual
async def test_wake_at_forgets_failures_and_runs_at_that_instant() -> None:
    bench = Bench(Unavailable("no"), Outcome(wake_at=70 * SECOND))
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(100)
    assert bench.runs[2] == pytest.approx(70, abs=0.002)
    assert bench.queue.failures("a") == 0
    assert bench.results("requeue_after") == 1


@virtual
async def test_a_bug_is_isolated_counted_logged_with_the_key_and_retried() -> None:
    bench = Bench(ZeroDivisionError("oops"), RecursionError("deep"))
    async with background(bench.work(concurrency=1)):
        bench.queue.add("ns/broken")
        bench.queue.add("ns/other")
        await asyncio.sleep(1)
    assert len(bench.runs) == 4
    assert bench.count("controller_runtime_reconcile_panics_total") == 2
    kinds = {(kind, kw["key"]) for kind, _, kw in bench.log.lines}
    assert ("exception", "ns/broken") in kinds


@virtual
async def test_a_run_that_never_ends_is_ended() -> None:
    bench = Bench()
    stuck = True

    async def reconcile(_key: str) -> Outcome:
        bench.runs.append(asyncio.get_running_loop().time())
        if stuck:
            await asyncio.Event().wait()
        return DONE

    async with background(bench.work(reconcile, run_limit=60 * SECOND)):
        bench.queue.add("a")
        await asyncio.sleep(30)
        stuck = False
        await asyncio.sleep(100)
    assert bench.runs[1] == pytest.approx(60, abs=0.1)
    assert bench.count("controller_runtime_reconcile_timeouts_total") == 1
    assert bench.count("controller_runtime_reconcile_panics_total") == 0


@virtual
async def test_each_worker_is_ended_at_its_own_limit_and_one_timer_watches_all() -> None:
    bench = Bench()
    loop = asyncio.get_running_loop()
    ended: dict[str, float] = {}

    async def reconcile(key: str) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            ended[key] = loop.time()
        return DONE

    async with background(bench.work(reconcile, concurrency=3, run_limit=60 * SECOND)):
        for key in ("a", "b", "c"):
            bench.queue.add(key)
            await asyncio.sleep(10)
        timers = [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        assert len(timers) == 1
        await asyncio.sleep(55)
        assert ended == {"a": pytest.approx(60), "b": pytest.approx(70), "c": pytest.approx(80)}
        assert bench.count("controller_runtime_reconcile_timeouts_total") == 3


@virtual
async def test_a_stop_that_meets_a_run_that_is_late_is_still_a_stop() -> None:
    bench = Bench()

    async def reconcile(_key: str) -> Outcome:
        await asyncio.Event().wait()
        return DONE

    task = asyncio.ensure_future(bench.work(reconcile, run_limit=5 * SECOND, drain=5 * SECOND))
    bench.queue.add("a")
    await asyncio.sleep(4.9)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert asyncio.get_running_loop().time() == pytest.approx(5)


@virtual
async def test_a_reconciler_that_returns_nonsense_does_not_end_the_worker() -> None:
    bench = Bench()
    answers = [None, "later", DONE]

    async def reconcile(_key: str) -> Outcome:
        return answers.pop(0)  # type: ignore[return-value]

    async with background(bench.work(reconcile)):
        bench.queue.add("a")
        await asyncio.sleep(1)
    assert bench.count("controller_runtime_reconcile_panics_total") == 2
    assert bench.results("success") == 1


@virtual
async def test_a_timeout_of_the_reconciler_itself_is_not_counted_as_ours() -> None:
    bench = Bench(TimeoutError("its own"))
    async with background(bench.work()):
        bench.queue.add("a")
        await asyncio.sleep(1)
    assert bench.count("controller_runtime_reconcile_timeouts_total") == 0
    assert bench.count("controller_runtime_reconcile_panics_total") == 1


@virtual
async def test_concurrency_is_bounded_and_used() -> None:
    bench = Bench()
    running, most = 0, 0

    async def reconcile(_key: str) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1
        return DONE

    async with background(bench.work(reconcile, concurrency=3)):
        for n in range(9):
            bench.queue.add(f"k{n}")
        await asyncio.sleep(0.5)
        assert bench.count("controller_runtime_active_workers") == 3
        await asyncio.sleep(2.6)
        assert len(bench.queue) == 0
    assert most == 3
    assert bench.count("controller_runtime_max_concurrent_reconciles") == 3


@virtual
async def test_cancelling_lets_runs_in_hand_end_and_starts_no_other() -> None:
    bench = Bench()
    ended: list[str] = []

    async def reconcile(key: str) -> Outcome:
        await asyncio.sleep(5)
        ended.append(key)
        return DONE

    task = asyncio.ensure_future(bench.work(reconcile, concurrency=2, drain=8 * SECOND))
    for key in ("a", "b", "c"):
        bench.queue.add(key)
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert asyncio.get_running_loop().time() == pytest.approx(5)
    assert sorted(ended) == ["a", "b"]
    assert len(bench.queue) == 1, "what nobody had taken stays for the next term"
    async with background(bench.work()):
        await asyncio.sleep(1)
    assert len(bench.queue) == 0


@virtual
async def test_the_drain_is_bounded() -> None:
    bench = Bench()

    async def reconcile(_key: str) -> Outcome:
        await asyncio.Event().wait()
        return DONE

    task = asyncio.ensure_future(bench.work(reconcile, drain=8 * SECOND))
    bench.queue.add("a")
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert asyncio.get_running_loop().time() == pytest.approx(9)
    assert bench.count("controller_runtime_active_workers") == 0
    assert sum(bench.results(result) for result in ("success", "error")) == 0


@virtual
async def test_a_second_cancel_is_immediate() -> None:
    bench = Bench()

    async def reconcile(_key: str) -> Outcome:
        await asyncio.Event().wait()
        return DONE

    task = asyncio.ensure_future(bench.work(reconcile))
    bench.queue.add("a")
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert asyncio.get_running_loop().time() == pytest.approx(2)


@virtual
async def test_shutting_the_queue_down_ends_the_workers_after_the_last_key() -> None:
    bench = Bench()
    bench.queue.add("a")
    bench.queue.shut_down()
    await bench.work()
    assert len(bench.runs) == 1
