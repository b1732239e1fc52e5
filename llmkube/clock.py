"""Time: the only module that reads a clock.

Everything else is handed a `Clock` and reads it once per decision, into a `Now`. Three clocks
serve three purposes, and mixing them up is how liveness checks go wrong:

* the *wall* clock is for instants that people and other machines read (status fields, Leases);
* the *monotonic* clock measures silence, so that a step of the wall clock expires nobody;
* the *boot* clock also runs while the machine is suspended: leadership is measured on it.

Monotonic and boot readings are `timedelta` since an arbitrary epoch: only differences mean
anything. Tests use `tests.support.clock.FakeClock`.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

ZERO = timedelta(0)


class Now(NamedTuple):
    """One reading of both clocks, taken together and passed to a pure decision."""

    wall: datetime
    mono: timedelta

    def mono_at(self, instant: datetime) -> timedelta:
        """The monotonic reading when the wall clock shows `instant`, if it does not step."""
        return self.mono + (instant - self.wall)

    def wall_at(self, mono: timedelta) -> datetime:
        """The wall-clock instant of a monotonic reading, if the wall clock does not step."""
        return self.wall + (mono - self.mono)


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> Now:
        """Both clocks, read together."""

    def monotonic(self) -> timedelta:
        """The monotonic clock alone, for those who only measure."""

    def boottime(self) -> timedelta:
        """A monotonic clock that also runs through suspend."""


_BOOT_CLOCK: int = (
    time.CLOCK_BOOTTIME
    if sys.platform == "linux"
    else time.CLOCK_MONOTONIC  # on macOS this one runs through sleep; time.monotonic() does not
)


class SystemClock:
    """The machine's clocks. The monotonic one is the clock of the asyncio event loop."""

    __slots__ = ()

    def now(self) -> Now:
        return Now(datetime.now(UTC), timedelta(seconds=time.monotonic()))

    def monotonic(self) -> timedelta:
        return timedelta(seconds=time.monotonic())

    def boottime(self) -> timedelta:
        return timedelta(seconds=time.clock_gettime(_BOOT_CLOCK))
