"""Reports are taken up slowly, except for what ends a True."""

from __future__ import annotations

from tests.support.dialback import (
    PENDING,
    TAILNET,
    VERIFIED,
    Bench,
    report_with,
    second,
    verified,
)
from tests.support.reports import UID, report_for


def test_a_mac_that_changes_its_report_every_second_is_taken_up_every_30_seconds() -> None:
    bench = Bench()
    bench.verify(others="Refused")
    writes = bench.writes
    for n in range(120):
        bench.clock.advance(second(1))
        bench.report = report_with(f"10.1.0.{n}")
        bench.settle()
        if bench.book.running:
            bench.answer(others="Refused")
            bench.settle()
    gaps = [b - a for a, b in zip(bench.starts, bench.starts[1:], strict=False)]
    assert min(gaps) >= second(30)
    assert len(bench.starts) >= 4, "each taken-up change is tried without backoff"
    assert bench.writes - writes <= 4 * 5


def test_a_true_ends_at_once_and_the_next_report_waits() -> None:
    bench = verified()
    bench.clock.advance(second(5))
    bench.report = "{"
    bench.settle()
    assert bench.state[1] == "InvalidReport"
    bench.clock.advance(second(1))
    bench.report = report_for(UID)
    assert bench.settle().wake_at is not None
    assert bench.state[1] == "InvalidReport"
    bench.wait(second(30))
    assert bench.state == PENDING


def test_a_report_that_changes_nothing_of_a_true_waits_its_turn() -> None:
    bench = verified()
    bench.clock.advance(second(5))
    bench.report = report_with(TAILNET, "10.1.1.1")
    bench.settle()
    assert "10.1.1.1" not in bench.results
    bench.wait(second(26))
    assert bench.results["10.1.1.1"] == "Pending"


def test_the_first_report_ever_is_not_kept_waiting() -> None:
    bench = Bench(report=None)
    bench.settle()
    bench.clock.advance(second(2))
    bench.report = report_for(UID)
    bench.settle()
    assert len(bench.starts) == 1


def test_each_distinct_fault_of_a_report_is_told_once() -> None:
    bench = Bench(report="{")
    bench.settle()
    for text in ("[]", "{", "[]", "{"):
        bench.clock.advance(second(31))
        bench.report = text
        bench.settle()
    assert bench.events == ["InvalidReport", "InvalidReport"]
    bench.restart()
    bench.settle()
    assert len(bench.events) == 2, "the condition says it already"


def test_a_fault_that_comes_back_after_a_true_is_told_again() -> None:
    bench = verified()
    for expected in (1, 2):
        bench.report = "{"
        bench.settle()
        assert bench.events.count("InvalidReport") == expected
        bench.report = report_for(UID)
        bench.until_start()
        bench.answer(Reachable=TAILNET)
        bench.settle()
        assert bench.state == VERIFIED
        bench.clock.advance(second(31))
