"""AgentConnected and what is mirrored with it: every reason, every write, every word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmkube.api.cached import (
    CachedCapacity,
    CachedCondition,
    CachedMetalNode,
    CachedMetalNodeSpec,
    CachedMetalNodeStatus,
    Meta,
)
from llmkube.api.report import ReportedCapacity
from llmkube.api.times import format_time
from llmkube.clock import Now
from llmkube.rules.calm import FOREVER
from llmkube.rules.decision import Decision
from llmkube.rules.heartbeat import (
    Account,
    HeartbeatFacts,
    HeartbeatSettings,
    Mirror,
    decide_heartbeat,
)
from llmkube.rules.liveness import INSTANT, Record
from llmkube.rules.quantity import format_bytes

SETTINGS = HeartbeatSettings()
START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SEEN = timedelta(days=3)
TIMEOUT = timedelta(seconds=120)
MINUTE = timedelta(seconds=60)
LONG_AGO = "2025-12-06T00:00:00Z"


def beat(**changes: Any) -> Record:
    record = Record("lease", START, TIMEOUT, seen=SEEN, reference=SEEN)
    return replace(record, **changes)


def facts(
    connected: str | None = None,
    reason: str = "HeartbeatReceived",
    *,
    seen: Record | None,
    last: str | None = None,
    generation: int = 1,
    **changes: Any,
) -> HeartbeatFacts:
    condition = CachedCondition("AgentConnected", connected or "", reason, "", LONG_AGO, 1)
    node = CachedMetalNode(
        metadata=Meta(name="m1", namespace="macs", uid="u1", generation=generation),
        spec=CachedMetalNodeSpec(lease_name="m1-lease", service_account_name="m1-account"),
        status=CachedMetalNodeStatus(
            conditions=(condition,) if connected else (),
            last_heartbeat_time=last,
            agent_version="v0.1.0",
            capacity=CachedCapacity(chip="Apple M5 Max", memory_bytes=1 << 30),
        ),
    )
    known = HeartbeatFacts(
        node=node,
        lease_exists=True,
        record=seen,
        account=Account.PRESENT,
        mirror=None,
        calm_until=None,
        last_write=None,
        skew_announced=False,
    )
    return replace(known, **changes)


def after(age: timedelta) -> Now:
    return Now(START + age, SEEN + age)


def decide(known: HeartbeatFacts, age: timedelta = timedelta(0)) -> Decision:
    return decide_heartbeat(known, after(age), SETTINGS)


def condition(decision: Decision) -> dict[str, Any]:
    assert decision.status is not None
    (only,) = decision.status["conditions"]
    return dict(only)


# Reasons -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "age", "status", "reason"),
    [
        pytest.param(
            facts(seen=beat()), TIMEOUT, "True", "HeartbeatReceived", id="a renewal in time"
        ),
        pytest.param(
            facts(seen=beat()),
            TIMEOUT + INSTANT,
            "False",
            "HeartbeatExpired",
            id="the first instant after",
        ),
        pytest.param(
            facts(seen=None, lease_exists=False),
            timedelta(0),
            "False",
            "LeaseNotFound",
            id="no Lease",
        ),
        pytest.param(
            facts(seen=None), timedelta(0), "False", "NeverConnected", id="no renewTime, ever"
        ),
        pytest.param(
            facts(seen=None, last=LONG_AGO),
            timedelta(0),
            "False",
            "HeartbeatExpired",
            id="no renewTime any more",
        ),
        pytest.param(
            facts("True", seen=beat(), account=Account.MISSING),
            timedelta(0),
            "False",
            "ServiceAccountNotFound",
            id="no account, whatever still beats",
        ),
        pytest.param(
            facts("True", seen=None, lease_exists=False, account=Account.MISSING),
            timedelta(0),
            "False",
            "ServiceAccountNotFound",
            id="a missing account comes first",
        ),
    ],
)
def test_reason(known: HeartbeatFacts, age: timedelta, status: str, reason: str) -> None:
    found = condition(decide(known, age))
    assert (found["status"], found["reason"]) == (status, reason)
    assert found["observedGeneration"] == 1


def test_an_account_that_only_the_cache_lacks_is_confirmed_first() -> None:
    assert decide(facts("True", seen=beat(), account=Account.UNSEEN)).confirm_live


@pytest.mark.parametrize(
    ("known", "age", "live"),
    [
        (facts("True", seen=beat()), 2 * TIMEOUT, True),
        (facts("True", seen=None, lease_exists=False), MINUTE, True),
        (facts("False", "NeverConnected", seen=beat()), MINUTE, False),
        (facts(seen=beat()), 2 * TIMEOUT, False),
        (facts("True", seen=beat()), MINUTE, False),
    ],
    ids=["expiry", "a vanished Lease", "a promotion", "a first value", "no change"],
)
def test_only_a_demotion_is_confirmed_live(
    known: HeartbeatFacts, age: timedelta, live: bool
) -> None:
    assert decide(known, age).confirm_live is live


def test_wakes_at_the_first_instant_after_the_timeout() -> None:
    assert decide(facts("True", seen=beat(), last="2026-01-01T12:00:00Z")).wake_at == (
        SEEN + TIMEOUT + INSTANT
    )


# Lease durations ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("duration", "seconds"),
    [(None, 120), (1, 15), (15, 15), (120, 120), (600, 600), (601, 600), (2**31 - 1, 600)],
)
def test_lease_durations_are_clamped(duration: int | None, seconds: int) -> None:
    assert SETTINGS.timeout(duration) == timedelta(seconds=seconds)


def test_the_duration_that_came_with_the_renewal_counts() -> None:
    known = facts("True", seen=beat(period=timedelta(seconds=15)))
    assert condition(decide(known, timedelta(seconds=16)))["status"] == "False"


# Calm --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "status"),
    [
        pytest.param(facts("True", seen=beat()), None, id="expiry is held back"),
        pytest.param(facts("True", seen=None, last=LONG_AGO), None, id="so is a removed stamp"),
        pytest.param(facts(seen=beat()), "False", id="a first value is not"),
        pytest.param(
            facts("True", seen=None, lease_exists=False), "False", id="a vanished Lease is not"
        ),
        pytest.param(
            facts("True", seen=beat(), account=Account.MISSING),
            "False",
            id="a missing account is not",
        ),
    ],
)
def test_what_blindness_holds_back(known: HeartbeatFacts, status: str | None) -> None:
    decision = decide(replace(known, calm_until=FOREVER), 10 * TIMEOUT)
    if status is None:
        assert not decision.confirm_live
        assert decision.status is None or condition(decision)["status"] == "True"
    else:
        assert condition(decision)["status"] == status


# Writes ------------------------------------------------------------------------------------------
def steady(**changes: Any) -> HeartbeatFacts:
    """A connected Mac whose renewal at 12:00:00 has just been seen."""
    changes = {"seen": beat(), "last": "2026-01-01T11:59:30Z"} | changes
    return facts("True", **changes)


def ago(seconds: float) -> str:
    return format_time(START - timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("known", "writes"),
    [
        pytest.param(steady(last=ago(60)), False, id="60 s behind: not yet"),
        pytest.param(steady(last=ago(61)), True, id="more than 60 s behind"),
        pytest.param(steady(last=ago(-61)), True, id="ahead, since the Mac's clock stepped back"),
        pytest.param(steady(last=None), True, id="missing"),
        pytest.param(steady(last="yesterday"), True, id="not a time"),
        pytest.param(
            steady(last=ago(61), last_write=SEEN - MINUTE), True, id="the last write was 60 s ago"
        ),
        pytest.param(
            steady(last=ago(3600), last_write=SEEN - MINUTE + INSTANT),
            False,
            id="within 60 s of the last write, however fast the stamps move",
        ),
        pytest.param(
            steady(mirror=Mirror("v9", {})), False, id="another version is not worth a write"
        ),
        pytest.param(steady(generation=2), True, id="another generation of the spec"),
    ],
)
def test_when_to_write(known: HeartbeatFacts, writes: bool) -> None:
    assert (decide(known).status is not None) is writes


def test_a_postponed_write_wakes_when_it_is_allowed() -> None:
    known = steady(last=ago(3600), last_write=SEEN - timedelta(seconds=20))
    decision = decide(known)
    assert decision.status is None
    assert decision.wake_at == SEEN + timedelta(seconds=40)
    assert decide(known, timedelta(seconds=40)).status is not None


def test_a_change_of_agentconnected_is_written_at_once() -> None:
    known = facts("True", seen=beat(), last=ago(0), last_write=SEEN + TIMEOUT)
    assert condition(decide(known, TIMEOUT + INSTANT))["status"] == "False"


def test_each_write_carries_all_fields_of_this_owner() -> None:
    status = decide(steady(last=ago(61))).status
    assert status is not None
    assert status["lastHeartbeatTime"] == "2026-01-01T12:00:00Z"
    assert status["agentVersion"] == "v0.1.0"
    assert status["capacity"] == {"chip": "Apple M5 Max", "memoryBytes": 1 << 30}
    assert set(status) == {"conditions", "lastHeartbeatTime", "agentVersion", "capacity"}


def test_a_valid_report_is_mirrored_in_the_same_write() -> None:
    status = decide(steady(last=ago(61), mirror=Mirror("v2", {"chip": "Apple M6"}))).status
    assert status is not None
    assert status["agentVersion"] == "v2"
    assert status["capacity"] == {"chip": "Apple M6"}


def test_a_lost_lease_keeps_the_last_heartbeat() -> None:
    status = decide(facts("True", seen=None, last=LONG_AGO, lease_exists=False)).status
    assert status is not None
    assert status["lastHeartbeatTime"] == LONG_AGO


def test_transition_time_moves_with_the_status_only() -> None:
    assert condition(decide(steady(last=ago(61))))["lastTransitionTime"] == LONG_AGO
    ended = condition(decide(facts("True", seen=beat()), 2 * TIMEOUT))
    assert ended["lastTransitionTime"] == format_time(START + 2 * TIMEOUT)
    still = facts("False", "LeaseNotFound", seen=beat())
    assert condition(decide(still, 2 * TIMEOUT))["lastTransitionTime"] == LONG_AGO


# Words -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "age", "words"),
    [
        (facts(seen=beat()), 2 * TIMEOUT, ["m1-lease", "2026-01-01T12:00:00Z", "log"]),
        (facts(seen=None, lease_exists=False), MINUTE, ["metal token create m1 -n "]),
        (facts(seen=None), MINUTE, ["llmkube agent"]),
        (
            facts(seen=None, account=Account.MISSING),
            MINUTE,
            ["m1-account", "metal token create m1 -n "],
        ),
        (facts(seen=beat(improves=False)), MINUTE, ["ahead of the controller's clock", "NTP"]),
        (facts(seen=beat(skew=-timedelta(hours=2))), MINUTE, ["60 s behind", "NTP"]),
        (facts(seen=beat(skew=timedelta(hours=2))), MINUTE, ["60 s ahead of", "NTP"]),
    ],
    ids=["expired", "no Lease", "never", "no account", "from the future", "slow", "fast"],
)
def test_the_message_says_what_to_do(
    known: HeartbeatFacts, age: timedelta, words: list[str]
) -> None:
    message = condition(decide(known, age))["message"]
    assert [word for word in words if word not in message] == []


def test_messages_do_not_change_by_themselves() -> None:
    known = facts(seen=beat(skew=-timedelta(hours=2)))
    for age in (timedelta(0), 2 * TIMEOUT):
        later = condition(decide(known, age + timedelta(seconds=100)))
        assert condition(decide(known, age))["message"] == later["message"]


def test_events_mark_changes_not_first_values() -> None:
    assert decide(facts(seen=beat())).events == ()
    (event,) = decide(facts("True", seen=beat()), 2 * TIMEOUT).events
    assert (event.type, event.reason) == ("Warning", "HeartbeatExpired")
    (event,) = decide(facts("False", "HeartbeatExpired", seen=beat())).events
    assert (event.type, event.reason) == ("Normal", "HeartbeatReceived")


@pytest.mark.parametrize(
    ("was", "known", "told"),
    [
        ("NeverConnected", {"account": Account.MISSING}, True),
        ("HeartbeatExpired", {"lease_exists": False}, True),
        ("ServiceAccountNotFound", {"lease_exists": False}, False),
        ("LeaseNotFound", {}, False),
    ],
    ids=["revoked", "Lease lost", "registration: account made", "registration: Lease made"],
)
def test_another_reason_is_told_if_it_is_graver(
    was: str, known: dict[str, Any], told: bool
) -> None:
    decision = decide(facts("False", was, seen=None, **known))
    assert condition(decision)["reason"] != was
    assert [event.type for event in decision.events] == (["Warning"] if told else [])


def test_skew_is_announced_once() -> None:
    known = steady(seen=beat(skew=timedelta(hours=2)))
    (event,) = decide(known).events
    assert (event.type, event.reason) == ("Warning", "ClockSkew")
    assert "7200 s ahead" in event.note
    assert decide(replace(known, skew_announced=True)).events == ()


# Mirrors -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("count", "text"),
    [
        (137438953472, "128Gi"),
        (1 << 30, "1Gi"),
        ((1 << 30) + (1 << 20), "1025Mi"),
        (1 << 20, "1Mi"),
        ((1 << 20) + 1, "1048577"),
        (0, "0"),
        (2**63 - 1, "9223372036854775807"),
    ],
)
def test_bytes_as_an_exact_quantity(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_capacity_leaves_out_what_the_mac_could_not_find() -> None:
    reported = ReportedCapacity(chip="Apple M5 Max", memory_bytes=137438953472)
    mirror = Mirror.of_parts("v0.1.0", reported)
    assert mirror.capacity == {
        "chip": "Apple M5 Max",
        "memory": "128Gi",
        "memoryBytes": 137438953472,
    }


# Properties --------------------------------------------------------------------------------------
micros = st.integers(0, 700_000_000).map(lambda us: timedelta(microseconds=us))
known_facts = st.builds(
    facts,
    st.sampled_from([None, "True", "False"]),
    st.sampled_from(["HeartbeatReceived", "HeartbeatExpired", "LeaseNotFound"]),
    seen=st.none()
    | st.builds(
        lambda back, improves: beat(reference=SEEN - back, improves=improves),
        micros,
        st.booleans(),
    ),
    last=st.none() | st.integers(-200, 200).map(ago),
    lease_exists=st.booleans(),
    account=st.sampled_from([Account.PRESENT, Account.MISSING]),
    mirror=st.none() | st.just(Mirror("v2", {"chip": "x"})),
    calm_until=st.none() | micros.map(lambda delta: SEEN + delta) | st.just(FOREVER),
    last_write=st.none() | micros.map(lambda delta: SEEN - delta),
)


def written(known: HeartbeatFacts, decision: Decision, now: Now) -> HeartbeatFacts:
    """What is known once the decision has been carried out."""
    if decision.status is None:
        return known
    (wanted,) = decision.status["conditions"]
    status = CachedMetalNodeStatus(
        conditions=(
            CachedCondition(
                "AgentConnected",
                wanted["status"],
                wanted["reason"],
                wanted["message"],
                wanted["lastTransitionTime"],
                wanted["observedGeneration"],
            ),
        ),
        last_heartbeat_time=decision.status["lastHeartbeatTime"],
        agent_version=decision.status["agentVersion"],
        capacity=CachedCapacity(chip=(decision.status["capacity"] or {}).get("chip")),
    )
    node = CachedMetalNode(known.node.metadata, known.node.spec, status)
    return replace(known, node=node, last_write=now.mono)


def is_connected(known: HeartbeatFacts) -> bool:
    return known.was_connected


@given(known_facts, micros)
def test_deciding_again_changes_nothing(known: HeartbeatFacts, age: timedelta) -> None:
    now = after(age)
    settled = written(known, decide_heartbeat(known, now, SETTINGS), now)
    again = decide_heartbeat(settled, now, SETTINGS)
    assert again.status is None
    assert again.events == ()
    assert not again.confirm_live


@given(known_facts, micros, micros)
def test_silence_never_connects(known: HeartbeatFacts, age: timedelta, silence: timedelta) -> None:
    now, later = after(age), after(age + silence)
    settled = written(known, decide_heartbeat(known, now, SETTINGS), now)
    after_silence = written(settled, decide_heartbeat(settled, later, SETTINGS), later)
    assert is_connected(settled) or not is_connected(after_silence)


@given(known_facts, micros)
def test_the_wake_up_is_later_and_changes_the_decision(
    known: HeartbeatFacts, age: timedelta
) -> None:
    now = after(age)
    settled = written(known, decide_heartbeat(known, now, SETTINGS), now)
    wake = decide_heartbeat(settled, now, SETTINGS).wake_at
    if wake is None or settled.calm_until == FOREVER:  # nobody knows when sight returns
        return
    assert wake > now.mono
    before = decide_heartbeat(settled, after(wake - SEEN - INSTANT), SETTINGS)
    assert before.status is None
    assert decide_heartbeat(settled, after(wake - SEEN), SETTINGS).status is not None


@given(known_facts, micros, st.integers(-(10**11), 10**11))
def test_a_step_of_our_wall_clock_connects_and_disconnects_nobody(
    known: HeartbeatFacts, age: timedelta, step: int
) -> None:
    now = after(age)
    stepped = now._replace(wall=now.wall + timedelta(microseconds=step))
    one, other = (decide_heartbeat(known, at, SETTINGS) for at in (now, stepped))
    assert one.wake_at == other.wake_at
    assert (one.status is None) == (other.status is None)
    if one.status is not None and other.status is not None:
        assert condition(one)["status"] == condition(other)["status"]
