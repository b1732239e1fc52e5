"""Verification: everything that the status says about reaching a Mac, decided from what is seen.

`decide` is the whole rule. It takes up the Mac's report (`report_intake`), makes the candidate list
(`candidates`), reads what has become of the running check (`verifier_answer`), keeps the
bookkeeping and says when the next check may start (`checks`), and judges the condition
(`reachable`). What it has to remember from one time to the next, beyond the status, is in
`Memory`; losing that (a restart, another leader) delays something by seconds and breaks nothing.

Neighbour: `reconcilers.verification` carries the decision out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from llmkube.api.cached import CachedCandidate, CachedCondition, CachedMetalNode, CachedPod
from llmkube.api.names import ConditionType, ReachableReason
from llmkube.api.spki import SpkiPin
from llmkube.api.times import parse_time
from llmkube.clock import Now
from llmkube.rules import reachable
from llmkube.rules.calm import FOREVER
from llmkube.rules.candidates import (
    NO_CANDIDATES,
    CandidateList,
    InvalidHostIP,
    list_candidates,
    read_host_ip,
    with_results,
)
from llmkube.rules.check_progress import (
    Check,
    CheckResult,
    Present,
    Progress,
    Refusal,
    TroubleSince,
    follow,
)
from llmkube.rules.checks import (
    Anchors,
    Bookkeeping,
    CheckInputs,
    CheckSettings,
    Claim,
    Started,
    asks,
    backoff,
    last_inputs,
    next_start,
)
from llmkube.rules.conditions import build_condition, turned
from llmkube.rules.decision import Decision, EventNote, EventType
from llmkube.rules.liveness import INSTANT
from llmkube.rules.reachable import Facts, Verdict
from llmkube.rules.report_intake import GoodReport, Report, Taken, take_up
from llmkube.rules.verifier_answer import NoAnswer, one_line
from llmkube.verifier.policy import AddressPolicy

_TOLD = 32
"""Faults of reports that are remembered as told."""


_NO_ANCHORS = Anchors()
_NO_BOOK = Bookkeeping()


# What is seen -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of one MetalNode, by UID."""

    uid: str
    taken: Taken | None = None
    anchors: Anchors = _NO_ANCHORS
    started: Started | None = None
    trouble: TroubleSince | None = None
    refusal: Refusal | None = None
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """One MetalNode and what belongs to it. `pod` is the one that podUID names; `pod_gone` says
    that a live read did not find it either. Up to and including `calm_until` it is our own
    blindness that kept checks from being made (see `calm`)."""

    node: CachedMetalNode
    report_text: str | None = None
    pod: CachedPod | None = None
    pod_gone: bool = False
    calm_until: timedelta | None = None
    memory: Memory | None = None


_NO_MEMORY = Memory("")


# What is decided --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plan:
    """A check that may start now. `last_start`, monotonic, says when this Mac had its last one,
    None if never: it decides whose turn it is."""

    inputs: CheckInputs
    input_hash: str
    last_start: timedelta | None


class VerificationDecision(Decision, frozen=True, gc=False):
    """What the status shall be, what to remember once it is, and the check to start, if any."""

    memory: Memory = _NO_MEMORY
    book: Bookkeeping = _NO_BOOK
    plan: Plan | None = None
    """The check that may start now, if there is a slot for it."""
    starting: Plan | None = None
    """The check of whose start `status` is the first write."""
    result: CheckResult | None = None
    """How a check ended just now, as the metric counts it."""


def start(
    decision: VerificationDecision, settings: CheckSettings, now: Now
) -> VerificationDecision:
    """The decision with the first write of a start in it. It must have a plan."""
    assert decision.plan is not None
    assert decision.status is not None
    book = decision.book.started(now)
    anchors = decision.memory.anchors.seen(book, now)
    started = Started(book.last_start, decision.plan.input_hash)
    deadline = anchors.start.mono + settings.timeout if anchors.start is not None else None
    return msgspec.structs.replace(
        decision,
        status={**decision.status, "verification": book.to_json()},
        wake_at=_earliest((decision.wake_at, deadline), after=now.mono),
        memory=replace(decision.memory, anchors=anchors, started=started, trouble=None),
        book=book,
        starting=decision.plan,
    )


def decide(
    seen: Seen, settings: CheckSettings, policy: AddressPolicy, now: Now
) -> VerificationDecision:
    """What is true of this MetalNode now, and what is to be done."""
    return _Case(seen, settings, policy, now).decide()


# One report's view of the Mac -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _View:
    """What a report amounts to. A report that is no good leaves all as it stands in the status."""

    report: Report
    pin: SpkiPin | None
    port: int | None
    listing: CandidateList
    candidates: tuple[CachedCandidate, ...]
    same_ingress: bool


@dataclass(frozen=True, slots=True)
class _Turn:
    """Whose turn it is: when a check may start, and the check itself once it may."""

    started: Started | None
    ready: timedelta | None = None
    plan: Plan | None = None


