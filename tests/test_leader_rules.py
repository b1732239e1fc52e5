"""Leader election without a loop: who may take a Lease, and what is written into it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmkube.clock import Now
from llmkube.leader import (
    LeaderSettings,
    Observation,
    Record,
    claimed,
    process_identity,
    released,
)

NOW = Now(datetime(2026, 1, 1, 12, tzinfo=UTC), timedelta(hours=1))
SECOND = timedelta(seconds=1)
OTHER = Record("other", 15 * SECOND, "2026-01-01T00:00:00.000000Z", 3)


@pytest.mark.parametrize(
    ("record", "after", "free"),
    [
        pytest.param(OTHER, 0, False, id="held, seen just now, whatever its stamp says"),
        pytest.param(OTHER, 15, False, id="held, the duration is not over yet"),
        pytest.param(OTHER, 15.001, True, id="the duration is over"),
        pytest.param(Record("", SECOND, "x", 3), 0, True, id="released"),
        pytest.param(Record("me", 15 * SECOND, "x", 3), 0, True, id="held by myself"),
        pytest.param(Record("other", 60 * SECOND, "x", 3), 59, False, id="its own duration counts"),
    ],
)
def test_who_may_take_the_lease(record: Record, after: float, free: bool) -> None:
    observed = Observation()
    observed.see(record, NOW.mono)
    observed.see(record, NOW.mono + after / 2 * SECOND)  # seen again unchanged: no sign of life
    assert observed.is_free("me", NOW.mono + after * SECOND) is free


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"renewed": "2026-01-01T00:00:01.000000Z"}, id="renewed"),
        pytest.param(
            {"renewed": "1999-01-01T00:00:00.000000Z"}, id="renewed with a clock set back"
        ),
        pytest.param({"holder": "third"}, id="taken by a third"),
        pytest.param({"transitions": 4}, id="taken and lost again"),
    ],
)
def test_any_change_is_a_sign_of_life(change: dict[str, Any]) -> None:
    observed = Observation()
    observed.see(OTHER, NOW.mono)
    values = {
        name: getattr(OTHER, name) for name in ("holder", "duration", "renewed", "transitions")
    }
    observed.see(Record(**{**values, **change}), NOW.mono + 14 * SECOND)
    assert not observed.is_free("me", NOW.mono + 16 * SECOND)


def test_a_new_lease_is_claimed_without_a_transition() -> None:
    lease = claimed({"metadata": {"name": "l"}}, "me", NOW, LeaderSettings())
    assert lease["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T12:00:00.000000Z",
        "renewTime": "2026-01-01T12:00:00.000000Z",
        "leaseTransitions": 0,
    }


def test_a_takeover_counts_and_a_renewal_does_not() -> None:
    taken = claimed(
        {
            "metadata": {"resourceVersion": "7"},
            "spec": {"holderIdentity": "x", "leaseTransitions": 3},
        },
        "me",
        NOW,
        LeaderSettings(),
    )
    assert taken["spec"]["leaseTransitions"] == 4
    assert taken["metadata"]["resourceVersion"] == "7", "the write depends on what was seen"
    later = Now(NOW.wall + timedelta(microseconds=1), NOW.mono)
    renewed = claimed(taken, "me", later, LeaderSettings())
    assert renewed["spec"] == taken["spec"] | {"renewTime": "2026-01-01T12:00:00.000001Z"}


def test_a_released_lease_can_be_taken_at_once() -> None:
    lease = released(claimed({}, "me", NOW, LeaderSettings()), NOW)
    assert lease["spec"]["holderIdentity"] == ""
    assert lease["spec"]["leaseDurationSeconds"] == 1
    observed = Observation()
    observed.see(Record.of(lease), NOW.mono)
    assert observed.is_free("next", NOW.mono)


@pytest.mark.parametrize(
    "lease",
    [
        {},
        {"spec": None},
        {"spec": {"leaseDurationSeconds": "15", "leaseTransitions": None, "holderIdentity": None}},
    ],
)
def test_nonsense_in_a_lease_reads_as_absent(lease: dict[str, Any]) -> None:
    assert Record.of(lease) == Record("", timedelta(0), "", 0)


def test_durations_are_written_in_whole_seconds_and_never_too_short() -> None:
    settings = LeaderSettings(timedelta(seconds=2.5), timedelta(seconds=2), timedelta(seconds=1))
    assert claimed({}, "me", NOW, settings)["spec"]["leaseDurationSeconds"] == 3


@pytest.mark.parametrize(
    ("lease", "deadline", "retry"),
    [(10, 10, 2), (15, 10, 9), (15, 10, 0), (15, 2, 2)],
)
def test_settings_that_cannot_work_are_refused(lease: int, deadline: int, retry: int) -> None:
    with pytest.raises(ValueError, match="must"):
        LeaderSettings(lease * SECOND, deadline * SECOND, retry * SECOND)


def test_an_identity_names_the_host_and_is_unique() -> None:
    one, other = process_identity(), process_identity()
    assert one != other
    assert re.fullmatch(r".+_[0-9a-f-]{36}", one)
