"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from llmkube.clock import Now


class FakeClock:
    """Wall, monotonic and boot clocks that move together, or apart where a test says so."""

    def __init__(self, wall: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self.wall = wall
        self.mono = timedelta(hours=1)
        self.boot = timedelta(hours=2)

    def now(self) -> Now:
        return Now(self.wall, self.mono)

    def monotonic(self) -> timedelta:
        return self.mono

    def boottime(self) -> timedelta:
        return self.boot

    def advance(self, delta: timedelta) -> None:
        """Let time pass on every clock."""
        self.wall += delta
        self.mono += delta
        self.boot += delta

    def step_wall(self, delta: timedelta) -> None:
        """Step the wall clock alone, as an administrator or NTP would."""
        self.wall += delta

    def suspend(self, delta: timedelta) -> None:
        """The machine sleeps: the monotonic clock stands still, the others go on."""
        self.wall += delta
        self.boot += delta
