"""A Mac that never stops changing its report takes no time from the others."""

from __future__ import annotations

from datetime import timedelta

from llmkube.reconcilers.pace import Pace

SECOND = timedelta(seconds=1)


def looks(changes: list[timedelta]) -> list[timedelta]:
    """When a queue looks after changes at these instants: of several, the earliest wins."""
    pace, seen, due = Pace(SECOND), [], None
    for now in changes:
        if due is not None and due <= now:
            seen.append(due)
            due = None
        later = pace.next("macs/m1", now)
        if later is None:
            seen.append(now)
        else:
            due = later if due is None else min(due, later)
    return seen if due is None else [*seen, due]


def test_a_change_now_and_then_is_looked_at_at_once() -> None:
    changes = [SECOND * n for n in (5, 6, 20)]
    assert looks(changes) == changes


def test_a_hundred_changes_a_second_cost_two_looks_a_second_and_the_last_one_is_seen() -> None:
    changes = [timedelta(milliseconds=10 * n) for n in range(1000)]
    seen = looks(changes)
    assert len(seen) <= 2 * 10 + 1
    assert seen[-1] >= changes[-1]


def test_every_mac_has_its_own_pace_and_a_new_one_of_its_name_does_not_wait() -> None:
    pace = Pace(SECOND)
    assert pace.next("macs/m1", SECOND) is None
    assert pace.next("macs/m2", SECOND) is None
    assert pace.next("macs/m1", SECOND * 1.5) == SECOND * 2
    pace.forget("macs/m1")
    assert pace.next("macs/m1", SECOND * 1.5) is None
