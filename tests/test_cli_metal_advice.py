"""What `metal describe` advises and how `metal verify --wait` judges: pure tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmkube.api.candidates import CandidateResult
from llmkube.api.names import ConnectedReason, ReachableReason
from llmkube.api.times import format_time
from llmkube.cli.metal_advice import advise, explain_candidate, next_check
from llmkube.cli.metal_describe import Picture, render
from llmkube.cli.metal_verify import Progress, Request, progress

NOW = datetime(2026, 11, 30, 20, 0, tzinfo=UTC)


def at(**ago: float) -> str:
    return format_time(NOW - timedelta(**ago))


def condition(kind: str, status: str, reason: str, since: str | None = None) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": f"{reason} says more",
        "lastTransitionTime": since or at(hours=1),
    }


def mac(
    connected: tuple[str, str] | None = ("True", "HeartbeatReceived"),
    reachable: tuple[str, str] | None = ("True", "Verified"),
    results: tuple[str, ...] = (),
    **status: Any,
) -> dict[str, Any]:
    conditions = []
    if connected:
        conditions.append(condition("AgentConnected", *connected))
    if reachable:
        conditions.append(condition("Reachable", *reachable))
    candidates = [
        {"address": f"10.0.0.{n}", "source": "lan", "result": result, "checkedAt": at(minutes=5)}
        for n, result in enumerate(results)
    ]
    return {
        "metadata": {
            "name": "mac-1",
            "namespace": "macs",
            "uid": "u",
            "creationTimestamp": at(days=3),
        },
        "spec": {"leaseName": "llmkube-metal-mac-1", "serviceAccountName": "llmkube-metal-mac-1"},
        "status": {
            "conditions": conditions,
            "candidates": candidates,
            "ingressPort": 9443,
            **status,
        },
    }


def lease(**ago: float) -> dict[str, Any]:
    return {"spec": {"renewTime": at(**ago), "leaseDurationSeconds": 120}}


def advised(node: dict[str, Any], beat: dict[str, Any] | None = None) -> str:
    return "\n".join(advise(node, beat, NOW, lease_known=True))


def test_nothing_is_advised_for_a_mac_that_works() -> None:
    assert advised(mac(), lease(seconds=20)) == ""


@pytest.mark.parametrize("reason", list(ConnectedReason))
def test_every_reason_of_a_lost_connection_says_what_to_do(reason: ConnectedReason) -> None:
    if reason is ConnectedReason.HEARTBEAT_RECEIVED:
        return
    text = advised(mac(("False", reason), ("Unknown", "AgentDisconnected")))
    assert "mac-1 -n macs" in text
    assert "controller" not in text
    assert {
        ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND: "token create",
        ConnectedReason.LEASE_NOT_FOUND: "token create",
        ConnectedReason.NEVER_CONNECTED: "llmkube agent",
        ConnectedReason.HEARTBEAT_EXPIRED: "awake",
    }[reason] in text


@pytest.mark.parametrize("reason", list(ReachableReason))
def test_every_reason_of_a_lost_way_says_what_to_do(reason: ReachableReason) -> None:
    status = "True" if reason is ReachableReason.VERIFIED else "False"
    text = advised(mac(reachable=(status, reason)), lease(seconds=20))
    assert bool(text) is (reason is not ReachableReason.VERIFIED)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("PinMismatch", "Another machine"),
        ("CertificateMismatch", "Restart the agent"),
        ("Refused", "port 9443"),
        ("Timeout", "NetworkPolicies"),
        ("Error", "NetworkPolicies"),
    ],
)
def test_a_failed_verification_is_explained_by_its_outcomes(result: str, words: str) -> None:
    node = mac(reachable=("False", "VerificationFailed"), results=("NotAllowed", result))
    text = advised(node, lease(seconds=20))
    assert words in text
    assert "metal verify mac-1 -n macs --wait" in text


@pytest.mark.parametrize("result", list(CandidateResult))
def test_every_outcome_of_a_candidate_is_explained(result: str) -> None:
    said = explain_candidate(result, 9443)
    assert "unknown" not in said
    assert "{" not in said


def test_an_outcome_from_the_future_is_not_an_error() -> None:
    assert "update llmkube" in explain_candidate("Teleported", None)


@pytest.mark.parametrize(
    ("node", "beat"),
    [
        pytest.param(mac(None, None), lease(seconds=5), id="no condition was ever written"),
        pytest.param(mac(reachable=None), lease(seconds=5), id="half of them were written"),
        pytest.param(mac(), lease(minutes=10), id="True long after the last heartbeat"),
        pytest.param(
            mac(("False", "HeartbeatExpired"), ("Unknown", "AgentDisconnected")),
            lease(seconds=5),
            id="False in spite of fresh heartbeats",
        ),
    ],
)
def test_a_controller_that_does_not_work_is_named(
    node: dict[str, Any], beat: dict[str, Any]
) -> None:
    assert "logs deployment/llmkube-controller" in advised(node, beat)


@pytest.mark.parametrize(
    ("node", "beat"),
    [
        pytest.param(mac(), lease(seconds=130), id="just expired: it may be about to act"),
        pytest.param(mac(), lease(hours=-1), id="a clock ahead"),
        pytest.param(mac(), None, id="no Lease was read"),
        pytest.param(
            mac(("False", "ServiceAccountNotFound"), ("Unknown", "AgentDisconnected")),
            lease(seconds=5),
            id="a revoked Mac may still beat for some seconds",
        ),
    ],
)
def test_a_controller_that_works_is_not_suspected(
    node: dict[str, Any], beat: dict[str, Any] | None
) -> None:
    assert "logs deployment/llmkube-controller" not in advised(node, beat)


@pytest.mark.parametrize(
    ("failures", "pause"),
    [
        (0, timedelta(minutes=10)),
        (1, timedelta(seconds=30)),
        (2, timedelta(minutes=1)),
        (5, timedelta(minutes=8)),
        (6, timedelta(minutes=10)),
        (2**31 - 1, timedelta(minutes=10)),
        (-1, timedelta(minutes=10)),
    ],
)
def test_the_next_check_follows_the_backoff(failures: int, pause: timedelta) -> None:
    stamp = at(minutes=1)
    node = mac(verification={"lastCheckTime": stamp, "consecutiveFailures": failures})
    assert next_check(node) == NOW - timedelta(minutes=1) + pause
    assert next_check(mac()) is None


# verify ----------------------------------------------------------------------------------------


def asked(last_start: str = "", failures: int = 0) -> Request:
    return Request("mac-1", "macs", "u", last_start, failures, None)


T1, T2, T3 = "2026-11-30T19:00:00Z", "2026-11-30T19:01:00Z", "2026-11-30T19:01:20Z"


@pytest.mark.parametrize(
    ("request_", "verification", "expected"),
    [
        pytest.param(asked(), {}, Progress.WAITING, id="nothing was ever started"),
        pytest.param(
            asked(T1), {"lastStartTime": T1, "lastCheckTime": T1}, Progress.WAITING, id="not yet"
        ),
        pytest.param(asked(), {"lastStartTime": T2}, Progress.RUNNING, id="the first one runs"),
        pytest.param(
            asked(T1), {"lastStartTime": T2, "lastCheckTime": T1}, Progress.RUNNING, id="runs"
        ),
        pytest.param(
            asked(T1), {"lastStartTime": T2, "lastCheckTime": T3}, Progress.FINISHED, id="finished"
        ),
        pytest.param(
            asked(T1),
            {"lastStartTime": T2, "lastCheckTime": T2},
            Progress.FINISHED,
            id="finished within the second",
        ),
        pytest.param(
            asked(T1, 3),
            {"lastStartTime": T2, "lastCheckTime": T3, "consecutiveFailures": 4},
            Progress.FINISHED,
            id="a check that reached nothing is a result",
        ),
        pytest.param(
            asked(T1, 3),
            {"lastStartTime": T2, "lastCheckTime": T1, "consecutiveFailures": 4},
            Progress.POD_FAILED,
            id="a pod without an answer",
        ),
    ],
)
def test_progress_of_a_requested_check(
    request_: Request, verification: dict[str, Any], expected: Progress
) -> None:
    assert progress(mac(verification=verification), request_) is expected


# The screen ------------------------------------------------------------------------------------


def test_the_screen_answers_every_question() -> None:
    node = mac(
        reachable=("False", "VerificationFailed"),
        results=("Timeout", "Refused"),
        capacity={"chip": "Apple M5 Max", "gpuCores": 40, "memory": "128Gi"},
        agentVersion="v0.1.0",
        ingressSPKI="c3BraQ==",
        verification={"lastCheckTime": at(seconds=70), "consecutiveFailures": 2},
    )
    event = {
        "metadata": {"creationTimestamp": at(minutes=1)},
        "type": "Warning",
        "reason": "ClockSkew",
        "note": "the clock is slow\x1b[2J",
        "eventTime": at(minutes=1),
        "series": {"lastObservedTime": at(seconds=30)},
    }
    account = {"metadata": {"creationTimestamp": at(days=2)}}
    text = render(Picture(node, lease(seconds=12), account, (), (event,)), NOW)
    for words in (
        "mac-1",
        "Apple M5 Max, 40 GPU cores, 128Gi",
        "Connected:       True  HeartbeatReceived, since",
        "Reachable:       False  VerificationFailed, since",
        "VerificationFailed says more",
        "no verified address",
        "last heartbeat 2026-11-30T19:59:48Z (12s ago)",
        "active, made",
        "10.0.0.0",
        "Timeout",
        "no answer: a firewall",
        "nothing listens at port 9443",
        "sha256/c3BraQ==",
        "2 in a row without a verified address; next is due",
        "What to do:\n  - ",
        "30s",
        "ClockSkew",
    ):
        assert words in text, words
    assert "\x1b" not in text


def test_the_screen_of_a_new_mac_and_of_one_that_may_not_be_read() -> None:
    text = render(Picture(mac(None, None), None, None), NOW)
    assert "not judged yet" in text
    assert "missing: revoked" in text
    assert "none reported" in text
    hidden = frozenset({"leases", "serviceaccounts", "events"})
    text = render(Picture(mac(), None, None, unreadable=hidden), NOW)
    assert text.count("you may not read") == 3
    assert "nothing: it is connected and reachable" in text


def test_an_ipv6_address_is_shown_as_an_endpoint() -> None:
    text = render(Picture(mac(hostIP="fd7a::1"), lease(seconds=1), None), NOW)
    assert "[fd7a::1]:9443" in text
