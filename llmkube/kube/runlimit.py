"""A bound on how long a request or a worker's run may take, with one timer for all of them.

`asyncio.timeout` around each run costs a timer each, which is a tenth of what a short reconcile
costs. All runs have the same limit, so the one that began first is the first to be late, and one
timer for it will do; while nothing runs there is none.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

_Task = asyncio.Task[Any]


def _current() -> _Task:
    task = asyncio.current_task()
    assert task is not None
    return task


class RunLimit:
    """Knows which tasks are in a run, and cancels those whose run exceeds `limit`.

    `with limit:` makes a run of the block, for the current task, and raises TimeoutError if it
    was late. A task is in one run of a limit at a time.
    """

    __slots__ = ("_began", "_late", "_limit", "_timer")

    def __init__(self, limit: timedelta) -> None:
        self._limit = limit.total_seconds()
        self._began: dict[_Task, float] = {}  # oldest first
        self._late: set[_Task] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, task: object) -> bool:
        """Is the task in a run?"""
        return task in self._began

    def __enter__(self) -> None:
        self.begin(_current())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.end(_current()) and kind is asyncio.CancelledError:
            raise TimeoutError from None

    def begin(self, task: _Task) -> None:
        """The task starts a run."""
        loop = asyncio.get_running_loop()
        self._began[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit, self._check)

    def end(self, task: _Task) -> bool:
        """The task's run is over. True if it was cancelled here, and by nobody else."""
        del self._began[task]
        if task not in self._late:
            return False
        self._late.discard(task)
        return task.uncancel() == 0

    def close(self) -> None:
        """No run will begin any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for task, began in self._began.items():
            if task in self._late:
                continue
            left = began + self._limit - loop.time()
            if left > 0:
                self._timer = loop.call_later(left, self._check)
                return
            self._late.add(task)
            task.cancel()
