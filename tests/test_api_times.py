"""Timestamps: what is an instant, what is none, and how instants are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.api.times import format_micro_time, format_time, parse_time

T = datetime(2026, 11, 30, 19, 29, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        pytest.param("2026-11-30T19:29:00Z", T, id="metav1.Time"),
        pytest.param("2026-11-30T19:29:00.000000Z", T, id="metav1.MicroTime"),
        pytest.param("2026-11-30T19:29:00.5Z", T + timedelta(seconds=0.5), id="one digit"),
        pytest.param(
            "2026-11-30T19:29:00.123456789Z",
            T + timedelta(microseconds=123456),
            id="nine digits: cut, not rounded",
        ),
        pytest.param("2026-11-30T21:29:00+02:00", T, id="an offset east"),
        pytest.param("2026-11-30T13:59:00-05:30", T, id="an offset west"),
        pytest.param("2026-11-30t19:29:00z", T, id="lower case, as RFC 3339 allows"),
        pytest.param(
            "9999-12-31T23:59:59Z", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), id="max"
        ),
    ],
)
def test_instants(text: str, instant: datetime) -> None:
    parsed = parse_time(text)
    assert parsed == instant
    assert parsed is not None
    assert parsed.tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "2026-11-30",
        "2026-11-30T19:29Z",
        "2026-11-30T19:29:00",
        "2026-11-30 19:29:00Z",
        "20261130T192900Z",
        "2026-W49-1T19:29:00Z",
        "2026-11-30T19:29:00,5Z",
        "2026-11-30T19:29:00.Z",
        "2026-11-30T19:29:00.1234567890Z",
        "2026-02-30T19:29:00Z",
        "2026-11-30T24:29:00Z",
        "2026-11-30T19:29:60Z",
        "2026-11-30T19:29:00+24:00",
        "2026-11-30T19:29:00+0200",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+10:00",
        "9999-12-31T23:59:59-10:00",
        "٢٠٢٦-11-30T19:29:00Z",
        "2026-11-30T19:29:00Z\n",
        " 2026-11-30T19:29:00Z",
        "now",
    ],
)
def test_no_instant(text: str | None) -> None:
    assert parse_time(text) is None


@given(st.text())
def test_no_text_raises(text: str) -> None:
    parse_time(text)


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_micro_time_is_read_back_exactly(instant: datetime) -> None:
    text = format_micro_time(instant)
    assert parse_time(text) == instant
    assert len(text) == len("2026-11-30T19:29:00.000000Z")


@given(
    st.datetimes(
        datetime(2, 1, 1),  # noqa: DTZ001
        timezones=st.just(timezone(timedelta(hours=3))),
    )
)
def test_seconds_are_cut_and_written_in_utc(instant: datetime) -> None:
    parsed = parse_time(format_time(instant))
    assert parsed is not None
    assert timedelta(0) <= instant - parsed < timedelta(seconds=1)


def test_an_instant_without_zone_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="time zone"):
        format_time(datetime(2026, 1, 1))  # noqa: DTZ001
