"""Conditions as metav1.Condition has them, in the JSON form that a status apply carries.

One promise: `lastTransitionTime` moves only when `status` does, so that rebuilding an unchanged
condition yields the very same value and causes no write. Shared by the rules of both owners.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from llmkube.api.times import format_time, parse_time

MAX_MESSAGE = 32768
"""The CRD's limit, in characters."""


class ExistingCondition(Protocol):
    """The condition as the status has it now, for example a `CachedCondition`."""

    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def last_transition_time(self) -> str | None: ...


def build_condition(
    previous: ExistingCondition | None,
    kind: str,
    status: str,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> dict[str, str | int]:
    """The condition `kind` with these values, keeping `previous`' transition time if it applies.

    `generation` is the object's metadata.generation that the values were computed from.
    """
    return {
        "type": kind,
        "status": str(status),
        "reason": str(reason),
        "message": message[:MAX_MESSAGE],
        "lastTransitionTime": _transition_time(previous, status, now),
        "observedGeneration": generation,
    }


def _transition_time(previous: ExistingCondition | None, status: str, now: datetime) -> str:
    if previous is not None and previous.status == status:
        kept = previous.last_transition_time
        if kept is not None and parse_time(kept) is not None:
            return kept
    return format_time(now)


def turned(previous: ExistingCondition | None, status: str, reason: str) -> bool:
    """Whether this is a change that deserves an Event: another status or reason than before.

    A first value is no change.
    """
    return previous is not None and (previous.status, previous.reason) != (status, reason)
