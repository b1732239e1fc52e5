"""An event loop whose time jumps to the next timer instead of passing.

For code that waits but does no I/O: an hour of back-off takes a millisecond, and the order of
events is the same in every run.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar

from llmkube.clock import Now

T = TypeVar("T")
P = ParamSpec("P")
_START = datetime(2026, 1, 1, tzinfo=UTC)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if not self._ready:  # type: ignore[attr-defined]
            if not timers:
                raise AssertionError("everything waits, and nothing will ever happen")
            self._now = max(self._now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


class VirtualClock:
    """The clock of a VirtualLoop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> Now:
        mono = timedelta(seconds=self._loop.time())
        return Now(_START + mono, mono)

    def monotonic(self) -> timedelta:
        return timedelta(seconds=self._loop.time())

    def boottime(self) -> timedelta:
        return self.monotonic()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A decorator for an asynchronous test without I/O: it runs on virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def virtual_clock() -> VirtualClock:
    """The clock of the running virtual loop."""
    return VirtualClock(asyncio.get_running_loop())
