"""Sight: what an informer may conclude from its watches, on a clock that stands still."""

from __future__ import annotations

from datetime import timedelta

import pytest

from llmkube.informers.queue import WorkQueue
from llmkube.informers.view import View
from llmkube.reconcilers.watchfulness import Deferred
from tests.support.clock import FakeClock

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
TIMEOUT = 120 * SECOND
NOTHING = timedelta(0)


class Eyes:
    """A view of one resource in two namespaces, both open for an hour."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.view = View(self.clock)
        self.a = self.view.add_watch("leases in a", "a")
        self.b = self.view.add_watch("leases in b", "b")
        for watch in (self.a, self.b):
            watch.opened(self.now)
        self.clock.advance(HOUR)
        self.a.heard(self.now)
        self.b.heard(self.now)
        self.clock.advance(HOUR)

    @property
    def now(self) -> timedelta:
        return self.clock.mono

    def held(self, key: str) -> bool:
        """Whether expiry of that object is held back now."""
        until = self.view.sight_of(key).calm_until(TIMEOUT, NOTHING)
        return until is not None and self.now <= until


# Namespaces --------------------------------------------------------------------------------------
def test_a_namespace_that_we_may_not_read_any_more_holds_back_nothing_elsewhere() -> None:
    eyes = Eyes()
    eyes.b.closed(eyes.now)
    assert eyes.held("b/mac")
    assert not eyes.held("a/mac")
    assert not eyes.view.up, "the view as a whole is as good as its worst watch"
    assert eyes.view.down_since == eyes.now


def test_a_watch_that_resumes_makes_only_its_own_beats_late() -> None:
    eyes = Eyes()
    eyes.b.closed(eyes.now)
    eyes.clock.advance(SECOND)
    eyes.b.opened(eyes.now)
    assert eyes.view.catching_up("b/mac", eyes.now)
    assert not eyes.view.catching_up("a/mac", eyes.now)
    assert eyes.view.last_outage == SECOND


def test_what_waits_for_one_namespace_runs_when_that_returns() -> None:
    eyes = Eyes()
    queue = WorkQueue("q", eyes.clock)
    deferred = Deferred(queue, eyes.view)
    for watch in (eyes.a, eyes.b):
        watch.closed(eyes.now)
    for key in ("a/mac", "b/mac"):
        deferred.note(key, None, blind=True)
    eyes.a.opened(eyes.now)
    assert len(queue) == 1
    eyes.b.opened(eyes.now)
    assert len(queue) == 2


def test_a_decision_taken_blind_runs_again_even_if_sight_returned_before_it_was_carried_out() -> (
    None
):
    eyes = Eyes()
    queue = WorkQueue("q", eyes.clock)
    deferred = Deferred(queue, eyes.view)
    eyes.a.closed(eyes.now)
    eyes.clock.advance(HOUR)
    eyes.a.opened(eyes.now)  # while the status is being written
    deferred.note("a/mac", None, blind=True)
    assert len(queue) == 1


def test_what_was_decided_with_open_eyes_or_has_a_timer_does_not_wait_for_sight() -> None:
    eyes = Eyes()
    queue = WorkQueue("q", eyes.clock)
    deferred = Deferred(queue, eyes.view)
    deferred.note("a/mac", None, blind=False)
    deferred.note("a/other", eyes.now + SECOND, blind=True)
    eyes.a.closed(eyes.now)
    eyes.a.opened(eyes.now)
    assert len(queue) == 0


def test_a_stream_that_ends_at_once_leaves_the_sight_as_it_was() -> None:
    eyes = Eyes()
    eyes.b.closed(eyes.now)
    before = eyes.b.sight
    eyes.clock.advance(HOUR)
    eyes.b.opened(eyes.now)
    eyes.b.closed(eyes.now, short=True)
    assert eyes.b.sight == before


def test_an_answer_that_came_late_is_an_outage_of_every_watch() -> None:
    eyes = Eyes()
    eyes.a.heard(eyes.now)
    eyes.clock.advance(50 * SECOND)
    eyes.b.heard(eyes.now)  # as soon as the server was back
    eyes.view.stalled(eyes.now - 45 * SECOND, eyes.now)
    assert [watch.sight.outages[-1].length for watch in (eyes.a, eyes.b)] == [
        50 * SECOND,
        45 * SECOND,
    ]
    assert eyes.held("a/mac")
    assert eyes.view.up


# Streams that stay open --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("silence", "late"),
    [
        pytest.param(60 * SECOND, False, id="bookmarks come each minute: a quiet stream"),
        pytest.param(61 * SECOND, True, id="longer: we were frozen, or the server was"),
    ],
)
def test_what_comes_after_a_long_silence_may_have_waited(silence: timedelta, late: bool) -> None:
    eyes = Eyes()
    eyes.a.heard(eyes.now)
    eyes.clock.advance(10 * SECOND)
    eyes.a.heard(eyes.now)
    eyes.clock.advance(silence)
    eyes.a.heard(eyes.now)
    assert eyes.view.catching_up("a/mac", eyes.now) is late
    assert not eyes.view.catching_up("b/mac", eyes.now)
    assert eyes.view.up
    eyes.a.heard(eyes.now)  # the rest of what had gathered
    assert eyes.view.catching_up("a/mac", eyes.now) is late
    eyes.clock.advance(5 * SECOND)
    eyes.a.heard(eyes.now)
    assert not eyes.view.catching_up("a/mac", eyes.now)
