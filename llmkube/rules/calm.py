"""Calm: when our own blindness, not the sender's silence, is why we hear nothing.

An outage of the API server or of the controller must not disconnect the fleet. So expiry demotes
nothing that was known before

* while the watch that carries the stamps is down, and
* for `timeout + slack` after a start, or after the watch was down longer than a third of the
  timeout (slack: the intervals that a slow clock needs to be trusted again).

What is not expiry is never held back: a first value, a stamp seen moving backwards, a vanished
Lease, a missing account. `liveness.judge` draws that line; this module only says until when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from llmkube.clock import ZERO

FOREVER = timedelta.max
"""Until the watch is back, and nobody knows when that is."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A blindness that is over: the monotonic instant of its end, and its length."""

    ended: timedelta
    length: timedelta


@dataclass(frozen=True, slots=True)
class Sight:
    """How well we have been seeing. Before the first start we are blind, and always were.

    `down_since` is None while the watch is up. `outages` holds, oldest first, those outages that
    no later one outlasted; the start is an outage of infinite length.
    """

    down_since: timedelta | None = ZERO
    outages: tuple[Outage, ...] = ()

    def lost(self, at: timedelta) -> Sight:
        """The watch went down, or is found to have been down since `at`."""
        return self if self.down_since is not None else replace(self, down_since=at)

    def regained(self, at: timedelta) -> Sight:
        """The watch is up."""
        if self.down_since is None:
            return self
        length = at - self.down_since if self.outages else FOREVER
        kept = tuple(outage for outage in self.outages if outage.length > length)
        return Sight(down_since=None, outages=(*kept, Outage(at, length)))

    def calm_until(self, timeout: timedelta, slack: timedelta) -> timedelta | None:
        """Up to and including which instant expiry after `timeout` is held back.

        FOREVER while the watch is down; None if nothing in the past holds it back. The instant
        may lie in the past.
        """
        if self.down_since is not None:
            return FOREVER
        ends = [o.ended for o in self.outages if o.length > timeout / 3]
        return max(ends) + timeout + slack if ends else None
