"""Workers: keys from a queue through a reconciler, and the retry policy in one place.

| what the reconciler did                 | what happens to the key                              |
|-----------------------------------------|------------------------------------------------------|
| returned `Outcome()`                    | its back-off is forgotten                            |
| returned `Outcome(wake_at=…)`           | forgotten, and run again at that instant             |
| raised `TerminalError`                  | counted, logged; run again at its `wake_at`, or      |
|                                         | after the longest back-off: it may have been mended  |
| raised an `ApiError`                    | run again after its back-off, or its `retry_after`   |
| raised anything else, or ran too long   | counted and logged with its traceback, then the same |

Nothing that a reconciler raises ends a worker. Cancelling `run_workers` lets the runs in hand end
within `drain`; the queue stays usable, so a later term of leadership goes on where this one ended.
The table is controller-runtime's (pkg/internal/controller). Read `guard` next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from llmkube.clock import ZERO
from llmkube.informers.queue import QueueShutDown, WorkQueue
from llmkube.informers.telemetry import SILENT, ReconcileMetrics
from llmkube.kube.errors import ApiError
from llmkube.kube.runlimit import RunLimit

DRAIN = timedelta(seconds=8)
RUN_LIMIT = timedelta(minutes=2)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """A run that ended well. `wake_at` (monotonic) asks for another at that instant."""

    wake_at: timedelta | None = None


DONE = Outcome()


class TerminalError(Exception):
    """A run that ended badly and would end so again until something changes.

    What changes may be nothing that we watch (a policy, a webhook), so the key is not given up:
    it comes back after the longest back-off, or at `wake_at` (monotonic) if that is sooner.
    """

    def __init__(self, why: str, *, wake_at: timedelta | None = None) -> None:
        super().__init__(why)
        self.wake_at = wake_at


class Log(Protocol):
    """The part of a structlog logger that workers need."""

    def warning(self, event: str, **kw: Any) -> Any: ...

    def error(self, event: str, **kw: Any) -> Any: ...

    def exception(self, event: str, **kw: Any) -> Any: ...


Reconcile = Callable[[str], Awaitable[Outcome]]


async def run_workers(
    queue: WorkQueue,
    reconcile: Reconcile,
    *,
    concurrency: int,
    log: Log,
    metrics: ReconcileMetrics = SILENT,
    drain: timedelta = DRAIN,
    run_limit: timedelta = RUN_LIMIT,
) -> None:
    """Work on the queue with `concurrency` workers until cancelled, or until it is shut down.

    `drain` bounds how long a cancellation waits for the runs in hand, `run_limit` each single run.
    """
    pool = _Pool(queue, reconcile, log, metrics, run_limit)
    metrics.workers(concurrency)
    async with asyncio.TaskGroup() as group:
        workers = [
            group.create_task(pool.work(), name=f"{queue.name}-worker-{n}")
            for n in range(concurrency)
        ]
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError:
            await pool.drain(workers, drain)
            raise
        finally:
            pool.close()


class _Pool:
    """What the workers of one queue share."""

    def __init__(
        self,
        queue: WorkQueue,
        reconcile: Reconcile,
        log: Log,
        metrics: ReconcileMetrics,
        run_limit: timedelta,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._log = log
        self._metrics = metrics
        self._busy = RunLimit(run_limit)
        self._draining = False

    async def work(self) -> None:
        """One worker: take a key, run it, give it back."""
        task = asyncio.current_task()
        assert task is not None
        while not self._draining:
            try:
                key = await self._queue.get()
            except QueueShutDown:
                return
            self._metrics.started()
            result: str | None = None
            try:
                result = await self._run(task, key)
            finally:
                duration = self._queue.done(key)
                if result is None:
                    self._metrics.abandoned()  # cancelled
                else:
                    self._metrics.finished(result, duration)

    async def drain(self, workers: list[asyncio.Task[None]], bound: timedelta) -> None:
        """Send the idle workers home and wait for the others, up to `bound`."""
        self._draining = True
        for worker in workers:
            if worker not in self._busy:
                worker.cancel()
        if busy := [worker for worker in workers if worker in self._busy]:
            await asyncio.wait(busy, timeout=bound.total_seconds())

    def close(self) -> None:
        """All workers have ended."""
        self._busy.close()

    async def _run(self, task: asyncio.Task[None], key: str) -> str:
        self._busy.begin(task)
        try:
            result = self._settle(key, await self._reconcile(key))
        except asyncio.CancelledError:
            if not self._busy.end(task):
                raise
            self._metrics.timed_out()
            self._panic(key, TimeoutError("the run took too long and was ended"))
        except Exception as error:  # isolated: a bug costs this key, not the controller
            self._busy.end(task)
            self._failed(key, error)
        else:
            self._busy.end(task)
            return result
        return "error"

    def _settle(self, key: str, outcome: Outcome) -> str:
        self._queue.forget(key)
        if outcome.wake_at is None:
            return "success"
        self._queue.add_at(key, outcome.wake_at)
        return "requeue_after"

    def _failed(self, key: str, error: Exception) -> None:
        match error:
            case TerminalError():
                self._give_up(key, error)
            case ApiError():
                self._retry(key, error)
            case _:
                self._metrics.panicked()
                self._panic(key, error)

    def _give_up(self, key: str, error: TerminalError) -> None:
        self._queue.forget(key)
        self._metrics.terminal_error()
        delay = self._queue.add_after_cap(key)
        if error.wake_at is not None:
            self._queue.add_at(key, error.wake_at)
        self._log.error(
            "reconcile failed until something is corrected",
            queue=self._queue.name,
            key=key,
            why=str(error),
            again_in=str(delay),
        )

    def _retry(self, key: str, error: ApiError) -> None:
        delay = self._queue.add_rate_limited(key, at_least=error.retry_after or ZERO)
        self._log.warning(
            "reconcile failed, trying again",
            queue=self._queue.name,
            key=key,
            why=f"{type(error).__name__}: {error.message}",
            again_in=str(delay),
        )

    def _panic(self, key: str, error: Exception) -> None:
        delay = self._queue.add_rate_limited(key)
        self._log.exception(
            "reconcile broke, trying again: this is a bug, please report it",
            queue=self._queue.name,
            key=key,
            why=f"{type(error).__name__}: {error}",
            again_in=str(delay),
        )
