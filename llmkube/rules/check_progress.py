"""Progress: what has become of the check that was started last.

A check ends by an answer, which says something about the Mac, or without one, which does not.
`follow` tells the two apart, keeps the time in which neither has happened, and works out what the
end does to bookkeeping and candidates. An answer counts for addresses that are still listed, and
only if it is about the present pin and port: the Mac may have changed them meanwhile.

Neighbours: `verifier_answer` reads the pod, `checks` keeps the books, `verification` calls this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from llmkube.api.cached import CachedCandidate, CachedPod
from llmkube.api.candidates import CandidateResult
from llmkube.api.times import format_time
from llmkube.clock import Now
from llmkube.rules.checks import Anchor, Bookkeeping, CheckSettings
from llmkube.rules.reachable import Completed, Ended
from llmkube.rules.verifier_answer import (
    Answer,
    NoAnswer,
    PodState,
    Trouble,
    Working,
    read_pod,
)
from llmkube.verifier.policy import AddressPolicy
from llmkube.verifier.protocol import AddressResult, Outcome


class CheckResult(StrEnum):
    """Values of the label `result` of the metric llmkube_metalnode_verifications_total."""

    VERIFIED = "verified"
    FAILED = "failed"
    NO_ANSWER = "no_answer"


@dataclass(frozen=True, slots=True)
class TroubleSince:
    """A pod in trouble, and the monotonic instant at which that trouble was first seen."""

    pod_uid: str
    kind: str
    since: timedelta


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server refused the pod of the start with this stamp."""

    stamp: datetime | None
    answer: NoAnswer


@dataclass(frozen=True, slots=True)
class Check:
    """The last start, and all that is seen of it.

    `pod` is the one that podUID names; `pod_gone` says that a live read did not find it either.
    `trouble` and `refusal` are what was remembered.
    """

    book: Bookkeeping
    begun: Anchor | None
    pod: CachedPod | None = None
    pod_gone: bool = False
    trouble: TroubleSince | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """What is reported now, which an answer must be about to count."""

    pin: bytes | None
    port: int | None
    candidates: tuple[CachedCandidate, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How things stand. `ended` and `result` are set by the decision that sees a check end;
    `wake_at` is when there is more to say if nothing happens."""

    book: Bookkeeping
    candidates: tuple[CachedCandidate, ...]
    ended: Ended | None = None
    result: CheckResult | None = None
    trouble: TroubleSince | None = None
    wake_at: timedelta | None = None


def follow(
    check: Check, present: Present, settings: CheckSettings, policy: AddressPolicy, now: Now
) -> Progress:
    """See how far the last check has come."""
    book = check.book
    if not book.running:
        refused = check.refusal
        if book.unanswered and refused is not None and refused.stamp == book.last_start:
            return _unanswered(book, present, refused.answer)
        return Progress(book, present.candidates)
    deadline = now.mono if check.begun is None else check.begun.mono + settings.timeout
    state = _state(check, policy)
    if now.mono >= deadline and not isinstance(state, NoAnswer):
        state = _late(state, settings)
    match state:
        case Answer():
            return _answered(book, present, state, now)
        case NoAnswer():
            return _unanswered(book, present, state)
        case Trouble():
            return _troubled(check, present, state, settings, now, deadline)
        case Working():
            return Progress(book, present.candidates, wake_at=deadline)


def _state(check: Check, policy: AddressPolicy) -> PodState:
    if check.pod is not None:
        return read_pod(check.pod, policy)
    if check.pod_gone:
        return NoAnswer("the verifier pod was deleted before it answered")
    return Working()


def _late(state: Working | Trouble | Answer, settings: CheckSettings) -> NoAnswer:
    within = f"within {settings.timeout.total_seconds():g} s (--check-timeout)"
    match state:
        case Trouble(words=words, advice=advice):
            return NoAnswer(f"{words}; none came {within}", advice)
        case Answer():
            return NoAnswer(f"the pod's report was not read {within}, and may no longer be true")
        case Working():
            return NoAnswer(
                f"none came {within}",
                "See the pod's events, and whether a scheduler and the node's kubelet are at work.",
            )


def _troubled(
    check: Check,
    present: Present,
    state: Trouble,
    settings: CheckSettings,
    now: Now,
    deadline: timedelta,
) -> Progress:
    uid = check.book.pod_uid or ""
    known = check.trouble
    if known is None or (known.pod_uid, known.kind) != (uid, state.kind):
        known = TroubleSince(uid, state.kind, now.mono)
    until = known.since + settings.trouble
    if now.mono >= until:
        return _unanswered(check.book, present, NoAnswer(state.words, state.advice))
    return Progress(check.book, present.candidates, trouble=known, wake_at=min(until, deadline))


def _unanswered(book: Bookkeeping, present: Present, answer: NoAnswer) -> Progress:
    return Progress(
        book.unanswerable(), present.candidates, ended=answer, result=CheckResult.NO_ANSWER
    )


def _answered(book: Bookkeeping, present: Present, answer: Answer, now: Now) -> Progress:
    asked, found = answer.asked, answer.report.results
    verified = any(item.result is Outcome.REACHABLE for item in found)
    book = book.completed(now, asked.input_hash, verified=verified)
    result = CheckResult.VERIFIED if verified else CheckResult.FAILED
    if (asked.spki, asked.port) != (present.pin, present.port):
        return Progress(book, present.candidates, Completed(counts=False), result)
    results = {item.address: item.result for item in found}
    checked_at = None if book.last_check is None else format_time(book.last_check)
    candidates = tuple(_with_answer(c, results, checked_at) for c in present.candidates)
    ended = Completed(
        counts=True, host_ip=_first_reachable(candidates, results), details=_details(found)
    )
    return Progress(book, candidates, ended, result)


def _with_answer(
    candidate: CachedCandidate, results: Mapping[str, Outcome], checked_at: str | None
) -> CachedCandidate:
    address = candidate.address
    # What our own policy refuses stays refused, whatever a verifier says of it.
    refused = candidate.result == CandidateResult.NOT_ALLOWED and candidate.checked_at is None
    if refused or address not in results:
        return candidate
    return CachedCandidate(address, results[address].value, candidate.source, checked_at)


def _first_reachable(
    candidates: Iterable[CachedCandidate], results: Mapping[str, Outcome]
) -> str | None:
    """The first listed address that this very check has reached."""
    reached = (c.address for c in candidates if c.result == CandidateResult.REACHABLE)
    return next((address for address in reached if address in results), None)


def _details(found: Iterable[AddressResult]) -> dict[str, str]:
    return {item.address: item.detail for item in found if item.detail}
