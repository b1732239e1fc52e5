"""Reachable: may pods in this cluster use this Mac, and at which address?

`judge` turns facts into the condition and `status.hostIP`. It promises:

* precedence: a wrong spec, then a silent agent, then whatever the report and the checks say;
* True only on a check's own evidence. It goes on while a new check is due or under way as long as
  pin, port and the verified address stay what they were, and for a bounded time if checks give no
  answer; everything else ends it at once, and hostIP with it;
* the same facts give the same message. What only the moment of a check knows (an outcome's detail,
  a pod's words) is kept from the condition as it stands until there is something newer.

Every message says what to do. Neighbour: `verification` gathers the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from llmkube.api.cached import CachedCandidate, CachedCondition
from llmkube.api.candidates import CandidateResult
from llmkube.api.names import REPORT_ANNOTATION, VERIFIER_SELECTOR
from llmkube.api.names import ReachableReason as Reason
from llmkube.rules.candidates import CandidateList
from llmkube.rules.checks import Bookkeeping, in_utc
from llmkube.rules.report_intake import BadReport, ForeignReport, NoReport, Report
from llmkube.rules.verifier_answer import NoAnswer

_SINCE = " Since then: "
"""Between what was verified and what has kept later checks from an answer."""

_HINTS: Mapping[str, str] = {
    CandidateResult.TIMEOUT: "Timeout: a firewall drops the packets, or the verifier's node has no"
    " route to the Mac (spec.verifier chooses the node)",
    CandidateResult.REFUSED: "Refused: nothing listens on that port; see whether the agent"
    " runs there",
    CandidateResult.PIN_MISMATCH: "PinMismatch: another machine or program answers there, with"
    " another key",
    CandidateResult.CERTIFICATE_MISMATCH: "CertificateMismatch: the right key answers with another"
    " certificate than it reports; restart the agent",
    CandidateResult.NOT_ALLOWED: "NotAllowed: the address policy forbids to dial it (--allow-cidr,"
    " --deny-cidr)",
    CandidateResult.ERROR: "Error: no TLS 1.3 handshake was possible",
}


@dataclass(frozen=True, slots=True)
class Completed:
    """A check gave an answer. `counts` says that it is about the present pin and port; `host_ip`
    is then the first listed address that answered as this Mac. `details` are for people."""

    counts: bool
    host_ip: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)


Ended = Completed | NoAnswer
"""How a check ended, at the moment it does."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the condition depends on."""

    uid: str
    lease_name: str
    spec_fault: str | None
    """What is wrong with spec.hostIP, as a sentence without its end; None if nothing."""
    connected: bool
    report: Report
    listing: CandidateList
    candidates: tuple[CachedCandidate, ...]
    """As they will stand in the status, results included."""
    port: int | None
    same_ingress: bool
    """Pin and port are those in the status."""
    same_candidates: bool
    """So are the addresses, and what was found at each."""
    prior: CachedCondition | None
    prior_host_ip: str | None
    book: Bookkeeping
    """As it will stand in the status."""
    ended: Ended | None = None
    true_expired: bool = False
    """The last success is too long ago to rely on."""
    retry_after: timedelta | None = None
    """After a NoAnswer: how long after the start the next check is tried."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The condition Reachable and `status.hostIP`, which is set only while it is True."""

    status: str
    reason: Reason
    message: str
    host_ip: str | None = None


def judge(facts: Facts) -> Verdict:
    """The condition that these facts amount to."""
    if facts.spec_fault is not None:
        return _invalid_spec(facts.spec_fault)
    if not facts.connected:
        return _DISCONNECTED
    return _bad_inputs(facts) or _true(facts) or _not_true(facts)


def ends_true(facts: Facts) -> bool:
    """Whether a condition that is True now would not be so with these facts."""
    return judge(facts).status != "True"


