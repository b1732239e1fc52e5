"""When a check is due, and what holds it back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.support.dialback import (
    MINUTE,
    TAILNET,
    VERIFIED,
    Bench,
    node_of,
    report_with,
    second,
    verified,
)
from tests.support.reports import report_for


def test_a_verified_mac_is_verified_again_after_ten_minutes_give_or_take_one() -> None:
    gaps = set()
    for n in range(20):
        uid = f"{n:08d}-0000-4000-8000-000000000000"
        bench = Bench(report=report_for(uid), node=node_of(metadata={"uid": uid}))
        bench.verify(Reachable=TAILNET)
        gap = bench.until_start()
        assert MINUTE * 9 <= gap <= MINUTE * 11
        gaps.add(gap)
    assert len(gaps) == 20, "spread over the fleet"


def test_failures_back_off_from_the_check_up_to_ten_minutes() -> None:
    bench = Bench()
    bench.verify(others="Refused")
    gaps = []
    for _ in range(8):
        gaps.append(round(bench.until_start().total_seconds()))
        bench.answer(others="Refused")
        bench.settle()
    assert gaps == [30, 60, 120, 240, 480, 600, 600, 600]


@pytest.mark.parametrize("failures", [10**6, 2**31 - 1])
def test_a_count_of_failures_from_the_status_never_overflows(failures: int) -> None:
    bench = Bench()
    bench.verify(others="Refused")
    status = {
        "lastStartTime": "2026-01-01T00:00:00Z",
        "lastCheckTime": "2026-01-01T00:00:00Z",
        "inputHash": bench.book.input_hash,
        "consecutiveFailures": failures,
    }
    bench.node = node_of(
        status={
            "verification": status,
            "conditions": [{"type": "AgentConnected", "status": "True"}],
        }
    )
    bench.restart()
    wake_at = bench.settle().wake_at
    assert wake_at is not None
    assert wake_at - bench.clock.mono <= MINUTE * 10


def failed_often() -> Bench:
    """Five failures: the next try is eight minutes away."""
    bench = Bench()
    bench.verify(others="Refused")
    for _ in range(4):
        bench.until_start()
        bench.answer(others="Refused")
        bench.settle()
    assert bench.book.failures == 5
    bench.starts.clear()
    bench.clock.advance(second(31))
    bench.settle()
    assert bench.starts == []
    return bench


def test_metal_verify_does_not_wait_for_the_backoff_and_asks_once() -> None:
    bench = failed_often()
    bench.ask()
    bench.settle()
    assert len(bench.starts) == 1
    bench.answer(others="Refused")
    bench.wait(MINUTE * 2)
    assert len(bench.starts) == 1, "the annotation names an older start now"


def test_metal_verify_starts_a_check_of_a_verified_mac() -> None:
    bench = verified()
    bench.clock.advance(second(10))
    bench.ask()
    bench.settle()
    assert len(bench.starts) == 1, "not within 30 s of the last start"
    bench.wait(second(21))
    assert len(bench.starts) == 2
    assert bench.state == VERIFIED


@pytest.mark.parametrize("seen", ["2020-01-01T00:00:00Z", "yes", "\x00", "2026-13-01T00:00:00Z"])
def test_an_annotation_that_names_another_start_asks_nothing(seen: str) -> None:
    bench = failed_often()
    bench.ask(seen)
    bench.settle()
    assert bench.starts == []


def test_a_mac_that_came_back_does_not_wait_for_the_backoff() -> None:
    bench = failed_often()
    bench.connect("False")
    bench.settle()
    bench.clock.advance(second(5))
    bench.connect("True")
    bench.settle()
    assert len(bench.starts) == 1


def test_changed_inputs_do_not_wait_for_the_backoff() -> None:
    bench = failed_often()
    bench.report = report_with("10.1.1.1")
    bench.settle()
    assert len(bench.starts) == 1


def test_a_restart_does_not_shorten_the_backoff() -> None:
    bench = failed_often()
    bench.restart()
    bench.settle()
    assert bench.starts == []


def test_after_a_restart_inputs_that_differ_from_those_checked_do_not_wait() -> None:
    bench = failed_often()
    bench.report = report_with("10.1.1.1")
    bench.restart()
    bench.settle()
    assert len(bench.starts) == 1


def test_after_a_restart_a_start_without_result_counts_as_made_with_the_present_inputs() -> None:
    bench = failed_often()
    bench.ask()
    bench.settle()
    bench.pods.clear()
    bench.settle()
    assert bench.book.failures == 6
    bench.report = report_with("10.1.1.1")
    bench.restart()
    bench.clock.advance(second(40))
    bench.settle()
    assert len(bench.starts) == 1


def test_a_start_in_the_future_counts_from_first_sight() -> None:
    bench = Bench()
    bench.settle()
    bench.pods.clear()
    bench.settle()  # no answer: due again
    bench.clock.step_wall(-timedelta(days=1))
    bench.restart()
    bench.connect("True")
    bench.ask()
    bench.starts.clear()
    bench.wait(second(29))
    assert bench.starts == []
    bench.wait(second(2))
    assert len(bench.starts) == 1
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED, "a result is later than its start, whatever the clock says"


@pytest.mark.parametrize("pod", [{}, {"podUID": "gone"}], ids=["no pod", "a pod"])
@pytest.mark.parametrize("name", ["lastStartTime", "lastCheckTime"])
@pytest.mark.parametrize(
    "stamp", ["9999-12-31T23:59:59Z", "9999-12-31T23:59:00Z", "0001-01-01T00:00:00Z"]
)
def test_no_stamp_in_the_status_keeps_a_mac_from_its_checks(
    stamp: str, name: str, pod: dict[str, str]
) -> None:
    bench = Bench(node=node_of(status={"verification": {name: stamp, **pod}}))
    bench.wait(MINUTE * 5)
    assert bench.starts
    bench.ask()
    bench.until_start()
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED


def test_a_step_of_our_clock_changes_nothing() -> None:
    for step in (timedelta(hours=5), -timedelta(hours=5)):
        bench = verified()
        bench.clock.step_wall(step)
        bench.wait(MINUTE * 8)
        assert len(bench.starts) == 1
        bench.wait(MINUTE * 4)
        assert len(bench.starts) == 2


def test_the_start_is_rounded_up_and_the_check_is_never_before_it() -> None:
    bench = Bench()
    bench.clock.advance(timedelta(milliseconds=300))
    bench.settle()
    assert bench.book.last_start is not None
    assert bench.book.last_start >= bench.clock.wall
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.book.last_check == bench.book.last_start
    assert not bench.book.unanswered
