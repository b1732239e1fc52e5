"""The answer of a verifier pod: what its status says, and whether that can be believed.

A pod ends in one of two ways. It *answers*: its container ended well, and its termination message
is a report about exactly what was asked. Or it *gives no answer*: never scheduled, never pulled,
evicted, killed, gone, late, or talking nonsense. The second proves nothing about the Mac, so it is
never mixed up with the first, and it is told in the pod's or the scheduler's own words.

What was asked is read from the pod's own environment, which nobody can change once the pod exists.
Neighbours: `verifier_pod` renders the pod, `llmkube.verifier.protocol` is the language.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmkube.api.cached import CachedPod, ContainerStatus, ContainerTerminated
from llmkube.verifier.policy import AddressPolicy
from llmkube.verifier.protocol import (
    CHECK_VARIABLE,
    CheckReport,
    CheckRequest,
    Outcome,
    decode_report,
    decode_request,
)

CONTAINER = "verifier"
MAX_WORDS = 400

_STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons of a waiting container that are no trouble."""


@dataclass(frozen=True, slots=True)
class Working:
    """Nothing is wrong: being scheduled, pulled or run."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """It cannot run as things are, which may pass. `kind` stays the same while it lasts."""

    kind: str
    words: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """It will never give an answer that can be believed. `words` say what happened, `advice` what
    the admin can do about it."""

    words: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A report that answers what was asked."""

    asked: CheckRequest
    report: CheckReport


PodState = Working | Trouble | NoAnswer | Answer


def read_pod(pod: CachedPod, policy: AddressPolicy) -> PodState:
    """What has become of a pod that we created."""
    container = next((c for c in pod.status.container_statuses if c.name == CONTAINER), None)
    ended = container.state.terminated if container else None
    if pod.status.phase == "Failed" or (ended is not None and ended.exit_code != 0):
        return NoAnswer(_failure(pod, ended))
    if ended is not None:
        return _read_message(pod, ended.message, policy)
    if pod.status.phase == "Succeeded":
        return NoAnswer("the pod succeeded without the verifier's container having run")
    return _unschedulable(pod) or _waiting(container) or Working()


def _read_message(pod: CachedPod, message: str | None, policy: AddressPolicy) -> PodState:
    try:
        asked = decode_request(_request_text(pod))
    except ValueError as error:
        return NoAnswer(f"the pod does not carry the question that it was made with: {error}")
    try:
        report = decode_report(message)
        _compare(asked, report, policy)
    except ValueError as error:
        return NoAnswer(
            one_line(f"the verifier's report cannot be believed: {error}"),
            "Check that --verifier-image is of the controller's own release.",
        )
    return Answer(asked, report)


def _request_text(pod: CachedPod) -> str:
    variables = (v for c in pod.spec.containers if c.name == CONTAINER for v in c.env)
    return next((v.value or "" for v in variables if v.name == CHECK_VARIABLE), "")


def _compare(asked: CheckRequest, report: CheckReport, policy: AddressPolicy) -> None:
    """Raise ValueError unless the report answers exactly what was asked, within the policy."""
    if report.input_hash != asked.input_hash:
        raise ValueError("it echoes another input hash than it was given")
    answered = {item.address for item in report.results}
    if strangers := answered - set(asked.addresses):
        raise ValueError(f"it speaks of {', '.join(sorted(strangers))}, which nobody asked about")
    if silent := [address for address in asked.addresses if address not in answered]:
        raise ValueError(f"it says nothing about {', '.join(silent)}")
    for item in report.results:
        verdict = policy.verdict(item.address)
        if item.result is Outcome.REACHABLE and not verdict.allowed:
            raise ValueError(f"it calls {item.address} reachable, which is {verdict.why}")


def _unschedulable(pod: CachedPod) -> Trouble | None:
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            words = condition.message or condition.reason or "no reason given"
            return Trouble(
                "unschedulable",
                one_line(f"the pod cannot be scheduled: {words}"),
                "Make spec.verifier (nodeSelector, tolerations) match a node that has room.",
            )
    return None


def _waiting(container: ContainerStatus | None) -> Trouble | None:
    waiting = container.state.waiting if container else None
    if waiting is None or (waiting.reason or "") in _STARTING:
        return None
    # ErrImagePull and ImagePullBackOff take turns while it is one and the same trouble.
    words = ": ".join(part for part in (waiting.reason, waiting.message) if part)
    return Trouble(
        "unstartable",
        one_line(f"the verifier's container cannot start: {words}"),
        "Check the controller's --verifier-image and --verifier-image-pull-secret.",
    )


def _failure(pod: CachedPod, ended: ContainerTerminated | None) -> str:
    status = pod.status
    parts = [": ".join(part for part in (status.reason, status.message) if part)]
    if ended is not None:
        parts.append(f"container {ended.reason or 'ended'}, exit code {ended.exit_code}")
        parts.append(ended.message or "")
    words = "; ".join(part for part in parts if part) or "no reason given"
    return one_line(f"the pod failed: {words}")


def one_line(text: str) -> str:
    """Fit for a condition: one printable line of bounded length."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 1] + "…"