# What needs no check ----------------------------------------------------------------------------
def _invalid_spec(fault: str) -> Verdict:
    message = (
        f"{fault}. Nothing is dialled. Set spec.hostIP to one plain IP address of the Mac, or"
        " remove it to use the addresses that its agent finds."
    )
    return Verdict("False", Reason.INVALID_SPEC, message)


_DISCONNECTED = Verdict(
    "Unknown",
    Reason.AGENT_DISCONNECTED,
    "The agent is not connected (condition AgentConnected says why), so no address is advertised."
    " The Mac is verified again as soon as its agent is back.",
)


def _bad_inputs(facts: Facts) -> Verdict | None:
    match facts.report:
        case NoReport():
            return Verdict("False", Reason.NO_REPORT, _no_report(facts.lease_name))
        case BadReport(fault):
            return Verdict("False", Reason.INVALID_REPORT, _invalid_report(facts, fault))
        case ForeignReport(uid):
            return Verdict("False", Reason.CERTIFICATE_MISMATCH, _foreign(facts, uid))
    entries = facts.listing.entries
    if not entries:
        message = (
            "The agent reports no address to try. Start it with --host-ip ADDRESS, or set"
            f" spec.hostIP.{_left_out(facts.listing)}"
        )
        return Verdict("False", Reason.NO_CANDIDATES, message)
    if not facts.listing.allowed:
        refused = ", ".join(f"{entry.address} is {entry.refusal}" for entry in entries)
        message = (
            f"The address policy allows none of the addresses: {refused}. Set spec.hostIP to an"
            " address of the Mac that pods in this cluster reach, or change the controller's"
            f" --allow-cidr and --deny-cidr.{_left_out(facts.listing)}"
        )
        return Verdict("False", Reason.NO_ALLOWED_ADDRESS, message)
    return None


def _no_report(lease: str) -> str:
    return (
        f"Lease {lease} carries no report (annotation {REPORT_ANNOTATION}). Start `llmkube agent`"
        " on the Mac with this MetalNode's kubeconfig, and read its log."
    )


def _invalid_report(facts: Facts, fault: str) -> str:
    return (
        f"The agent's report is not valid: {fault}. Bring the agent to the controller's release;"
        f" if it is, something else writes annotation {REPORT_ANNOTATION} of Lease"
        f" {facts.lease_name}."
    )


def _foreign(facts: Facts, uid: str) -> str:
    return (
        f"The agent's certificate names MetalNode UID {uid}, and this one's is {facts.uid}. After"
        " a re-creation the agent makes a new certificate at its next beat. If this stays so, the"
        " Mac uses another MetalNode's state folder or kubeconfig: give it its own."
    )


# True -------------------------------------------------------------------------------------------
def _true(facts: Facts) -> Verdict | None:
    """The Verdict if it is True, or was until now and ends only by its age."""
    if isinstance(facts.ended, Completed) and facts.ended.counts:
        host = facts.ended.host_ip
        return _verified(facts, host, "") if host is not None else None
    if not _stands(facts) or facts.prior_host_ip is None:
        return None
    trouble = _trouble(facts)
    if not facts.true_expired:
        return _verified(facts, facts.prior_host_ip, trouble)
    since = f"The last verification, at {_checked(facts)}, is too long ago to rely on."
    if trouble:
        return Verdict("Unknown", Reason.VERIFIER_FAILED, f"{since} {trouble}")
    message = f"{since} No check has been completed since; is the controller short of check slots?"
    return Verdict("Unknown", Reason.VERIFICATION_PENDING, message)


def _stands(facts: Facts) -> bool:
    """Whether the condition is True and what was verified is still what is reported."""
    prior = facts.prior
    if prior is None or prior.status != "True" or not facts.same_ingress:
        return False
    return any(
        c.address == facts.prior_host_ip and c.result == CandidateResult.REACHABLE
        for c in facts.candidates
    )


def _verified(facts: Facts, host: str, trouble: str) -> Verdict:
    message = (
        f"{host} port {facts.port} showed the reported key and certificate at {_checked(facts)}."
        f"{_left_out(facts.listing)}{_SINCE + trouble if trouble else ''}"
    )
    return Verdict("True", Reason.VERIFIED, message, host)


