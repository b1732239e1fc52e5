"""Slots: how many checks run at once in the cluster, and whose turn is next.

A slot is taken by every check whose pod the caches know to be out there (whoever started it) and by
every start of our own that they do not show yet. Pods that no MetalNode names count for nothing: a
stranger with our label cannot use up our slots.

Waiting is fair by the status alone, so a new leader goes on where the old one stopped: Macs that
never had a check first, then the one whose last start is longest ago. Whoever was just served, for
whatever reason, goes to the end of the line; a Mac that flaps starves nobody.

A key that is told to look and does not want its slot any more withdraws, and the next one is told.
Neighbour: `verification`, whose reconciles ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from heapq import heapify, heappop, heappush
from typing import Protocol


class RunningChecks(Protocol):
    """What the caches know of checks."""

    def running(self) -> set[str]:
        """Keys of MetalNodes with a pod out there that their podUID names."""

    def shows(self, key: str, version: str) -> bool:
        """Whether the cached MetalNode is as new as this resourceVersion, or gone."""


Turn = tuple[bool, timedelta, int]
_STALE_ENTRIES = 64
"""So many entries of keys that wait no more are tolerated before the line is rebuilt."""


class CheckSlots:
    """The slots of the cluster. All methods belong to the event loop's thread.

    `tell` asks for a reconcile of a key whose turn it is.
    """

    def __init__(self, limit: int, checks: RunningChecks, tell: Callable[[str], None]) -> None:
        self._limit = limit
        self._checks = checks
        self._tell = tell
        self._starting: set[str] = set()
        self._started: dict[str, str] = {}
        self._ending: set[str] = set()
        self._waiting: dict[str, Turn] = {}
        self._line: list[tuple[Turn, str]] = []  # a heap; entries that are not waiting are skipped
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """Macs whose check is due and has no slot."""
        return len(self._waiting)

    def in_use(self) -> int:
        """Checks that run or are being started."""
        # What the cache shows is counted from the cache: it also knows when the check is over.
        for key in [k for k, version in self._started.items() if self._checks.shows(k, version)]:
            del self._started[key]
        held = self._starting | self._ending | self._started.keys()
        return len(self._checks.running() | held)

    def request(self, key: str, last_start: timedelta | None) -> bool:
        """Ask for a slot: True if the key has one now, else it waits and is told.

        `last_start` is the monotonic instant of its last start, None if it never had one. To ask
        again, with a slot or without, does no harm.
        """
        if key in self._starting:
            return True
        self._wait(key, last_start)
        first = self._next()
        if key not in first:
            for other in first:  # whoever is before us must know that there is room
                self._tell(other)
            return False
        del self._waiting[key]
        self._starting.add(key)
        return True

    def started(self, key: str, version: str) -> None:
        """The start is complete, with a status of that resourceVersion; its slot is held until the
        cache shows it, and then by what the cache shows."""
        self._starting.discard(key)
        self._started[key] = version

    def ending(self, key: str) -> None:
        """The check of this key is over; its slot is held until its pod is deleted (`ended`)."""
        self._ending.add(key)

    def ended(self, key: str) -> None:
        """Nothing is left of the key's last check. Harmless if there was nothing."""
        if key in self._ending:
            self._ending.discard(key)
            self.look()

    def withdraw(self, key: str) -> None:
        """The key wants no slot: its start failed, or its check is not due any more."""
        had = key in self._starting or key in self._waiting
        self._starting.discard(key)
        self._waiting.pop(key, None)
        if had:
            self.look()

    def look(self) -> None:
        """A slot may be free: tell those whose turn it is."""
        for key in self._next():
            self._tell(key)

    def _wait(self, key: str, last_start: timedelta | None) -> None:
        known = self._waiting.get(key)
        arrival = self._arrive() if known is None else known[2]
        turn = (last_start is not None, last_start or timedelta(0), arrival)
        if turn == known:
            return
        self._waiting[key] = turn
        heappush(self._line, (turn, key))
        if len(self._line) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._line = [entry for entry in self._line if self._waits(entry)]
            heapify(self._line)

    def _waits(self, entry: tuple[Turn, str]) -> bool:
        turn, key = entry
        return self._waiting.get(key) == turn

    def _next(self) -> list[str]:
        """The keys whose turn it is: the first of the line, as many as there is room for."""
        if not self._waiting:
            return []
        free = self._limit - self.in_use()
        first: list[tuple[Turn, str]] = []
        while len(first) < free and self._line:
            entry = heappop(self._line)
            if self._waits(entry):
                first.append(entry)
        for entry in first:
            heappush(self._line, entry)
        return [key for _, key in first]

    def _arrive(self) -> int:
        self._arrivals += 1
        return self._arrivals
