"""Pods that give no answer, and answers that are not to be believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmkube.rules.calm import FOREVER
from llmkube.verifier.policy import AddressPolicy, parse_network
from tests.support.dialback import (
    LAN,
    MINUTE,
    NO_ANSWER,
    PENDING,
    TAILNET,
    VERIFIED,
    Bench,
    second,
    verified,
)

# Pods without an answer ---------------------------------------------------------------------------

UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 node(s) didn't match Pod's node selector.",
        }
    ],
}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "verifier", "state": state}]}


def ended(exit_code: int, reason: str, message: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"name": "verifier", "state": state}]}


@pytest.mark.parametrize(
    ("status", "after", "words"),
    [
        pytest.param(UNSCHEDULABLE, 20, "didn't match Pod's node selector", id="unschedulable"),
        pytest.param(
            waiting("ImagePullBackOff", 'Back-off pulling image "x"'),
            20,
            'Back-off pulling image "x"',
            id="unpullable",
        ),
        pytest.param(waiting("InvalidImageName"), 20, "InvalidImageName", id="no image at all"),
        pytest.param(
            waiting("CreateContainerConfigError", "no such secret"),
            20,
            "no such secret",
            id="cannot be created",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            0,
            "Evicted: The node was low on memory.",
            id="evicted",
        ),
        pytest.param(ended(137, "OOMKilled"), 0, "OOMKilled", id="out of memory"),
        pytest.param(
            {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active too long"},
            0,
            "DeadlineExceeded",
            id="its own deadline",
        ),
        pytest.param(ended(1, "Error", "Traceback"), 0, "exit code 1; Traceback", id="crashed"),
        pytest.param({"phase": "Succeeded"}, 0, "without the verifier", id="nothing ran"),
        pytest.param({"phase": "Pending"}, 120, "within 120 s", id="silence"),
        pytest.param({"phase": "Running"}, 120, "--check-timeout", id="hangs"),
    ],
)
@pytest.mark.parametrize("known", ["new", "failed", "verified"])
def test_a_pod_without_an_answer_says_nothing_about_the_mac(
    status: dict[str, Any], after: int, words: str, known: str
) -> None:
    bench = Bench()
    if known == "verified":
        bench.verify(Reachable=TAILNET)
    elif known == "failed":
        bench.verify(others="Refused")
    if known != "new":
        bench.ask()
        bench.wait(second(31))
    bench.settle()
    before, book, results = bench.state, bench.book, bench.results
    assert book.running
    bench.pod_status(**status)
    begun = bench.clock.mono
    decision = bench.settle()
    if after:
        assert bench.book == book, "it may still come right"
        assert decision.wake_at is not None
        assert round((decision.wake_at - begun).total_seconds()) <= after
        bench.clock.advance(decision.wake_at - begun)
        assert bench.look().confirm_live
    expected = before if known == "verified" else NO_ANSWER
    assert bench.state == expected
    assert words in bench.reachable.message
    assert "says nothing about the Mac" in bench.reachable.message
    assert bench.results == results
    assert bench.book.pod_uid is None
    assert bench.book.failures == book.failures + 1
    assert (bench.book.last_start, bench.book.last_check, bench.book.input_hash) == (
        book.last_start,
        book.last_check,
        book.input_hash,
    )
    told = bench.reachable.message
    bench.restart()
    bench.settle()
    assert bench.reachable.message == told, "the words outlive a restart"


def test_trouble_that_passes_is_forgiven() -> None:
    bench = Bench()
    bench.settle()
    bench.pod_status(**UNSCHEDULABLE)
    bench.settle()
    bench.clock.advance(second(15))
    bench.pod_status(phase="Pending")
    bench.settle()
    bench.clock.advance(second(15))
    bench.pod_status(**UNSCHEDULABLE)
    bench.settle()
    assert bench.book.running
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED


def test_pulls_that_fail_in_turns_are_one_trouble() -> None:
    bench = Bench()
    bench.settle()
    for n in range(4):
        bench.pod_status(**waiting("ErrImagePull" if n % 2 else "ImagePullBackOff"))
        bench.settle()
        bench.clock.advance(second(6))
    bench.settle()
    assert bench.state == NO_ANSWER


def test_a_pod_that_somebody_deleted_gave_no_answer() -> None:
    bench = Bench()
    bench.settle()
    bench.pods.clear()
    bench.settle()
    assert bench.state == NO_ANSWER
    assert "deleted" in bench.reachable.message


def test_a_refused_pod_is_told_in_the_api_servers_words() -> None:
    bench = Bench(refuse_pods="exceeded quota: pods=0")
    bench.settle()
    assert bench.state == NO_ANSWER
    assert "exceeded quota: pods=0" in bench.reachable.message
    assert bench.book.failures == 1
    bench.settle()
    assert bench.book.failures == 1


def test_after_a_pod_without_an_answer_the_backoff_counts_from_the_starts_deadline() -> None:
    bench = Bench()
    bench.settle()
    gaps = []
    for _ in range(4):
        bench.pod_status(phase="Failed", reason="Evicted")
        gaps.append(round(bench.until_start().total_seconds()))
    assert gaps == [150, 180, 240, 360]


def test_a_true_ends_half_an_hour_after_the_last_success_when_no_check_answers() -> None:
    bench = verified()
    success = bench.clock.mono
    while bench.clock.mono - success < MINUTE * 29:
        if bench.book.running:
            bench.pod_status(phase="Failed", reason="Evicted")
        bench.wait(second(30))
        assert bench.state == VERIFIED
    bench.refuse_pods = "no room"
    bench.wait(success + MINUTE * 30 - bench.clock.mono)
    assert bench.state == NO_ANSWER
    assert "too long ago" in bench.reachable.message
    assert "Evicted" in bench.reachable.message or "no room" in bench.reachable.message


def test_a_true_ends_after_half_an_hour_without_a_slot_too() -> None:
    bench = verified()
    bench.slots = False
    bench.wait(MINUTE * 29)
    assert bench.state == VERIFIED
    bench.wait(MINUTE * 2)
    assert bench.state == PENDING


def test_an_outage_of_ours_ends_no_true_by_its_age() -> None:
    """Neither while we are blind, nor before a round of checks could be made."""
    bench = verified()
    bench.slots = False
    bench.calm_until = FOREVER
    bench.wait(MINUTE * 60)
    assert bench.state == VERIFIED
    bench.calm_until = bench.clock.mono + MINUTE * 10
    bench.wait(MINUTE * 10)
    assert bench.state == VERIFIED
    bench.wait(second(1))
    assert bench.state == PENDING


def test_an_answer_clears_the_words_of_the_trouble_before() -> None:
    bench = verified()
    bench.ask()
    bench.wait(second(31))
    bench.pod_status(phase="Failed", reason="Evicted")
    bench.settle()
    assert "Evicted" in bench.reachable.message
    bench.wait(MINUTE * 3)
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED
    assert "Evicted" not in bench.reachable.message


# Answers that are not to be believed --------------------------------------------------------------


def lie(bench: Bench, **changes: Any) -> str:
    asked = bench.request()
    document: dict[str, Any] = {
        "version": 1,
        "inputHash": asked.input_hash,
        "results": [{"address": a, "result": "Reachable", "detail": ""} for a in asked.addresses],
    }
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"inputHash": "0" * 64}, id="another hash"),
        pytest.param(
            {"results": [{"address": "10.9.9.9", "result": "Reachable", "detail": ""}]},
            id="another address",
        ),
        pytest.param(
            {"results": [{"address": TAILNET, "result": "Reachable", "detail": ""}]},
            id="not every address",
        ),
        pytest.param(
            {"results": [{"address": TAILNET, "result": "Fine", "detail": ""}]},
            id="an unknown outcome",
        ),
        pytest.param(
            {"results": [{"address": TAILNET, "result": "Pending", "detail": ""}]},
            id="an outcome that only the controller gives",
        ),
        pytest.param({"results": []}, id="nothing at all"),
        pytest.param({"more": 1}, id="an unknown field"),
    ],
)
def test_a_lying_message_is_never_believed(changes: dict[str, Any]) -> None:
    bench = Bench()
    bench.settle()
    bench.answer(message=lie(bench, **changes))
    bench.settle()
    assert bench.state == NO_ANSWER
    assert set(bench.results.values()) == {"Pending"}


@pytest.mark.parametrize("message", ["", "{", "x" * 5000, "null", "[]", "\x00"])
def test_a_garbled_message_is_never_believed(message: str) -> None:
    bench = Bench()
    bench.settle()
    bench.answer(message=message)
    bench.settle()
    assert bench.state == NO_ANSWER


def test_nothing_that_the_policy_refuses_is_reachable_whatever_the_pod_was_asked() -> None:
    bench = Bench()
    bench.settle()
    bench.policy = AddressPolicy(deny=[parse_network(f"{TAILNET}/32")])
    bench.answer(Reachable=f"{TAILNET} {LAN}")
    bench.settle()
    assert bench.state == NO_ANSWER


def test_an_answer_that_is_read_too_late_is_not_taken_for_news() -> None:
    bench = Bench()
    bench.settle()
    bench.answer(Reachable=TAILNET)
    bench.clock.advance(MINUTE * 60)
    bench.restart()
    bench.settle()
    assert bench.state[0] != "True"