def _checked(facts: Facts) -> str:
    return in_utc(facts.book.last_check) if facts.book.last_check else "an unknown time"


# Not True ---------------------------------------------------------------------------------------
def _not_true(facts: Facts) -> Verdict:
    trouble = _trouble(facts)
    if trouble:
        return Verdict("Unknown", Reason.VERIFIER_FAILED, trouble)
    if _failed(facts):
        return Verdict("False", Reason.VERIFICATION_FAILED, _failure(facts))
    addresses = ", ".join(facts.listing.allowed)
    message = (
        f"Waiting for a verifier pod to dial port {facts.port} of {addresses}. If this stays so,"
        f" look at the pods with labels {VERIFIER_SELECTOR} in this namespace, and at the"
        f" controller's log.{_left_out(facts.listing)}"
    )
    return Verdict("Unknown", Reason.VERIFICATION_PENDING, message)


def _failed(facts: Facts) -> bool:
    """Whether every address that may be dialled was, and none answered as this Mac."""
    dialled = set(facts.listing.allowed)
    results = [c.result for c in facts.candidates if c.address in dialled]
    if CandidateResult.PENDING in results or CandidateResult.REACHABLE in results:
        return False
    if isinstance(facts.ended, Completed):
        return facts.ended.counts
    return facts.same_ingress and _is(facts.prior, Reason.VERIFICATION_FAILED)


def _failure(facts: Facts) -> str:
    details = facts.ended.details if isinstance(facts.ended, Completed) else _NO_DETAILS
    if facts.prior is not None and facts.ended is None and facts.same_candidates:
        return facts.prior.message  # it knows the details, and `_failed` made sure of its reason
    outcomes = [f"{c.address}: {c.result}" for c in facts.candidates]
    spelt = ", ".join(
        f"{outcome} ({details[c.address]})" if details.get(c.address) else outcome
        for outcome, c in zip(outcomes, facts.candidates, strict=True)
    )
    found = {c.result for c in facts.candidates}
    hints = "; ".join(hint for result, hint in _HINTS.items() if result in found)
    return (
        f"No address answered on port {facts.port} as this Mac at {_checked(facts)}: {spelt}."
        f" {hints}.{_left_out(facts.listing)}"
    )


_NO_DETAILS: Mapping[str, str] = {}


def _is(condition: CachedCondition | None, reason: Reason) -> bool:
    return condition is not None and condition.reason == reason


# Trouble with the verifier itself ---------------------------------------------------------------
def _trouble(facts: Facts) -> str:
    """What keeps checks from giving an answer: news, or what the condition already says."""
    if isinstance(facts.ended, Completed):
        return ""
    if isinstance(facts.ended, NoAnswer):
        return _no_answer(facts, facts.ended)
    prior = facts.prior
    if prior is None:
        return ""
    if prior.reason == Reason.VERIFIER_FAILED:
        return prior.message
    return prior.message.partition(_SINCE)[2] if prior.reason == Reason.VERIFIED else ""


def _no_answer(facts: Facts, ended: NoAnswer) -> str:
    start = facts.book.last_start
    what = f"The check started at {in_utc(start)}" if start else "The check"
    again = ""
    if start is not None and facts.retry_after is not None:
        again = f" The next one follows at {in_utc(start + facts.retry_after)} at the latest."
    advice = f" {ended.advice}" if ended.advice else ""
    return f"{what} gave no answer: {ended.words}. This says nothing about the Mac.{advice}{again}"


def _left_out(listing: CandidateList) -> str:
    parts = []
    if listing.unreadable:
        parts.append(f"{listing.unreadable} reported as no IP addresses")
    if listing.surplus:
        parts.append(f"{listing.surplus} beyond the first {len(listing.entries)}")
    return f" Left out: {', '.join(parts)}." if parts else ""