class _Case:
    """The facts that every step of one decision shares."""

    def __init__(
        self, seen: Seen, settings: CheckSettings, policy: AddressPolicy, now: Now
    ) -> None:
        self.node = seen.node
        self.status = seen.node.status
        self.uid = seen.node.metadata.uid
        self.seen = seen
        self.settings = settings
        self.policy = policy
        self.now = now
        known = seen.memory
        self.memory = known if known is not None and known.uid == self.uid else Memory(self.uid)
        self.book = Bookkeeping.of(self.status.verification)
        self.anchors = self.memory.anchors.seen(self.book, now)
        self.prior = self.status.condition(ConditionType.REACHABLE)
        self.host_ip, self.spec_fault = _read_spec(seen.node.spec.host_ip)
        connected = self.status.condition(ConditionType.AGENT_CONNECTED)
        self.connected = connected is not None and connected.status == "True"
        self.connected_since = _since(connected) if self.connected else None

    def decide(self) -> VerificationDecision:
        was_true = self.prior is not None and self.prior.status == "True"
        intake = take_up(
            self.memory.taken,
            self.seen.report_text,
            self.uid,
            self.now,
            every=self.settings.intake,
            ends_true=self._would_end_true if was_true else None,
        )
        view = self._view(intake.taken.report)
        progress = self._follow(view)
        verdict = reachable.judge(self._facts(view, progress))
        anchors = self.anchors.seen(progress.book, self.now)
        turn = self._turn(view, progress.book, anchors, verdict)
        events, told = self._events(view, verdict)
        instants = (
            intake.wake_at,
            progress.wake_at,
            turn.ready,
            self._true_ends(verdict, anchors),
        )
        return VerificationDecision(
            status=self._render(view, progress, verdict),
            events=events,
            wake_at=_earliest(instants, after=self.now.mono),
            confirm_live=self._needs_proof(verdict, progress),
            memory=Memory(
                self.uid, intake.taken, anchors, turn.started, progress.trouble, told=told
            ),
            book=progress.book,
            plan=turn.plan,
            result=progress.result,
        )

    # The report ---------------------------------------------------------------------------------
    def _would_end_true(self, report: Report) -> bool:
        view = self._view(report)
        return reachable.ends_true(self._facts(view, Progress(self.book, view.candidates)))

    def _view(self, report: Report) -> _View:
        before = self.status
        if not isinstance(report, GoodReport):
            pin = _parse_pin(before.ingress_spki)
            return _View(report, pin, before.ingress_port, NO_CANDIDATES, before.candidates, True)
        said = report.report
        same = before.ingress_port == said.ingress_port and before.ingress_spki == str(
            said.ingress_spki
        )
        listing = list_candidates(self.host_ip, said.candidates, self.policy)
        candidates = with_results(listing.entries, before.candidates, same_ingress=same)
        return _View(report, said.ingress_spki, said.ingress_port, listing, candidates, same)

    def _inputs(self, view: _View) -> CheckInputs | None:
        """What a check would ask; None while there is nothing to ask, or nobody to ask about."""
        ready = self.connected and self.spec_fault is None
        if not ready or not isinstance(view.report, GoodReport) or not view.listing.allowed:
            return None
        said = view.report.report
        return CheckInputs(
            pin=said.ingress_spki,
            certificate=said.ingress_certificate,
            port=said.ingress_port,
            addresses=view.listing.allowed,
            placement=self.node.spec.verifier,
        )

    # The check ----------------------------------------------------------------------------------
    def _follow(self, view: _View) -> Progress:
        seen, memory = self.seen, self.memory
        check = Check(
            self.book, self.anchors.start, seen.pod, seen.pod_gone, memory.trouble, memory.refusal
        )
        pin = view.pin.digest if view.pin is not None else None
        present = Present(pin, view.port, view.candidates)
        return follow(check, present, self.settings, self.policy, self.now)

    # The condition ------------------------------------------------------------------------------
    def _facts(self, view: _View, check: Progress) -> Facts:
        retry = None
        if isinstance(check.ended, NoAnswer):
            retry = self.settings.timeout + backoff(check.book.failures, self.settings)
        return Facts(
            uid=self.uid,
            lease_name=self.node.spec.lease_name,
            spec_fault=self.spec_fault,
            connected=self.connected,
            report=view.report,
            listing=view.listing,
            candidates=check.candidates,
            port=view.port,
            same_ingress=view.same_ingress,
            same_candidates=check.candidates == self.status.candidates,
            prior=self.prior,
            prior_host_ip=self.status.host_ip,
            book=check.book,
            ended=check.ended,
            true_expired=self._true_expired(),
            retry_after=retry,
        )

    def _true_expired(self) -> bool:
        """Whether the last success is too long ago. An outage of ours ends no True by itself."""
        last, calm = self.anchors.check, self.seen.calm_until
        if last is None:
            return True
        held = calm is not None and self.now.mono <= calm
        return self.now.mono >= last.mono + self.settings.true_lasts and not held

    # The schedule -------------------------------------------------------------------------------
    def _turn(self, view: _View, book: Bookkeeping, anchors: Anchors, verdict: Verdict) -> _Turn:
        inputs = self._inputs(view)
        if inputs is None:
            return _Turn(self.memory.started)
        input_hash = inputs.hash()
        started = last_inputs(self.memory.started, book, input_hash)
        claim = Claim(
            uid=self.uid,
            book=book,
            anchors=anchors,
            input_hash=input_hash,
            last_started_hash=started.input_hash,
            reachable=verdict.status == "True",
            asked=asks(self.node.asked, book.last_start),
            connected_since=self.connected_since,
        )
        ready = next_start(claim, self.settings)
        if ready is None or ready > self.now.mono:
            return _Turn(started, ready)
        waiting = anchors.start.mono if anchors.start is not None else None
        return _Turn(started, ready, Plan(inputs, input_hash, waiting))

    def _true_ends(self, verdict: Verdict, anchors: Anchors) -> timedelta | None:
        if verdict.status != "True" or anchors.check is None:
            return None
        end = anchors.check.mono + self.settings.true_lasts
        calm = self.seen.calm_until
        if calm is None or calm < end:
            return end
        return None if calm == FOREVER else calm + INSTANT

    def _needs_proof(self, verdict: Verdict, progress: Progress) -> bool:
        """Whether this takes something away that a cache may only have been late to show."""
        was_true = self.prior is not None and self.prior.status == "True"
        gave_up = self.book.running and isinstance(progress.ended, NoAnswer)
        return gave_up or (was_true and verdict.status != "True")

    # The result ---------------------------------------------------------------------------------
    def _render(self, view: _View, check: Progress, verdict: Verdict) -> Mapping[str, Any]:
        generation = self.node.metadata.generation
        condition = build_condition(
            self.prior,
            ConditionType.REACHABLE,
            verdict.status,
            verdict.reason,
            verdict.message,
            generation=generation,
            now=self.now.wall,
        )
        return {
            "conditions": [condition],
            "observedGeneration": generation,
            "hostIP": verdict.host_ip,
            "ingressPort": view.port,
            "ingressSPKI": str(view.pin) if view.pin is not None else None,
            "candidates": [msgspec.to_builtins(c) for c in check.candidates],
            "verification": check.book.to_json(),
        }

    def _events(
        self, view: _View, verdict: Verdict
    ) -> tuple[tuple[EventNote, ...], tuple[str, ...]]:
        told = () if verdict.status == "True" else self.memory.told  # a fault after that is new
        events: list[EventNote] = []
        before = self.status.ingress_spki
        if before and view.pin is not None and before != str(view.pin):
            events.append(_key_changed(self.node, before, str(view.pin)))
        if verdict.reason is ReachableReason.INVALID_REPORT:
            known = self.prior.message if self.prior is not None else ""
            if verdict.message != known and verdict.message not in told:
                events.append(_changed(verdict))
            told = _remember(told, verdict.message)
        elif _worth_telling(self.prior, verdict):
            events.append(_changed(verdict))
        return tuple(events), told


