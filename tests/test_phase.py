"""Phases of edge clusters: the rule as a table, the bounds inclusive, and its properties."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmkube.api.cached import (
    CachedFederatedCluster,
    CachedFederatedClusterSpec,
    CachedFederatedClusterStatus,
    Meta,
)
from llmkube.api.names import Phase
from llmkube.clock import Now
from llmkube.rules.calm import Sight
from llmkube.rules.decision import EventType
from llmkube.rules.liveness import INSTANT, Record
from llmkube.rules.phase import PhaseFacts, PhaseSettings, decide_phase

SETTINGS = PhaseSettings()
START = datetime(2026, 1, 1, tzinfo=UTC)
SEEN = timedelta(days=3)
INTERVAL = timedelta(seconds=30)
LONG_AGO = Sight().regained(timedelta(0))
"""A watch that has been up for three days."""


def record(*, period: timedelta = INTERVAL, reference: timedelta = SEEN) -> Record:
    return Record("u1", START, period, seen=SEEN, reference=reference)


def facts(
    phase: str | None = None,
    *,
    seen: Record | None,
    interval: int | None = None,
    sight: Sight = LONG_AGO,
) -> PhaseFacts:
    cluster = CachedFederatedCluster(
        metadata=Meta(name="site", uid="u1"),
        spec=CachedFederatedClusterSpec(heartbeat_interval_seconds=interval),
        status=CachedFederatedClusterStatus(phase=phase),
    )
    return PhaseFacts(cluster, seen, sight, skew_announced=False)


def after(age: timedelta) -> Now:
    return Now(START + age, SEEN + age)


def phase_of(known: PhaseFacts, now: Now) -> str:
    status = decide_phase(known, now, SETTINGS).status
    assert status is not None
    assert list(status) == ["phase"]
    return str(status["phase"])


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        pytest.param(timedelta(0), "Connected", id="a heartbeat just now"),
        pytest.param(3 * INTERVAL, "Connected", id="at 3 intervals: inclusive"),
        pytest.param(3 * INTERVAL + INSTANT, "Stale", id="after 3 intervals"),
        pytest.param(10 * INTERVAL, "Stale", id="at 10 intervals: inclusive"),
        pytest.param(10 * INTERVAL + INSTANT, "Unreachable", id="after 10 intervals"),
    ],
)
@pytest.mark.parametrize("was", [None, "Connected", "Stale", "Unreachable", "Lost"])
def test_phase_by_age(age: timedelta, expected: str, was: str | None) -> None:
    assert phase_of(facts(was, seen=record()), after(age)) == expected


@pytest.mark.parametrize("was", [None, "Connected", "Unreachable"])
def test_no_heartbeat_is_unreachable(was: str | None) -> None:
    decision = decide_phase(facts(was, seen=None), after(timedelta(0)), SETTINGS)
    assert decision.status == {"phase": "Unreachable"}
    assert decision.wake_at is None


@pytest.mark.parametrize(
    ("age", "wake"),
    [
        pytest.param(INTERVAL, 3 * INTERVAL + INSTANT, id="a Connected site at 3 intervals"),
        pytest.param(5 * INTERVAL, 10 * INTERVAL + INSTANT, id="a Stale site at 10"),
        pytest.param(11 * INTERVAL, None, id="an Unreachable site never"),
    ],
)
def test_wakes_exactly_at_each_deadline(age: timedelta, wake: timedelta | None) -> None:
    decision = decide_phase(facts("Connected", seen=record()), after(age), SETTINGS)
    assert decision.wake_at == (None if wake is None else SEEN + wake)


@pytest.mark.parametrize(
    ("was", "age", "live"),
    [
        ("Connected", 5 * INTERVAL, True),
        ("Stale", 11 * INTERVAL, True),
        ("Stale", INTERVAL, False),
        ("Connected", INTERVAL, False),
        (None, 11 * INTERVAL, False),
    ],
    ids=["to Stale", "to Unreachable", "back to Connected", "no change", "a first value"],
)
def test_only_a_demotion_is_confirmed_live(was: str | None, age: timedelta, live: bool) -> None:
    assert decide_phase(facts(was, seen=record()), after(age), SETTINGS).confirm_live is live


# Events ------------------------------------------------------------------------------------------
def test_a_change_names_both_phases_and_the_last_heartbeat() -> None:
    decision = decide_phase(facts("Connected", seen=record()), after(5 * INTERVAL), SETTINGS)
    (event,) = decision.events
    assert (event.type, event.reason) == (EventType.WARNING, "PhaseChanged")
    assert "from Connected to Stale" in event.note
    assert "2026-01-01T00:00:00Z" in event.note


def test_recovery_is_no_warning() -> None:
    decision = decide_phase(facts("Unreachable", seen=record()), after(INTERVAL), SETTINGS)
    assert [event.type for event in decision.events] == [EventType.NORMAL]


@pytest.mark.parametrize("was", [None, "Stale"], ids=["a first value", "no change"])
def test_nothing_to_announce(was: str | None) -> None:
    assert decide_phase(facts(was, seen=record()), after(5 * INTERVAL), SETTINGS).events == ()


def test_skew_is_announced_until_it_has_been() -> None:
    slow = replace(record(), skew=-timedelta(hours=1))
    known = facts("Connected", seen=slow)
    (event,) = decide_phase(known, after(INTERVAL), SETTINGS).events
    assert (event.type, event.reason) == (EventType.WARNING, "ClockSkew")
    assert "3600 s behind" in event.note
    told = replace(known, skew_announced=True)
    assert decide_phase(told, after(INTERVAL), SETTINGS).events == ()


# Intervals ---------------------------------------------------------------------------------------
def test_an_unset_interval_is_30_seconds() -> None:
    assert SETTINGS.interval(None) == INTERVAL


def test_a_shorter_interval_counts_from_the_next_push() -> None:
    pushed_at_300 = record(period=timedelta(seconds=300))
    known = facts("Connected", seen=pushed_at_300, interval=5)
    assert phase_of(known, after(timedelta(seconds=300))) == "Connected"
    assert phase_of(known, after(timedelta(seconds=901))) == "Stale"


def test_a_longer_interval_counts_at_once() -> None:
    known = facts("Stale", seen=record(period=timedelta(seconds=5)), interval=300)
    assert phase_of(known, after(timedelta(seconds=900))) == "Connected"


# Calm --------------------------------------------------------------------------------------------
JUST_STARTED = Sight().regained(SEEN)


@pytest.mark.parametrize(
    ("was", "age", "expected"),
    [
        pytest.param("Connected", 5 * INTERVAL, "Connected", id="Connected for 3 + 2 intervals"),
        pytest.param("Connected", 5 * INTERVAL + INSTANT, "Stale", id="then Stale at most"),
        pytest.param("Connected", 12 * INTERVAL, "Stale", id="Stale for 10 + 2 intervals"),
        pytest.param("Stale", 12 * INTERVAL, "Stale", id="a known Stale is held likewise"),
        pytest.param("Stale", 12 * INTERVAL + INSTANT, "Unreachable", id="then Unreachable"),
        pytest.param(None, 11 * INTERVAL, "Unreachable", id="a first value is not held back"),
    ],
)
def test_after_a_start_expiry_demotes_nothing_known(
    was: str | None, age: timedelta, expected: str
) -> None:
    dead = record(reference=SEEN - 11 * INTERVAL)
    assert phase_of(facts(was, seen=dead, sight=JUST_STARTED), after(age)) == expected


def test_while_the_watch_is_down_expiry_demotes_nothing_known() -> None:
    blind = LONG_AGO.lost(SEEN)
    decision = decide_phase(
        facts("Connected", seen=record(), sight=blind), after(1000 * INTERVAL), SETTINGS
    )
    assert decision.status == {"phase": "Connected"}
    assert decision.wake_at is None


def test_a_stamp_seen_moving_backwards_is_not_held_back() -> None:
    stepped = replace(record(reference=SEEN - timedelta(hours=1)), backwards=True)
    known = facts("Connected", seen=stepped, sight=JUST_STARTED)
    assert phase_of(known, after(timedelta(0))) == "Unreachable"


def test_a_stamp_from_the_future_at_first_sight_improves_nothing() -> None:
    future = replace(record(), improves=False)
    assert phase_of(facts("Stale", seen=future), after(INTERVAL)) == "Stale"
    assert phase_of(facts(None, seen=future), after(INTERVAL)) == "Unreachable"
    assert phase_of(facts("Connected", seen=future), after(INTERVAL)) == "Connected"


# Properties --------------------------------------------------------------------------------------
micros = st.integers(0, 2_000_000_000).map(lambda us: timedelta(microseconds=us))
records = st.none() | st.builds(
    lambda back, period, improves, backwards: Record(
        "u1",
        START,
        period + timedelta(seconds=1),
        seen=SEEN,
        reference=SEEN - back,
        improves=improves,
        backwards=backwards,
    ),
    micros,
    micros.map(lambda delta: delta / 20),
    st.booleans(),
    st.booleans(),
)
sights = st.just(LONG_AGO) | micros.map(lambda ago: Sight().regained(SEEN - ago))
phases = st.sampled_from([None, *Phase])
RANK = {"Connected": 0, "Stale": 1, "Unreachable": 2}


def settled(known: PhaseFacts, now: Now) -> tuple[PhaseFacts, str]:
    """What is known once the decision has been written."""
    phase = phase_of(known, now)
    status = CachedFederatedClusterStatus(phase=phase)
    cluster = CachedFederatedCluster(known.cluster.metadata, known.cluster.spec, status)
    return replace(known, cluster=cluster), phase


@given(records, sights, phases, micros, micros)
def test_silence_never_improves_a_phase(
    seen: Record | None, sight: Sight, was: Phase | None, age: timedelta, silence: timedelta
) -> None:
    known, before = settled(facts(was, seen=seen, sight=sight), after(age))
    assert RANK[phase_of(known, after(age + silence))] >= RANK[before]


@given(records, sights, phases, micros)
def test_the_wake_up_is_later_and_changes_the_decision(
    seen: Record | None, sight: Sight, was: Phase | None, age: timedelta
) -> None:
    now = after(age)
    known, phase = settled(facts(was, seen=seen, sight=sight), now)
    wake = decide_phase(known, now, SETTINGS).wake_at
    if wake is None:
        assert phase_of(known, after(age + timedelta(days=999))) == phase
        return
    assert wake > now.mono
    assert phase_of(known, after(wake - SEEN - INSTANT)) == phase
    assert phase_of(known, after(wake - SEEN)) != phase


@given(records, sights, phases, micros)
def test_deciding_again_changes_nothing(
    seen: Record | None, sight: Sight, was: Phase | None, age: timedelta
) -> None:
    known, phase = settled(facts(was, seen=seen, sight=sight), after(age))
    again = decide_phase(known, after(age), SETTINGS)
    assert again.status == {"phase": phase}
    assert again.events == ()
    assert not again.confirm_live


@given(records, sights, phases, micros, st.integers(-(10**11), 10**11))
def test_a_step_of_our_wall_clock_changes_nothing(
    seen: Record | None, sight: Sight, was: Phase | None, age: timedelta, step: int
) -> None:
    known, now = facts(was, seen=seen, sight=sight), after(age)
    stepped = now._replace(wall=now.wall + timedelta(microseconds=step))
    assert decide_phase(known, stepped, SETTINGS) == decide_phase(known, now, SETTINGS)
