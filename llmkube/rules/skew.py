"""Clock skew: what to say when a sender's clock disagrees with ours.

`liveness` measures skew at trusted changes and lives with it; here it is put into words. The word
for a message carries no figure, because a figure would change by itself; the Event carries it.
"""

from __future__ import annotations

from datetime import timedelta

from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO
from llmkube.rules.decision import EventNote, EventType
from llmkube.rules.liveness import Record, Trust, skewed


def skew_word(record: Record | None, trust: Trust, whose: str) -> str:
    """A sentence for a condition's message, beginning with a space; "" without skew.

    `whose` names the clock, for example "The Mac's clock".
    """
    if record is None or record.skew is None or not skewed(record, trust):
        return ""
    limit = trust.skew_limit.total_seconds()
    return (
        f" {whose} is more than {limit:g} s {_side(record.skew)} the controller's: set it by NTP."
    )


def skew_event(record: Record | None, trust: Trust, whose: str) -> EventNote | None:
    """The warning for a clock that disagrees, or None."""
    if record is None or record.skew is None or not skewed(record, trust):
        return None
    seconds = abs(record.skew).total_seconds()
    return EventNote(
        EventType.WARNING,
        "ClockSkew",
        "ObserveHeartbeat",
        f"{whose} is about {seconds:.0f} s {_side(record.skew)} the controller's (it wrote "
        f"{format_micro_time(record.stamp)}). Heartbeats count from when they are seen; set the "
        "clock by NTP.",
    )


def _side(skew: timedelta) -> str:
    return "ahead of" if skew > ZERO else "behind"