# Small parts ------------------------------------------------------------------------------------
def _read_spec(host_ip: str | None) -> tuple[str | None, str | None]:
    """spec.hostIP in canonical form, and what is wrong with it."""
    try:
        return read_host_ip(host_ip), None
    except InvalidHostIP as error:
        return None, one_line(f'spec.hostIP "{host_ip}" {error}')


def _since(condition: CachedCondition | None) -> datetime | None:
    return parse_time(condition.last_transition_time) if condition is not None else None


def _parse_pin(text: str | None) -> SpkiPin | None:
    try:
        return SpkiPin.parse(text) if text else None
    except ValueError:
        return None


def _key_changed(node: CachedMetalNode, before: str, after: str) -> EventNote:
    metadata = node.metadata
    return EventNote(
        EventType.WARNING,
        "IngressKeyChanged",
        "Verify",
        f"The agent's ingress key changed from {before} to {after}. If nobody reinstalled the agent"
        " or removed its state, somebody else may hold its credential: look at the Mac, and run"
        f" `llmkube metal token rotate {metadata.name} -n {metadata.namespace}`.",
    )


def _changed(verdict: Verdict) -> EventNote:
    calm = verdict.status == "True" or verdict.reason is ReachableReason.VERIFICATION_PENDING
    kind = EventType.NORMAL if calm else EventType.WARNING
    return EventNote(kind, verdict.reason, "Verify", verdict.message)


def _worth_telling(prior: CachedCondition | None, verdict: Verdict) -> bool:
    """Whether the change of the condition is news: not its first value, and not mere waiting."""
    if not turned(prior, verdict.status, verdict.reason):
        return False
    waiting = verdict.reason is ReachableReason.VERIFICATION_PENDING
    return not (waiting and prior is not None and prior.status == "Unknown")


def _remember(told: tuple[str, ...], message: str) -> tuple[str, ...]:
    return told if message in told else (*told, message)[-_TOLD:]


def _earliest(instants: Iterable[timedelta | None], *, after: timedelta) -> timedelta | None:
    return min((i for i in instants if i is not None and i > after), default=None)
