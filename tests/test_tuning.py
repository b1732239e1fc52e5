"""The file that changes durations: what it may say, and what it is told when it says it wrongly."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from llmkube.controller.tuning import BadTuning, Tuning, load_tuning, parse_duration, parse_tuning


def test_no_file_and_an_empty_one_leave_the_defaults(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert load_tuning(None) == load_tuning(empty) == Tuning()


def test_one_setting_leaves_all_others(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("checks: {spacing: 10s}\nheartbeat: {trust: {skew_limit: 1m30s}}\n")
    tuning = load_tuning(file)
    assert tuning.checks.spacing == timedelta(seconds=10)
    assert tuning.checks.backoff == Tuning().checks.backoff
    assert tuning.heartbeat.trust.skew_limit == timedelta(seconds=90)
    assert tuning.heartbeat.trust.changes == 0, "the rule for Macs is not that for sites"
    assert tuning.phase == Tuning().phase


@pytest.mark.parametrize(
    ("document", "words"),
    [
        pytest.param([1], "mapping", id="a list"),
        pytest.param({"cheks": {}}, "it has: checks", id="an unknown part"),
        pytest.param({"checks": {"spacin": "1s"}}, "checks has no setting", id="an unknown name"),
        pytest.param({"checks": "1s"}, "checks must be a mapping", id="a value for a part"),
        pytest.param({"checks": {"spacing": "soon"}}, "checks.spacing", id="no duration"),
        pytest.param({"checks": {"spacing": "10s!"}}, "write it like 90s", id="a typing error"),
        pytest.param({"queue": {"workers": "many"}}, "queue.workers", id="no number"),
        pytest.param({"queue": {"workers": 0}}, "workers must be more", id="nobody works"),
        pytest.param({"life": {"drain": -1}}, "drain must not be negative", id="less than nothing"),
        pytest.param({"checks": {"spacing": "0s"}}, "spacing must be more", id="it would spin"),
        pytest.param({"checks": {"spacing": "99999h"}}, "must not exceed 3650 days", id="decades"),
        pytest.param({"checks": {"spacing": "9" * 20 + "h"}}, "shorter", id="more than for ever"),
        pytest.param(
            {"life": {"drain": "30s"}},
            r"life.drain and life.last_events must be less than leader.stop_timeout",
            id="a stop that would be cut off",
        ),
        pytest.param(
            {"leader": {"renew_deadline": "20s"}},
            r"leader: the lease duration must be longer",
            id="a leader that outlives its Lease",
        ),
        pytest.param(
            {"leader": {"retry_period": "9s"}},
            r"leader: the renew deadline must exceed 1.2 times the retry period",
            id="a leader without a second try",
        ),
        pytest.param(
            {"life": {"no_attempt_limit": "50s"}, "reflector": {"longest_wait": "20s"}},
            r"twice reflector.backoff_cap must be less than life.no_attempt_limit",
            id="a reflector that waits would look dead",
        ),
        pytest.param(
            {"queue": {"backoff_cap": "1ms"}},
            r"queue.backoff_base must not exceed queue.backoff_cap",
            id="a base above its cap",
        ),
        pytest.param(
            {"phase": {"stale_after": 10}},
            r"phase.stale_after must be less than phase.unreachable_after",
            id="a phase that never comes",
        ),
        pytest.param(
            {"checks": {"timeout": "10s"}},
            r"checks.connect_timeout and checks.handshake_timeout must be less than checks.timeout",
            id="a check that cannot be in time",
        ),
    ],
)
def test_a_wrong_document_says_what_is_wrong(document: Any, words: str) -> None:
    with pytest.raises(BadTuning, match=words) as caught:
        parse_tuning(document, "file.yaml")
    assert str(caught.value).startswith("file.yaml: ")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{")
    with pytest.raises(BadTuning, match=str(file)):
        load_tuning(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(minutes=90)),
        ("250ms", timedelta(milliseconds=250)),
        ("1.5s", timedelta(milliseconds=1500)),
    ],
)
def test_durations_are_written_as_in_kubernetes(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected
