"""The work queue: what `Schedule` decides, awaited.

One queue per controller. Informer handlers add keys, workers take them, reconcilers ask to be
woken. A waiter is only ever *told to look*, never handed a key: a worker that is cancelled at that
moment passes the word on, and no key is lost (controller-runtime#3239, #3538). However many
deadlines are ahead, the event loop holds one timer, for the earliest.

All methods but `get` are synchronous and cheap; all belong to the event loop's thread.
Read `worker` next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta

from llmkube.clock import ZERO, Clock
from llmkube.informers.schedule import Priority, Schedule
from llmkube.informers.telemetry import SILENT, QueueMetrics

BASE = timedelta(milliseconds=5)
CAP = timedelta(seconds=1000)
_SHORTEST_TIMER = timedelta(milliseconds=1)  # uvloop's grain; anything shorter would spin


class QueueShutDown(Exception):
    """The queue is shut down and empty: a worker that gets this ends."""


class WorkQueue:
    """A queue of keys without duplicates, with deadlines, back-off and two priorities.

    `base` and `cap` bound the back-off of `add_rate_limited`.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        metrics: QueueMetrics = SILENT,
        *,
        base: timedelta = BASE,
        cap: timedelta = CAP,
    ) -> None:
        self.name = name
        self._clock = clock
        self._metrics = metrics
        self._cap = cap
        self._schedule = Schedule(base, cap)
        self._paused = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = ZERO
        metrics.observe_queue(
            self.__len__, lambda: self._schedule.unfinished(self._clock.monotonic())
        )

    def __len__(self) -> int:
        """Keys that want a run now."""
        return len(self._schedule)

    # Adding -------------------------------------------------------------------------------------

    def add(self, key: str, *, initial: bool = False) -> None:
        """Ask for a run of `key`; `initial` keys let all others go first."""
        if self._paused:
            return
        priority = Priority.INITIAL if initial else Priority.LIVE
        if self._schedule.add(key, self._clock.monotonic(), priority):
            self._added()

    def add_at(self, key: str, mono: timedelta) -> None:
        """Ask for a run at that monotonic instant. Of several instants the earliest wins.

        What was asked for cannot be postponed: let it fire, look again, and re-arm.
        """
        if self._paused:
            return
        now = self._clock.monotonic()
        if self._schedule.add_at(key, mono, now):  # it has passed just now
            self._added()
        else:
            self._set_timer(now)

    def add_rate_limited(self, key: str, *, at_least: timedelta = ZERO) -> timedelta:
        """Ask for a run after the key's back-off, `at_least` later; return the delay."""
        if self._paused:
            return ZERO
        now = self._clock.monotonic()
        delay = self._schedule.add_failed(key, now, at_least=at_least)
        self._metrics.retried()
        self._set_timer(now)
        return delay

    def add_after_cap(self, key: str) -> timedelta:
        """Ask for a run after the longest back-off there is; return the delay.

        For what a retry is unlikely to mend: it must not be forgotten all the same.
        """
        self.add_at(key, self._clock.monotonic() + self._cap)
        return self._cap

    def forget(self, key: str) -> None:
        """End the key's back-off: it succeeded, a retry would not help, or its object is gone."""
        self._schedule.forget(key)

    def failures(self, key: str) -> int:
        """How many times in a row the key has been rate limited."""
        return self._schedule.failures(key)

    # Following ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Nobody takes keys: forget all that wait, with their deadlines and failures, and ignore
        what is added, so that a follower's queue neither grows nor counts as late.

        Call it when all workers have ended. Whoever calls `resume` adds in the same step every
        key that there is: that makes up for all that was ignored.
        """
        self._paused = True
        self._schedule.clear()
        self._stop_timer()

    def resume(self) -> None:
        """Workers begin: take keys again."""
        self._paused = False

    # Taking -------------------------------------------------------------------------------------

    async def get(self) -> str:
        """The next key, which the caller must give back with `done`.

        Raises QueueShutDown once the queue is shut down and nothing is ready.
        """
        while True:
            now = self._clock.monotonic()
            if self._timer is not None and self._timer_due <= now:
                self._look(now)  # the event loop is late
            taken = self._schedule.take(now)
            if taken is not None:
                self._metrics.waited(taken.waited)
                return taken.key
            if self._schedule.closed:
                raise QueueShutDown(self.name)
            await self._wait()

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake()  # we were told to look and shall not: tell another
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def done(self, key: str) -> timedelta:
        """The worker has finished with `key`, whatever came of it; return how long it took."""
        duration, again = self._schedule.done(key, self._clock.monotonic())
        self._metrics.worked(duration)
        if again:
            self._wake()
        return duration

    def shut_down(self) -> None:
        """Refuse new keys and forget deadlines; workers drain what is ready, then end."""
        self._schedule.close()
        self._stop_timer()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    # Waking -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the clock now. For tests whose clock moves by hand."""
        self._look(self._clock.monotonic())

    def _added(self) -> None:
        self._metrics.added()
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _look(self, now: timedelta) -> None:
        """Make ready what is due."""
        for _ in range(self._schedule.release(now)):
            self._added()
        self._set_timer(now)

    def _set_timer(self, now: timedelta) -> None:
        """Keep the one timer at the earliest deadline, or before."""
        due = self._schedule.next_due()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return  # a timer that fires too early only looks again
        if self._timer is not None:
            self._timer.cancel()
        delay = max(due - now, _SHORTEST_TIMER)
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(delay.total_seconds(), self._fire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._look(self._clock.monotonic())
