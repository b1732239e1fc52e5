"""Intake: which of a Mac's reports counts.

A Mac may change its report with every beat. If each change were taken up, it would decide how
often the controller writes and how long a True lasts. So a new report is taken up at most once per
`intake`; only one that ends a True acts at once, because a True must never outlive its reason.

Neighbour: `verification` asks here first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from llmkube.api.report import AgentReport, InvalidReport, parse_report
from llmkube.clock import Now


@dataclass(frozen=True, slots=True)
class NoReport:
    """There is no Lease, or it carries no report."""


@dataclass(frozen=True, slots=True)
class BadReport:
    """A report that breaks its contract; `fault` names the field and says why."""

    fault: str


@dataclass(frozen=True, slots=True)
class ForeignReport:
    """A well-formed report whose certificate names another MetalNode's UID."""

    certificate_uid: str


@dataclass(frozen=True, slots=True)
class GoodReport:
    report: AgentReport


Report = NoReport | BadReport | ForeignReport | GoodReport


def read_report(text: str | None, uid: str) -> Report:
    """What the annotation's text says about the MetalNode with that UID."""
    if text is None:
        return NoReport()
    try:
        report = parse_report(text)
    except InvalidReport as error:
        return BadReport(str(error))
    if report.certificate_uid != uid.lower():
        return ForeignReport(report.certificate_uid)
    return GoodReport(report)


@dataclass(frozen=True, slots=True)
class Taken:
    """The report that counts, and the monotonic instant at which it was taken up."""

    text: str | None
    report: Report
    at: timedelta


@dataclass(frozen=True, slots=True)
class Intake:
    """`wake_at` is when a newer report that has to wait will be taken up."""

    taken: Taken
    wake_at: timedelta | None = None


def take_up(
    taken: Taken | None,
    text: str | None,
    uid: str,
    now: Now,
    *,
    every: timedelta,
    ends_true: Callable[[Report], bool] | None,
) -> Intake:
    """Decide which report counts now. `ends_true` is None where there is no True to end."""
    if taken is None:
        # To find no report is not to take one up: the first one ever is not kept waiting.
        at = now.mono if text is not None else now.mono - every
        return Intake(Taken(text, read_report(text, uid), at))
    if text == taken.text:
        return Intake(taken)
    due = taken.at + every
    if now.mono >= due:
        return Intake(Taken(text, read_report(text, uid), now.mono))
    if ends_true is not None:
        report = read_report(text, uid)
        if ends_true(report):
            return Intake(Taken(text, report, now.mono))
    return Intake(taken, wake_at=due)
