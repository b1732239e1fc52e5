"""Calm: which blindness holds expiry back, and until when."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.clock import ZERO
from llmkube.rules.calm import FOREVER, Sight

TIMEOUT = timedelta(seconds=90)
SLACK = timedelta(seconds=60)


def at(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


STARTED = Sight().regained(at(1000))


def test_before_the_first_sync_we_are_blind() -> None:
    assert Sight().calm_until(TIMEOUT, SLACK) == FOREVER


def test_for_timeout_and_slack_after_a_start() -> None:
    assert STARTED.calm_until(TIMEOUT, SLACK) == at(1000) + TIMEOUT + SLACK


def test_while_the_watch_is_down() -> None:
    assert STARTED.lost(at(5000)).calm_until(TIMEOUT, SLACK) == FOREVER


@pytest.mark.parametrize(
    ("down", "expected"),
    [
        pytest.param(30, at(1000), id="a third of the timeout: the start is what still counts"),
        pytest.param(30.001, at(5030.001), id="longer than a third"),
    ],
)
def test_after_the_watch_was_down(down: float, expected: timedelta) -> None:
    sight = STARTED.lost(at(5000)).regained(at(5000 + down))
    assert sight.calm_until(TIMEOUT, SLACK) == expected + TIMEOUT + SLACK


def test_a_short_reconnect_right_after_the_start_does_not_end_the_calm() -> None:
    sight = STARTED.lost(at(1010)).regained(at(1011))
    assert sight.calm_until(TIMEOUT, SLACK) == at(1000) + TIMEOUT + SLACK


def test_the_same_outage_is_long_for_one_timeout_and_short_for_another() -> None:
    sight = STARTED.lost(at(5000)).regained(at(5050))
    assert sight.calm_until(TIMEOUT, SLACK) == at(5050) + TIMEOUT + SLACK
    longer = timedelta(seconds=300)
    assert sight.calm_until(longer, SLACK) == at(1000) + longer + SLACK


def test_an_outage_found_late_counts_from_when_it_began() -> None:
    sight = STARTED.lost(at(5000)).lost(at(5060)).regained(at(5061))
    assert sight.outages[-1].length == at(61)


def test_being_up_is_no_news() -> None:
    assert STARTED.regained(at(2000)) is STARTED


outages = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=30)


@given(outages, st.integers(1, 20_000), st.integers(0, 1000))
def test_forgetting_outages_that_later_ones_outlasted_changes_no_answer(
    script: list[tuple[int, int]], timeout: int, slack: int
) -> None:
    clock, sight = at(1000), STARTED
    history = [(clock, FOREVER)]
    for up, down in script:
        sight = sight.lost(clock + at(up))
        clock += at(up) + at(down)
        sight = sight.regained(clock)
        history.append((clock, at(down)))
    ends = [end for end, length in history if length > at(timeout) / 3]
    expected = max(ends) + at(timeout) + at(slack)
    assert sight.calm_until(at(timeout), at(slack)) == expected
    lengths = [outage.length for outage in sight.outages]
    assert lengths == sorted(lengths, reverse=True)
    assert sight.down_since is None
    assert sight.outages[0].ended >= ZERO
