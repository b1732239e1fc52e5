"""The work queue's rules, without an event loop: which key runs next, and when.

Every method is told what time it is, so the rules can be tested on a clock that stands still.
What they promise, and tests/test_queue_rules.py checks for any script of calls:

* a key is never in two hands: between `take` and `done` it is not handed out again;
* an add while a key is being processed causes exactly one more run, and no add is lost;
* of several deadlines for one key the earliest wins, and only that one fires;
* live keys go before those of an initial list, first come first served within each;
* the depth is counted from the structure itself, so it cannot drift (controller-runtime#3060).

Read `queue` next: it adds the waiting.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from datetime import timedelta
from enum import IntEnum
from math import ceil, log2

import msgspec

from llmkube.clock import ZERO

_STALE_ENTRIES = 64
"""So many superseded heap entries are tolerated before the heap is rebuilt."""


class Priority(IntEnum):
    """Which line a key stands in; the smaller number is served first."""

    LIVE = 0
    INITIAL = 1


_IN_ORDER = tuple(Priority)


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A key that waits for its turn since `since` (monotonic)."""

    since: timedelta
    priority: Priority


class Taken(msgspec.Struct, frozen=True, gc=False):
    """A key handed to a worker, after it waited for `waited`."""

    key: str
    waited: timedelta


