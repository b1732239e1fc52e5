"""Pace: how often a half-trusted sender can make us look.

A Mac may change its report with every request that the API server takes from it, a hundred a
second, and each look at a report costs milliseconds. The first change is looked at at once; of
those that follow closer than `every`, only what they come to is. So a Mac that changes its report
now and then waits for nothing, and one that never stops takes no time from the others.

Neighbour: `verification`, whose Lease handler asks here. What a look then makes of a new report is
`rules.report_intake`'s.
"""

from __future__ import annotations

from datetime import timedelta


class Pace:
    """When each key may be looked at next. All methods belong to the event loop's thread."""

    __slots__ = ("_every", "_last")

    def __init__(self, every: timedelta) -> None:
        self._every = every
        self._last: dict[str, timedelta] = {}

    def next(self, key: str, now: timedelta) -> timedelta | None:
        """The monotonic instant of the look that a change at `now` asks for; None: at once."""
        last = self._last.get(key)
        if last is not None and now < last + self._every:
            return last + self._every
        self._last[key] = now
        return None

    def forget(self, key: str) -> None:
        """The key is gone."""
        self._last.pop(key, None)
