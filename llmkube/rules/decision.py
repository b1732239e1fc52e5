"""What a reconciler decides, as a value: nothing here acts.

Every rule module turns what was observed into a `Decision`; `reconcilers.shell` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


class EventNote(msgspec.Struct, frozen=True, gc=False):
    """An Event about the reconciled object, for people. `action` is what was done about it."""

    type: EventType
    reason: str
    action: str
    note: str


class Decision(msgspec.Struct, frozen=True, gc=False):
    """`status` is the complete set of the status fields that its owner owns, in JSON form, where
    None values and missing keys both mean "absent"; None: leave the status alone this time.

    `events` are raised once the status is written (or needed no write). `wake_at` is the monotonic
    instant at which the decision differs if nothing happens before. `confirm_live` says that this
    demotes: look at the live objects and decide once more before acting on it.
    """

    status: Mapping[str, Any] | None = None
    events: tuple[EventNote, ...] = ()
    wake_at: timedelta | None = None
    confirm_live: bool = False
