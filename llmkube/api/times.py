"""Timestamps as Kubernetes writes them: RFC 3339, in UTC.

Caches keep stamps as text, because most of them are compared for equality only; a rule that needs
an instant parses it here. A stamp that is no timestamp is no stamp: `parse_time` never raises.
Neighbour: `cached`, whose objects hold such texts.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

# `datetime.fromisoformat` takes much more than RFC 3339 (week dates, no separators, no zone).
_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
).fullmatch


def parse_time(text: str | None) -> datetime | None:
    """The instant, in UTC, that an RFC 3339 text with 0 to 9 fraction digits names.

    Digits beyond microseconds are cut off. None for None and for everything that is no instant.
    """
    if text is None or _RFC3339(text) is None:
        return None
    try:
        parsed = datetime.fromisoformat(text.upper())
        return parsed if parsed.tzinfo is UTC else parsed.astimezone(UTC)
    except (ValueError, OverflowError):  # the 30th of February, or year 1 east of Greenwich
        return None


def format_time(instant: datetime) -> str:
    """The instant as metav1.Time, cut to seconds: `2026-11-30T19:29:00Z`."""
    return _in_utc(instant).isoformat(timespec="seconds") + "Z"


def format_micro_time(instant: datetime) -> str:
    """The instant as metav1.MicroTime, which takes exactly six digits."""
    return _in_utc(instant).isoformat(timespec="microseconds") + "Z"


def _in_utc(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise ValueError("an instant needs a time zone")
    return instant.astimezone(UTC).replace(tzinfo=None)