class Schedule:
    """Ready keys in two lines, keys in work, deadlines, and each key's failures in a row.

    `base` and `cap` bound the exponential back-off of a failing key.
    """

    __slots__ = (
        "_again",
        "_base",
        "_cap",
        "_due",
        "_failures",
        "_heap",
        "_max_exponent",
        "_ready",
        "_sequence",
        "_working",
        "closed",
    )

    def __init__(self, base: timedelta, cap: timedelta) -> None:
        if not ZERO < base <= cap:
            raise ValueError(f"back-off needs 0 < base <= cap, not base={base}, cap={cap}")
        self._base, self._cap = base, cap
        self._max_exponent = ceil(log2(cap / base))
        self._ready: tuple[OrderedDict[str, timedelta], ...] = tuple(
            OrderedDict() for _ in Priority
        )
        self._working: dict[str, Waiting] = {}
        self._again: dict[str, Waiting] = {}  # added while in work: runs once more afterwards
        self._due: dict[str, Waiting] = {}  # here `since` is the deadline
        self._heap: list[tuple[timedelta, int, str]] = []  # superseded entries are skipped
        self._sequence = 0
        self._failures: dict[str, int] = {}
        self.closed = False

    # Adding -------------------------------------------------------------------------------------

    def add(self, key: str, now: timedelta, priority: Priority = Priority.LIVE) -> bool:
        """Ask for a run of `key`; False if one was already due, or after `close`.

        A key that waits already keeps its place, unless the new priority is higher.
        """
        if self.closed:
            return False
        if key in self._working:
            return self._add_again(key, Waiting(now, priority))
        if key in self._ready[Priority.LIVE]:
            return False
        since = self._ready[Priority.INITIAL].get(key)
        if since is None:
            self._ready[priority][key] = now
            return True
        if priority is Priority.LIVE:
            del self._ready[Priority.INITIAL][key]
            self._ready[Priority.LIVE][key] = since
        return False

    def _add_again(self, key: str, new: Waiting) -> bool:
        old = self._again.get(key)
        if old is None:
            self._again[key] = new
        elif new.priority < old.priority:
            self._again[key] = Waiting(old.since, new.priority)
        return old is None

    def add_at(
        self, key: str, due: timedelta, now: timedelta, priority: Priority = Priority.LIVE
    ) -> bool:
        """Ask for a run at the monotonic instant `due`. An earlier deadline is kept.

        True if that is now, and made the key ready: what `add` returns.
        """
        if due <= now:
            return self.add(key, now, priority)
        if not self.closed:
            self._set_deadline(key, due, priority)
        return False

    def _set_deadline(self, key: str, due: timedelta, priority: Priority) -> None:
        old = self._due.get(key)
        if old is None:
            self._push(key, Waiting(due, priority))
        elif due < old.since:
            self._push(key, Waiting(due, min(priority, old.priority)))
        elif priority < old.priority:
            self._due[key] = Waiting(old.since, priority)

    def _push(self, key: str, deadline: Waiting) -> None:
        self._due[key] = deadline
        self._sequence += 1
        heapq.heappush(self._heap, (deadline.since, self._sequence, key))
        if len(self._heap) > 2 * len(self._due) + _STALE_ENTRIES:
            self._heap = [e for e in self._heap if self._is_current(e)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[timedelta, int, str]) -> bool:
        deadline = self._due.get(entry[2])
        return deadline is not None and deadline.since == entry[0]

    # Back-off -----------------------------------------------------------------------------------

    def add_failed(self, key: str, now: timedelta, *, at_least: timedelta = ZERO) -> timedelta:
        """Ask for a run after the key's back-off, or `at_least` later; return the delay.

        The run keeps the priority of the one that failed, so that a start which meets a broken API
        server does not get in the way of live keys afterwards.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # The exponent is clamped, not the result: 2^n of a large n overflows.
        factor: int = 2 ** min(failures, self._max_exponent)
        backoff = min(self._base * factor, self._cap)
        delay = max(backoff, at_least)
        run = self._working.get(key)
        self.add_at(key, now + delay, now, run.priority if run else Priority.LIVE)
        return delay

    def forget(self, key: str) -> None:
        """The key is well again, or gone: its back-off starts from the beginning."""
        self._failures.pop(key, None)

    def failures(self, key: str) -> int:
        """How many failures in a row the key has had."""
        return self._failures.get(key, 0)

    # Taking -------------------------------------------------------------------------------------

    def release(self, now: timedelta) -> int:
        """Make every key ready whose deadline has come; return how many."""
        released = 0
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                key = entry[2]
                released += self.add(key, now, self._due.pop(key).priority)
        return released

    def next_due(self) -> timedelta | None:
        """The earliest deadline, or None."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: timedelta) -> Taken | None:
        """Hand out the next ready key, or None. The caller owes a `done`."""
        for priority in _IN_ORDER:
            if line := self._ready[priority]:
                key, since = line.popitem(last=False)
                self._working[key] = Waiting(now, priority)
                return Taken(key, now - since)
        return None

    def done(self, key: str, now: timedelta) -> tuple[timedelta, bool]:
        """The worker has finished with `key`; return how long it took, and if it runs again.

        Raises KeyError if the key was not handed out.
        """
        started = self._working.pop(key).since
        again = self._again.pop(key, None)
        if again is not None:
            self._ready[again.priority][key] = again.since
        return now - started, again is not None

    def clear(self) -> None:
        """Forget every key that waits, and every failure. Keys in work stay until they are done."""
        for line in self._ready:
            line.clear()
        self._again.clear()
        self._due.clear()
        self._heap.clear()
        self._failures.clear()

    def close(self) -> None:
        """Refuse what is new and drop the deadlines; what is ready may still be taken."""
        self.closed = True
        self._due.clear()
        self._heap.clear()

    # Looking ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Keys that want a run now, those included that wait for their current run to end."""
        return len(self._again) + self.ready()

    def ready(self) -> int:
        """Keys that `take` could hand out now."""
        return sum(len(line) for line in self._ready)

    def waiting(self) -> int:
        """Keys with a deadline ahead."""
        return len(self._due)

    def working(self) -> list[str]:
        """Keys in some worker's hands."""
        return list(self._working)

    def unfinished(self, now: timedelta) -> tuple[timedelta, timedelta]:
        """How long the present runs have taken: their sum, and the longest."""
        # Scrapes ask from a thread: take the runs in one step, which no worker can get into.
        ages = [now - run.since for run in list(self._working.values())]
        return sum(ages, ZERO), max(ages, default=ZERO)
