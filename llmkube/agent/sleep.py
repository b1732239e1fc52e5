"""Noticing that the machine slept: one clock went on while the other stood still.

Timers stand still, too, so there is nothing to wait for but a short tick. `SleepWatch` is pure:
readings go in, the length of a sleep comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from llmkube.clock import ZERO, Clock


@dataclass(slots=True)
class SleepWatch:
    """Compares the boot clock, which runs through sleep, with the monotonic one."""

    threshold: timedelta
    _lead: timedelta | None = None
    """Boot clock minus monotonic clock at the last look; only its growth means anything."""

    def look(self, clock: Clock) -> timedelta:
        """How long the machine slept since the last look; zero if it did not."""
        lead = clock.boottime() - clock.monotonic()
        grown = lead - self._lead if self._lead is not None else ZERO
        self._lead = lead
        return grown if grown >= self.threshold else ZERO
