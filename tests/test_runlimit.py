"""The bound on runs: who is late is cancelled at that instant, and nobody else."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from llmkube.kube.runlimit import RunLimit
from tests.support.virtualtime import virtual

LIMIT = timedelta(seconds=10)


async def too_long(limit: RunLimit) -> None:
    with limit:
        await asyncio.sleep(100)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_a_run_that_is_late_ends_with_a_timeout_at_the_limit() -> None:
    limit = RunLimit(LIMIT)
    with pytest.raises(TimeoutError):
        await too_long(limit)
    assert now() == pytest.approx(10)
    await asyncio.sleep(1)  # the task itself is not cancelled


@virtual
async def test_a_run_in_time_is_left_alone_and_so_is_what_follows() -> None:
    limit = RunLimit(LIMIT)
    for _ in range(5):
        with limit:
            await asyncio.sleep(9)
        await asyncio.sleep(30)


@virtual
async def test_each_of_many_has_its_own_limit() -> None:
    limit = RunLimit(LIMIT)

    async def run(start: float, length: float) -> tuple[bool, float]:
        await asyncio.sleep(start)
        try:
            with limit:
                await asyncio.sleep(length)
        except TimeoutError:
            return False, now()
        return True, now()

    lengths = {0: 9.0, 1: 20.0, 2: 3.0, 3: 11.0, 4: 9.9}
    ends = await asyncio.gather(*(run(start, length) for start, length in lengths.items()))
    for (start, length), (in_time, end) in zip(lengths.items(), ends, strict=True):
        assert in_time == (length < 10)
        assert end == pytest.approx(start + min(length, 10.0))


@virtual
async def test_who_is_cancelled_by_another_is_cancelled() -> None:
    limit = RunLimit(LIMIT)
    task = asyncio.ensure_future(too_long(limit))
    await asyncio.sleep(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task not in limit


@virtual
async def test_who_is_cancelled_by_another_and_late_is_cancelled() -> None:
    limit = RunLimit(LIMIT)
    task = asyncio.ensure_future(too_long(limit))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(10, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual
async def test_a_fault_is_no_timeout() -> None:
    with pytest.raises(KeyError), RunLimit(LIMIT):
        raise KeyError
