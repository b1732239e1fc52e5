"""Which settings make sense together: pure checks of a whole `Tuning`, told to whoever wrote it.

A value that cannot work is refused at the start, with its name and what it has to be, instead of
showing up as a queue that spins or a stop that is killed. Read `tuning` for what the settings are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

from llmkube.clock import ZERO

Settings = Mapping[str, Any]

LONGEST = timedelta(days=3650)
"""An instant so far ahead can still be calculated with."""

MAY_BE_ZERO = frozenset(
    {
        "reflector.short_watch",
        "reflector.catch_up",
        "heartbeat.mirror_after",
        "heartbeat.write_interval",
        "heartbeat.trust.changes",
        "heartbeat.trust.tolerance",
        "phase.trust.changes",
        "phase.trust.tolerance",
        "checks.reverify_jitter",
        "checks.intake",
        "life.coalescing",
        "life.drain",
        "life.last_events",
    }
)
"""All others would make something spin, or never happen."""

AT_MOST = (
    ("reflector.shortest_server_timeout", "reflector.longest_server_timeout"),
    ("reflector.backoff_base", "reflector.backoff_cap"),
    ("queue.backoff_base", "queue.backoff_cap"),
    ("heartbeat.least_timeout", "heartbeat.most_timeout"),
    ("checks.backoff", "checks.backoff_cap"),
)
SHORTER = (
    # Else the work is still being stopped when the process gives up on it.
    (("life.drain", "life.last_events"), "leader.stop_timeout"),
    # Else a reflector that only waits for its turn looks dead. Its jitter doubles a pause.
    (("reflector.longest_wait",), "life.no_attempt_limit"),
    (("reflector.backoff_cap", "reflector.backoff_cap"), "life.no_attempt_limit"),
    (("phase.stale_after",), "phase.unreachable_after"),
    (("checks.connect_timeout", "checks.handshake_timeout"), "checks.timeout"),
    # Else what is being gathered looks like silence.
    (("life.coalescing",), "reflector.inactivity_timeout"),
    # Else a verified Mac loses its True before it is checked again.
    (("checks.reverify",), "checks.true_lasts"),
)


def settings_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting in a dataclass of dataclasses, by its dotted name."""
    for one in fields(value):
        found = getattr(value, one.name)
        if is_dataclass(found):
            yield from settings_of(found, f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, found


def nonsense(settings: Settings) -> str | None:
    """The first thing that cannot work, as a sentence; None if all is well."""
    return next(chain(_out_of_range(settings), _out_of_order(settings)), None)


def _out_of_range(settings: Settings) -> Iterator[str]:
    for name, value in settings.items():
        zero: Any = ZERO if isinstance(value, timedelta) else 0
        if isinstance(value, timedelta) and value > LONGEST:
            yield f"{name} must not exceed {LONGEST.days} days"
        if value < zero:
            yield f"{name} must not be negative"
        if value == zero and name not in MAY_BE_ZERO:
            yield f"{name} must be more than nothing"


def _out_of_order(settings: Settings) -> Iterator[str]:
    for less, more in AT_MOST:
        if settings[less] > settings[more]:
            yield f"{less} must not exceed {more}"
    for parts, whole in SHORTER:
        first, *others = (settings[part] for part in parts)
        if sum(others, first) >= settings[whole]:
            yield f"{_sum(parts)} must be less than {whole}"


def _sum(parts: tuple[str, ...]) -> str:
    return f"twice {parts[0]}" if parts[0] == parts[-1] and parts[1:] else " and ".join(parts)
