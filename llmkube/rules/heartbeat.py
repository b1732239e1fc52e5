"""Heartbeats of Macs: AgentConnected, and what is mirrored from the agent's Lease and report.

`decide_heartbeat` turns what is known of one MetalNode into the complete status of the owner
`llmkube-heartbeat`. It promises

* AgentConnected by the rule of `liveness`, with trust in every change (k = 0): renewTime alone
  decides, no report can cost it;
* a deleted ServiceAccount cuts the Mac off at once, whatever still beats, but only once a live
  read lacks the account, too;
* at most one write per `write_interval` of the controller's own time, whatever the Mac does,
  unless AgentConnected itself changes;
* messages that do not change by themselves.

Read `reconcilers.heartbeat` for where the facts come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any

import msgspec

from llmkube.api.cached import CachedCondition, CachedMetalNode
from llmkube.api.names import ConditionType, ConnectedReason
from llmkube.api.report import AgentReport, ReportedCapacity
from llmkube.api.times import format_time, parse_time
from llmkube.clock import Now
from llmkube.rules.conditions import build_condition
from llmkube.rules.decision import Decision, EventNote, EventType
from llmkube.rules.liveness import DEAD, Judgement, Record, Trust, judge
from llmkube.rules.quantity import format_bytes
from llmkube.rules.skew import skew_event, skew_word

_INT32 = 1 << 31
_CLOCK = "The Mac's clock"
_GRAVITY: dict[str, int] = {
    ConnectedReason.HEARTBEAT_RECEIVED: 0,
    ConnectedReason.NEVER_CONNECTED: 1,
    ConnectedReason.HEARTBEAT_EXPIRED: 1,
    ConnectedReason.LEASE_NOT_FOUND: 2,
    ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND: 3,
}


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """`default_timeout` holds for a Lease without leaseDurationSeconds; others are clamped to
    `least_timeout`–`most_timeout`. lastHeartbeatTime follows once it is more than `mirror_after`
    off. `second` is how long a second of leaseDurationSeconds lasts: tests shorten it."""

    default_timeout: timedelta = timedelta(seconds=120)
    least_timeout: timedelta = timedelta(seconds=15)
    most_timeout: timedelta = timedelta(seconds=600)
    mirror_after: timedelta = timedelta(seconds=60)
    write_interval: timedelta = timedelta(seconds=60)
    second: timedelta = timedelta(seconds=1)
    trust: Trust = field(default_factory=lambda: Trust(changes=0))

    def timeout(self, lease_duration_seconds: int | None) -> timedelta:
        """How long a renewal of a Lease with this duration counts."""
        if lease_duration_seconds is None:
            return self.default_timeout
        wanted = self.second * min(max(lease_duration_seconds, 0), _INT32)
        return min(max(wanted, self.least_timeout), self.most_timeout)


class Account(Enum):
    """The Mac's ServiceAccount, as far as we know."""

    PRESENT = auto()
    UNSEEN = auto()
    """The synced cache lacks it, which is no proof yet."""
    MISSING = auto()
    """A live read lacks it, too."""


class Mirror(msgspec.Struct, frozen=True, gc=False):
    """What a valid report says for people: mirrored as it is, never judged."""

    agent_version: str | None
    capacity: dict[str, Any]

    @classmethod
    def of(cls, report: AgentReport) -> Mirror:
        """The mirrored part of a report."""
        return cls.of_parts(report.agent_version, report.capacity)

    @classmethod
    def of_parts(cls, agent_version: str, reported: ReportedCapacity) -> Mirror:
        """The mirrored part, of a version and a capacity."""
        memory = reported.memory_bytes
        capacity = {
            "chip": reported.chip,
            "gpuCores": reported.gpu_cores,
            "memory": None if memory is None else format_bytes(memory),
            "memoryBytes": memory,
            "metalVersion": reported.metal_version,
        }
        return cls(agent_version or None, {k: v for k, v in capacity.items() if v is not None})


class HeartbeatFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known of one MetalNode.

    `record` is what was seen of its Lease's renewTime, if the Lease exists (`lease_exists`).
    `mirror` is None without a valid report. `calm_until` is `calm.Sight`'s answer for the Lease
    watch. `last_write` is when this owner last wrote the status (monotonic), None if unknown.
    """

    node: CachedMetalNode
    lease_exists: bool
    record: Record | None
    account: Account
    mirror: Mirror | None
    calm_until: timedelta | None
    last_write: timedelta | None
    skew_announced: bool

    @property
    def condition(self) -> CachedCondition | None:
        """AgentConnected as it is in the status now."""
        return self.node.status.condition(ConditionType.AGENT_CONNECTED)

    @property
    def was_connected(self) -> bool:
        return self.condition is not None and self.condition.status == "True"


def decide_heartbeat(facts: HeartbeatFacts, now: Now, settings: HeartbeatSettings) -> Decision:
    """The decision for one MetalNode. Pure."""
    life = _life(facts, now, settings)
    reason = _reason(facts, life)
    status = "True" if reason is ConnectedReason.HEARTBEAT_RECEIVED else "False"
    message = _message(facts, reason, settings)
    previous = facts.condition
    condition = build_condition(
        previous,
        ConditionType.AGENT_CONNECTED,
        status,
        reason,
        message,
        generation=facts.node.metadata.generation,
        now=now.wall,
    )
    when = _write_at(facts, condition, now, settings)
    due = when is not None and when <= now.mono
    return Decision(
        status=_complete(facts, condition) if due else None,
        events=_events(facts, status, reason, message, settings),
        wake_at=_earliest(life.wake_at, None if due else when),
        confirm_live=facts.account is Account.UNSEEN or (facts.was_connected and status == "False"),
    )


def _life(facts: HeartbeatFacts, now: Now, settings: HeartbeatSettings) -> Judgement:
    if facts.account is Account.MISSING or not facts.lease_exists:
        return DEAD  # no expiry, hence never held back
    if facts.record is None and facts.node.status.last_heartbeat_time is None:
        return DEAD
    return judge(
        facts.record,
        settings.default_timeout if facts.record is None else facts.record.period,
        now,
        known=facts.was_connected,
        calm_until=facts.calm_until,
    )


def _reason(facts: HeartbeatFacts, life: Judgement) -> ConnectedReason:
    if facts.account is Account.MISSING:
        return ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND
    if not facts.lease_exists:
        return ConnectedReason.LEASE_NOT_FOUND
    if life.alive:
        return ConnectedReason.HEARTBEAT_RECEIVED
    if facts.record is None and facts.node.status.last_heartbeat_time is None:
        return ConnectedReason.NEVER_CONNECTED
    return ConnectedReason.HEARTBEAT_EXPIRED


# When to write ----------------------------------------------------------------------------------
def _write_at(
    facts: HeartbeatFacts,
    condition: dict[str, str | int],
    now: Now,
    settings: HeartbeatSettings,
) -> timedelta | None:
    """When to write: now if AgentConnected changes; once the budget allows if lastHeartbeatTime
    is off; else never. All other fields travel along: none of them is worth a write of its own."""
    if _condition_changes(facts.condition, condition):
        return now.mono
    if facts.record is None or not mirror_is_off(
        facts.record.stamp, facts.node.status.last_heartbeat_time, settings
    ):
        return None
    return write_allowed_at(facts.last_write, now, settings)


def mirror_is_off(stamp: datetime, mirrored: str | None, settings: HeartbeatSettings) -> bool:
    """Whether lastHeartbeatTime has to follow `stamp`: it is whole seconds, and may lag a bit.

    A Mac's clock may step back, so ahead of the stamp is off as well.
    """
    at = parse_time(mirrored)
    return at is None or abs(stamp.replace(microsecond=0) - at) > settings.mirror_after


def write_allowed_at(
    last_write: timedelta | None, now: Now, settings: HeartbeatSettings
) -> timedelta:
    """The monotonic instant from which on lastHeartbeatTime may be written again."""
    return now.mono if last_write is None else last_write + settings.write_interval


def _condition_changes(previous: CachedCondition | None, wanted: dict[str, str | int]) -> bool:
    return previous is None or (previous.status, previous.reason, previous.observed_generation) != (
        wanted["status"],
        wanted["reason"],
        wanted["observedGeneration"],
    )


def _complete(facts: HeartbeatFacts, condition: dict[str, str | int]) -> dict[str, Any]:
    """All fields of this owner: what is not known anew is kept as it is."""
    known, record, mirror = facts.node.status, facts.record, facts.mirror
    return {
        "conditions": [condition],
        "lastHeartbeatTime": known.last_heartbeat_time
        if record is None
        else format_time(record.stamp),
        "agentVersion": known.agent_version if mirror is None else mirror.agent_version,
        "capacity": msgspec.to_builtins(known.capacity) if mirror is None else mirror.capacity,
    }


def _earliest(*instants: timedelta | None) -> timedelta | None:
    return min((instant for instant in instants if instant is not None), default=None)


def _events(
    facts: HeartbeatFacts,
    status: str,
    reason: ConnectedReason,
    message: str,
    settings: HeartbeatSettings,
) -> tuple[EventNote, ...]:
    events = []
    if _worth_telling(facts.condition, status, reason):
        kind = EventType.NORMAL if status == "True" else EventType.WARNING
        events.append(EventNote(kind, reason, "SetAgentConnected", message))
    skew = skew_event(facts.record, settings.trust, _CLOCK)
    if skew is not None and not facts.skew_announced:
        events.append(skew)
    return tuple(events)


def _worth_telling(previous: CachedCondition | None, status: str, reason: ConnectedReason) -> bool:
    """A change of status is; so is a graver reason. A registration that gets on is neither."""
    if previous is None:
        return False
    return previous.status != status or _GRAVITY[reason] > _GRAVITY.get(previous.reason, 0)


def _skew(facts: HeartbeatFacts, settings: HeartbeatSettings) -> str:
    return skew_word(facts.record, settings.trust, _CLOCK)


# What to say ------------------------------------------------------------------------------------
def _message(facts: HeartbeatFacts, reason: ConnectedReason, settings: HeartbeatSettings) -> str:
    metadata, spec = facts.node.metadata, facts.node.spec
    create = f"`llmkube metal token create {metadata.name} -n {metadata.namespace}`"
    match reason:
        case ConnectedReason.HEARTBEAT_RECEIVED:
            return f"The agent renews Lease {spec.lease_name}.{_skew(facts, settings)}"
        case ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND:
            return (
                f"ServiceAccount {spec.service_account_name} does not exist: this Mac's access is "
                f"revoked. To let it in again, run {create} and put the new file on the Mac."
            )
        case ConnectedReason.LEASE_NOT_FOUND:
            return (
                f"Lease {spec.lease_name} does not exist. Run {create} again: it creates what is "
                "missing and keeps the rest."
            )
        case ConnectedReason.NEVER_CONNECTED:
            return (
                f"The agent has never renewed Lease {spec.lease_name}. Start `llmkube agent` on "
                f"the Mac with the file that {create} wrote, and look at its log."
            )
        case ConnectedReason.HEARTBEAT_EXPIRED:
            return _expired_message(facts, settings)


def _expired_message(facts: HeartbeatFacts, settings: HeartbeatSettings) -> str:
    record, lease = facts.record, facts.node.spec.lease_name
    if record is not None and not record.improves and not facts.was_connected:
        return (
            f"Lease {lease} was renewed at {format_time(record.stamp)}, which is ahead of the "
            "controller's clock and proves nothing; the next renewal will. If none comes, look at "
            "the log of the agent; set the Mac's clock by NTP."
        )
    last = facts.node.status.last_heartbeat_time if record is None else format_time(record.stamp)
    counts = settings.default_timeout if record is None else record.period
    return (
        f"The agent last renewed Lease {lease} at {last}, and a renewal counts for "
        f"{counts.total_seconds():g} s. Check that the Mac is awake and online, and look at the "
        f"log of its agent.{_skew(facts, settings)}"
    )
