"""Which Events are told, and how often: aggregation, limits and redaction, without a server."""

from __future__ import annotations

import string
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkube.kube.event_series import (
    BACKLOG,
    BURST,
    NAME_LENGTH,
    NOTE_BYTES,
    REFILL,
    SERIES_PACE,
    SERIES_WINDOW,
    EventBook,
    ObjectRef,
    Saying,
    Series,
    clean_note,
    event_name,
)
from llmkube.kube.resources import FEDERATEDCLUSTERS, METALNODES
from tests.support.clock import FakeClock

SECOND = timedelta(seconds=1)


def ref(uid: str = "u1") -> ObjectRef:
    return ObjectRef(METALNODES, "team", "mac", uid, "5")


def saying(note: str = "n", uid: str = "u1") -> Saying:
    return Saying(uid, "Warning", "ClockSkew", "Observe", note)


class Talk:
    """An EventBook, its clock, and an API server that takes everything."""

    def __init__(self) -> None:
        self.book = EventBook()
        self.clock = FakeClock()
        self.told: list[tuple[str, int]] = []

    def say(self, note: str = "n", uid: str = "u1") -> bool:
        return self.book.say(ref(uid), saying(note, uid), self.clock.now())

    def write(self) -> None:
        mono = self.clock.monotonic()
        for series in self.book.ready(mono):
            self.told.append((series.saying.note, series.count))
            self.book.wrote(series, series.count, mono)


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_a_new_event_is_due_at_once(talk: Talk) -> None:
    talk.say()
    talk.write()
    talk.write()
    assert talk.told == [("n", 1)]
    assert talk.book.next_due() is None


def test_repetitions_are_one_series_told_at_a_pace(talk: Talk) -> None:
    talk.say()
    talk.write()
    for _ in range(50):
        talk.clock.advance(SECOND)
        talk.say()
        talk.write()
    assert talk.told == [("n", 1)]
    talk.clock.advance(SERIES_PACE - 50 * SECOND)
    talk.write()
    assert talk.told == [("n", 1), ("n", 51)]


def test_repetitions_before_the_first_writing_count_from_the_start(talk: Talk) -> None:
    for _ in range(3):
        talk.say()
    talk.write()
    assert talk.told == [("n", 3)]


def test_a_series_that_was_silent_for_long_has_ended(talk: Talk) -> None:
    talk.say()
    talk.write()
    talk.clock.advance(SERIES_WINDOW + SECOND)
    talk.say()
    talk.write()
    assert talk.told == [("n", 1), ("n", 1)]


def test_what_comes_while_a_series_is_written_is_told_later(talk: Talk) -> None:
    talk.say()
    (series,) = talk.book.ready(talk.clock.monotonic())
    talk.say()
    talk.book.wrote(series, 1, talk.clock.monotonic())
    talk.clock.advance(SERIES_PACE)
    talk.write()
    assert talk.told == [("n", 2)]


def test_one_object_cannot_flood_its_namespace(talk: Talk) -> None:
    said = [talk.say(f"note {number}") for number in range(BURST + 10)]
    assert said == [True] * BURST + [False] * 10
    assert talk.book.dropped == 10
    assert talk.say("another's", uid="u2"), "the others are not punished"
    talk.clock.advance(REFILL)
    assert talk.say("after a while")
    assert not talk.say("and no more")


def test_the_backlog_is_bounded(talk: Talk) -> None:
    for number in range(BACKLOG + 5):
        talk.say(uid=f"u{number}")
    assert talk.book.dropped == 5
    assert len(list(talk.book.ready(talk.clock.monotonic()))) == BACKLOG


def test_what_is_refused_is_forgotten(talk: Talk) -> None:
    talk.say()
    (series,) = talk.book.ready(talk.clock.monotonic())
    talk.book.give_up(series)
    assert talk.book.next_due() is None
    assert talk.book.dropped == 1


