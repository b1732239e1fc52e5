"""The liveness rule, clause by clause, and what must hold whatever the clocks do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.clock import ZERO, Now
from llmkube.rules.liveness import (
    INSTANT,
    Record,
    Sighting,
    Trust,
    judge,
    observe,
    skewed,
)

MAC = Trust(changes=0)
SITE = Trust(changes=2)
START = datetime(2026, 1, 1, tzinfo=UTC)
TIMEOUT = timedelta(seconds=120)
HOUR = timedelta(hours=1)


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


class Sender:
    """A sender of stamps, its observer, and both their clocks."""

    def __init__(self, trust: Trust, *, ahead: timedelta = ZERO) -> None:
        self.trust = trust
        self.ahead = ahead
        self.now = Now(START, timedelta(days=3))
        self.record: Record | None = None
        self.uid = "u1"

    def wait(self, delta: timedelta) -> None:
        self.now = Now(self.now.wall + delta, self.now.mono + delta)

    def see(self, stamp: datetime | None, *, first: bool = False) -> Record | None:
        sighting = Sighting(self.uid, stamp, TIMEOUT, first)
        self.record = observe(self.record, sighting, self.now, self.trust)
        return self.record

    def push(self, *, lag: timedelta = ZERO, first: bool = False) -> Record | None:
        return self.see(self.now.wall + self.ahead - lag, first=first)

    def alive(self, *, known: bool = True, calm_until: timedelta | None = None) -> bool:
        return judge(self.record, TIMEOUT, self.now, known=known, calm_until=calm_until).alive


# Bounds ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("age", "alive"),
    [
        pytest.param(ZERO, True, id="just seen"),
        pytest.param(TIMEOUT, True, id="at the timeout: the bound is inclusive"),
        pytest.param(TIMEOUT + INSTANT, False, id="at the first instant after it"),
    ],
)
def test_alive_means_within_the_timeout(age: timedelta, alive: bool) -> None:
    sender = Sender(MAC)
    sender.push(first=True)
    sender.wait(age)
    assert sender.alive() is alive


def test_the_wake_up_is_the_first_instant_after_the_timeout() -> None:
    sender = Sender(MAC)
    sender.push(first=True)
    assert sender.record is not None
    verdict = judge(sender.record, TIMEOUT, sender.now, known=True, calm_until=None)
    assert verdict.wake_at == sender.record.reference + TIMEOUT + INSTANT


@pytest.mark.parametrize("trust", [MAC, SITE], ids=["a Mac", "a site"])
def test_no_stamp_was_ever_seen(trust: Trust) -> None:
    sender = Sender(trust)
    assert sender.see(None, first=True) is None
    assert not sender.alive()


# First sight -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lag", "alive"),
    [
        pytest.param(TIMEOUT, True, id="a stamp as old as the timeout is alive"),
        pytest.param(TIMEOUT + INSTANT, False, id="an older one is not, however fresh the sight"),
        pytest.param(-seconds(2), True, id="a stamp 2 s in the future improves"),
    ],
)
@pytest.mark.parametrize("trust", [MAC, SITE], ids=["a Mac", "a site"])
def test_first_sight_is_judged_by_the_stamp(trust: Trust, lag: timedelta, alive: bool) -> None:
    sender = Sender(trust)
    sender.push(lag=lag, first=True)
    assert sender.alive(known=False) is alive


def test_first_sight_of_a_stamp_from_the_future_improves_nothing() -> None:
    sender = Sender(MAC)
    sender.push(lag=-seconds(2) - INSTANT, first=True)
    assert not sender.alive(known=False)
    assert judge(sender.record, TIMEOUT, sender.now, known=False, calm_until=None).wake_at is None


def test_a_stamp_from_the_future_counts_from_when_it_was_seen() -> None:
    sender = Sender(MAC, ahead=HOUR)
    sender.push(first=True)
    sender.wait(TIMEOUT)
    assert sender.alive(known=True)
    sender.wait(INSTANT)
    assert not sender.alive(known=True)


@pytest.mark.parametrize(
    "restart",
    [
        pytest.param({"first": True}, id="a re-list after blindness"),
        pytest.param({"uid": "u2"}, id="a new UID"),
        pytest.param({"forget": True}, id="a first stamp, though seen to arrive"),
    ],
)
def test_what_is_first_sight_says_nothing_about_skew(restart: dict[str, object]) -> None:
    sender = Sender(MAC, ahead=-HOUR)
    if "forget" not in restart:
        sender.ahead = ZERO
        sender.push(first=True)
        sender.ahead = -HOUR
    sender.uid = str(restart.get("uid", sender.uid))
    sender.wait(2 * HOUR)
    record = sender.push(first=bool(restart.get("first", False)))
    assert record is not None
    assert record.skew is None
    assert not sender.alive(known=False)


def test_a_relist_within_the_timeout_does_not_kill_a_slow_clock() -> None:
    sender = Sender(MAC, ahead=-HOUR)
    sender.push(first=True)
    sender.wait(seconds(30))
    sender.push()
    sender.wait(seconds(60))
    sender.push(first=True)  # what it beat meanwhile, from a list
    assert sender.alive()
    sender.wait(seconds(61))
    assert not sender.alive()


def test_an_unchanged_stamp_keeps_its_reference_through_a_relist() -> None:
    sender = Sender(SITE)
    before = sender.push(first=True)
    assert before is not None
    sender.wait(seconds(50))
    assert sender.see(before.stamp, first=True) is before


# Observed changes --------------------------------------------------------------------------------
@pytest.mark.parametrize("ahead", [-5 * HOUR, -seconds(61), ZERO, 5 * HOUR], ids=str)
def test_a_macs_renewal_counts_from_when_it_was_seen(ahead: timedelta) -> None:
    sender = Sender(MAC, ahead=ahead)
    sender.push(first=True)
    sender.wait(seconds(30))
    sender.push()
    assert sender.alive(known=False)
    sender.wait(TIMEOUT)
    assert sender.alive()


def test_a_macs_renewal_counts_backwards_included() -> None:
    sender = Sender(MAC)
    sender.push(first=True)
    sender.wait(seconds(30))
    sender.ahead = -HOUR
    record = sender.push()
    assert record is not None
    assert record.reference == sender.now.mono
    assert not record.backwards


def test_the_third_push_in_a_row_with_an_old_stamp_is_a_slow_clock() -> None:
    sender = Sender(SITE, ahead=-HOUR)
    sender.push(first=True)
    verdicts = []
    for _ in range(4):
        sender.wait(seconds(30))
        sender.push()
        verdicts.append(sender.alive(known=False))
    assert verdicts == [False, False, True, True]


def test_one_old_stamp_is_simply_old() -> None:
    sender = Sender(SITE)
    sender.push(first=True, lag=2 * HOUR)
    sender.push(lag=HOUR)
    assert not sender.alive(known=False)


def test_a_fast_site_is_alive_from_its_second_push_on() -> None:
    sender = Sender(SITE, ahead=HOUR)
    sender.push(first=True)
    assert not sender.alive(known=False)
    sender.wait(seconds(30))
    sender.push()
    assert sender.alive(known=False)


def test_a_step_backwards_starts_the_row_again_and_the_fourth_push_is_believed() -> None:
    sender = Sender(SITE)
    sender.push(first=True)
    for _ in range(5):
        sender.wait(seconds(30))
        sender.push()
    sender.ahead = -HOUR
    verdicts = []
    for _ in range(4):
        sender.wait(seconds(30))
        sender.push()
        verdicts.append(sender.alive())
    assert verdicts == [False, False, False, True]


@pytest.mark.parametrize(
    ("lag", "counts_from"),
    [
        pytest.param(seconds(2) - INSTANT, "stamp", id="a lag under 2 s: the stamp's own age"),
        pytest.param(seconds(2), "seen", id="a lag of 2 s: skew"),
    ],
)
def test_a_small_lag_is_no_skew(lag: timedelta, counts_from: str) -> None:
    sender = Sender(MAC)
    sender.push(first=True)
    sender.wait(seconds(30))
    record = sender.push(lag=lag)
    assert record is not None
    expected = sender.now.mono - lag if counts_from == "stamp" else sender.now.mono
    assert record.reference == expected


def test_a_removed_stamp_is_silence() -> None:
    sender = Sender(MAC)
    before = sender.push(first=True)
    sender.wait(seconds(60))
    assert sender.see(None) is before


def test_a_changed_period_applies_from_the_next_stamp() -> None:
    sender = Sender(MAC)
    first = sender.push(first=True)
    assert first is not None
    shorter = Sighting("u1", first.stamp, seconds(15), first_sight=False)
    assert observe(first, shorter, sender.now, MAC) is first
    sender.wait(seconds(10))
    renewed = Sighting("u1", sender.now.wall, seconds(15), first_sight=False)
    after = observe(first, renewed, sender.now, MAC)
    assert after is not None
    assert after.period == seconds(15)


# Skew --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(seconds(60), False), (seconds(60) + INSTANT, True), (-seconds(60), False), (-HOUR, True)],
    ids=["60 s ahead is none", "more is", "60 s behind is none", "an hour is"],
)
def test_skew_is_told_at_a_trusted_change(ahead: timedelta, expected: bool) -> None:
    sender = Sender(MAC, ahead=ahead)
    sender.push(first=True)
    assert not skewed(sender.record, MAC)
    sender.wait(seconds(30))
    record = sender.push()
    assert record is not None
    assert record.skew == ahead
    assert skewed(record, MAC) is expected


def test_what_waited_for_us_while_we_were_blind_says_nothing_about_skew() -> None:
    sender = Sender(MAC)
    known = sender.push(first=True)
    sender.wait(HOUR)
    waited = sender.now.wall - seconds(90)
    late = Sighting("u1", waited, TIMEOUT, first_sight=False, late=True)
    record = observe(known, late, sender.now, MAC)
    assert record is not None
    assert record.reference == sender.now.mono, "it still counts as a beat"
    assert not skewed(record, MAC)


def test_an_untrusted_change_says_nothing_about_skew() -> None:
    sender = Sender(SITE, ahead=-HOUR)
    sender.push(first=True)
    for _ in range(2):
        sender.wait(seconds(30))
        sender.push()
        assert not skewed(sender.record, SITE)
    sender.wait(seconds(30))
    sender.push()
    assert skewed(sender.record, SITE)


# Held back ---------------------------------------------------------------------------------------
def expired(sender: Sender) -> None:
    sender.push(first=True)
    sender.wait(TIMEOUT + seconds(1))


def test_expiry_of_what_was_known_is_held_back_until_the_calm_ends() -> None:
    sender = Sender(MAC)
    expired(sender)
    until = sender.now.mono + seconds(10)
    verdict = judge(sender.record, TIMEOUT, sender.now, known=True, calm_until=until)
    assert verdict.alive
    assert verdict.held
    assert verdict.wake_at == until + INSTANT
    sender.wait(seconds(10))
    assert sender.alive(calm_until=until)
    sender.wait(INSTANT)
    assert not sender.alive(calm_until=until)


def test_a_first_value_is_never_held_back() -> None:
    sender = Sender(MAC)
    expired(sender)
    assert not sender.alive(known=False, calm_until=timedelta.max)


def test_a_stamp_seen_moving_backwards_is_never_held_back() -> None:
    sender = Sender(SITE)
    sender.push(first=True)
    sender.wait(seconds(30))
    sender.push(lag=HOUR)
    assert not sender.alive(known=True, calm_until=timedelta.max)


def test_but_what_expires_after_it_moved_backwards_is_silence_again() -> None:
    sender = Sender(SITE)
    sender.push(first=True)
    sender.wait(seconds(30))
    sender.push(lag=seconds(100))
    assert sender.alive()
    sender.wait(seconds(30))
    assert not sender.alive()
    assert sender.alive(calm_until=timedelta.max)


def test_nobody_can_say_when_blindness_ends() -> None:
    sender = Sender(MAC)
    expired(sender)
    verdict = judge(sender.record, TIMEOUT, sender.now, known=True, calm_until=timedelta.max)
    assert verdict.alive
    assert verdict.wake_at is None


def test_without_any_stamp_what_was_known_is_held_like_any_expiry() -> None:
    sender = Sender(MAC)
    assert sender.alive(known=True, calm_until=sender.now.mono)
    assert not sender.alive(known=True)


# Properties --------------------------------------------------------------------------------------
offsets = st.integers(-10_000_000_000, 10_000_000_000).map(lambda us: timedelta(microseconds=us))
trusts = st.sampled_from([MAC, SITE])
pushes = st.lists(
    st.tuples(
        st.integers(0, 400_000_000).map(lambda us: timedelta(microseconds=us)),  # time that passes
        offsets,  # the sender's clock minus ours
        st.booleans(),  # from a list?
    ),
    min_size=1,
    max_size=8,
)


def play(trust: Trust, script: list[tuple[timedelta, timedelta, bool]]) -> Sender:
    sender = Sender(trust)
    for wait, ahead, first in script:
        sender.wait(wait)
        sender.ahead = ahead
        sender.push(first=first)
    return sender


@given(trusts, pushes, st.booleans(), st.none() | offsets, st.integers(0, 10**9))
def test_silence_never_improves(
    trust: Trust,
    script: list[tuple[timedelta, timedelta, bool]],
    known: bool,
    calm: timedelta | None,
    silence: int,
) -> None:
    sender = play(trust, script)
    until = None if calm is None else sender.now.mono + calm
    before = sender.alive(known=known, calm_until=until)
    sender.wait(timedelta(microseconds=silence))
    assert before or not sender.alive(known=before, calm_until=until)


@given(trusts, pushes, st.booleans(), st.none() | offsets)
def test_the_wake_up_is_later_and_the_verdict_there_differs(
    trust: Trust,
    script: list[tuple[timedelta, timedelta, bool]],
    known: bool,
    calm: timedelta | None,
) -> None:
    sender = play(trust, script)
    until = None if calm is None else sender.now.mono + calm
    verdict = judge(sender.record, TIMEOUT, sender.now, known=known, calm_until=until)
    if verdict.wake_at is None:
        assert not verdict.alive
        return
    assert verdict.alive
    assert verdict.wake_at > sender.now.mono
    sender.wait(verdict.wake_at - sender.now.mono - INSTANT)
    assert sender.alive(calm_until=until)
    sender.wait(INSTANT)
    assert not sender.alive(calm_until=until)


@given(trusts, pushes)
def test_seeing_the_same_stamp_again_is_no_news(
    trust: Trust, script: list[tuple[timedelta, timedelta, bool]]
) -> None:
    sender = play(trust, script)
    record = sender.record
    assert record is not None
    for first in (False, True):
        sender.wait(seconds(1))
        assert sender.see(record.stamp, first=first) is record


@given(trusts, pushes, offsets)
def test_a_step_of_our_own_wall_clock_changes_no_verdict(
    trust: Trust, script: list[tuple[timedelta, timedelta, bool]], step: timedelta
) -> None:
    sender = play(trust, script)
    before = judge(sender.record, TIMEOUT, sender.now, known=True, calm_until=None)
    stepped = sender.now._replace(wall=sender.now.wall + step)
    assert judge(sender.record, TIMEOUT, stepped, known=True, calm_until=None) == before


@given(trusts, pushes)
def test_the_reference_is_never_later_than_when_the_stamp_was_seen(
    trust: Trust, script: list[tuple[timedelta, timedelta, bool]]
) -> None:
    record = play(trust, script).record
    assert record is not None
    assert record.reference <= record.seen