def test_memory_follows_activity_not_history(talk: Talk) -> None:
    for hour in range(3):
        for number in range(100):
            talk.say(uid=f"{hour}-{number}")
        talk.write()
        talk.clock.advance(timedelta(hours=1))
    talk.say(uid="last")
    assert len(talk.book._series) == 1
    assert len(talk.book._buckets) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=60))
def test_no_repetition_is_lost_and_no_series_told_faster_than_its_pace(
    steps: list[tuple[int, int]],
) -> None:
    talk, said = Talk(), 0
    written_at: dict[str, timedelta] = {}
    latest: dict[str, int] = {}
    for which, seconds in steps:
        talk.clock.advance(seconds * SECOND)
        said += talk.say(f"note {which}")
        mono = talk.clock.monotonic()
        for series in talk.book.ready(mono):
            if series.written:
                assert mono - written_at[series.name] >= SERIES_PACE
            written_at[series.name], latest[series.name] = mono, series.count
            talk.book.wrote(series, series.count, mono)
    while (due := talk.book.next_due()) is not None:
        for series in talk.book.ready(due):
            latest[series.name] = series.count
            talk.book.wrote(series, series.count, due)
    assert sum(latest.values()) == said


# What is written --------------------------------------------------------------------------------


def test_the_event_says_who_about_whom_and_when(talk: Talk) -> None:
    talk.say("set the clock of the Mac right")
    (series,) = talk.book.ready(talk.clock.monotonic())
    body = series.body("llmkube-controller", "host_1")
    assert body["metadata"]["namespace"] == "team"
    assert body["metadata"]["name"].startswith("mac.")
    assert body["regarding"] == {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "MetalNode",
        "namespace": "team",
        "name": "mac",
        "uid": "u1",
        "resourceVersion": "5",
    }
    assert body["eventTime"] == "2026-01-01T00:00:00.000000Z"
    assert (body["reportingController"], body["reportingInstance"]) == (
        "llmkube-controller",
        "host_1",
    )
    assert "series" not in body


def test_events_about_cluster_scoped_objects_go_to_the_default_namespace() -> None:
    regarding = ObjectRef(FEDERATEDCLUSTERS, "", "site", "u", "1")
    clock = FakeClock()
    book = EventBook()
    book.say(regarding, saying(), clock.now())
    series: Series = next(book.ready(clock.monotonic()))
    body = series.body("c", "i")
    assert body["metadata"]["namespace"] == "default"
    assert "namespace" not in body["regarding"]


@settings(deadline=None)
@given(st.text(st.sampled_from(string.ascii_lowercase + ".-"), min_size=1, max_size=253))
def test_names_are_unique_and_never_too_long(name: str) -> None:
    one, other = event_name(name), event_name(name)
    assert one != other
    assert len(one) <= NAME_LENGTH


@settings(deadline=None)
@given(st.text(max_size=1500))
def test_notes_fit_and_stay_on_one_line(note: str) -> None:
    cleaned = clean_note(note)
    assert len(cleaned.encode()) <= NOTE_BYTES
    assert len(cleaned.splitlines()) <= 1


def test_long_notes_end_in_an_ellipsis_and_whole_characters() -> None:
    cleaned = clean_note("ü" * 1000)
    assert cleaned.endswith("ü…")
    assert len(cleaned.encode()) in (NOTE_BYTES - 1, NOTE_BYTES)
    assert clean_note("a" * NOTE_BYTES) == "a" * NOTE_BYTES


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        pytest.param(
            "got eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl back",
            "got [redacted] back",
            id="a token",
        ),
        pytest.param(
            "header Authorization: Bearer abcdefghijkl.mno",
            "header Authorization: Bearer [redacted]",
            id="a header",
        ),
        pytest.param(
            "pull https://user:hunter2@registry/x failed",
            "pull https://[redacted]@registry/x failed",
            id="a URL with a password",
        ),
        pytest.param(
            "pin q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA= changed",
            "pin q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA= changed",
            id="a pin is no secret",
        ),
    ],
)
def test_notes_hold_no_credentials(note: str, expected: str) -> None:
    assert clean_note(note) == expected
