"""The phase of an edge cluster: Connected, Stale or Unreachable, from its heartbeats.

Two bounds by one rule (`liveness`, with k = 2): alive within 3 intervals is Connected, within 10
Stale, beyond that Unreachable, both bounds inclusive. `decide_phase` owns `status.phase` and
nothing else. A shorter interval counts from the next push, since it was not in force when the site
decided when to push next; a longer one counts at once. Read `reconcilers.federatedcluster` next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from llmkube.api.cached import CachedFederatedCluster
from llmkube.api.names import Phase
from llmkube.api.times import format_time
from llmkube.clock import Now
from llmkube.rules.calm import Sight
from llmkube.rules.decision import Decision, EventNote, EventType
from llmkube.rules.liveness import Judgement, Record, Trust, judge
from llmkube.rules.skew import skew_event

_ORDER = {Phase.CONNECTED: 0, Phase.STALE: 1, Phase.UNREACHABLE: 2}


@dataclass(frozen=True, slots=True)
class PhaseSettings:
    """`stale_after` and `unreachable_after` count intervals; `second` is how long a
    second of heartbeatIntervalSeconds lasts: tests shorten it."""

    default_interval: timedelta = timedelta(seconds=30)
    stale_after: int = 3
    unreachable_after: int = 10
    second: timedelta = timedelta(seconds=1)
    trust: Trust = field(default_factory=lambda: Trust(changes=2))

    def interval(self, seconds: int | None) -> timedelta:
        """The interval that spec.heartbeatIntervalSeconds asks for."""
        if seconds is None or seconds <= 0:
            return self.default_interval
        return self.second * min(seconds, 1 << 31)


class PhaseFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known of one FederatedCluster: its cached object, what was seen of its heartbeats,
    how well we saw, and whether its skew has been announced."""

    cluster: CachedFederatedCluster
    record: Record | None
    sight: Sight
    skew_announced: bool

    @property
    def phase(self) -> Phase | None:
        """The phase as it is in the status now; None if absent or no phase that we know."""
        text = self.cluster.status.phase
        return Phase(text) if text in _ORDER else None


def interval_in_force(facts: PhaseFacts, settings: PhaseSettings) -> timedelta:
    """The interval that bounds are multiples of: the longer of the one that was set when the site
    last pushed, and the one that is set now."""
    wanted = settings.interval(facts.cluster.spec.heartbeat_interval_seconds)
    return wanted if facts.record is None else max(facts.record.period, wanted)


def decide_phase(facts: PhaseFacts, now: Now, settings: PhaseSettings) -> Decision:
    """The decision for one FederatedCluster. Pure."""
    was = facts.phase
    phase, wake_at = _phase(facts, now, settings)
    demotes = was is not None and _ORDER[phase] > _ORDER[was]
    events = []
    if was is not None and phase is not was:
        events.append(_phase_changed(was, phase, facts.record, demotes=demotes))
    skew = skew_event(facts.record, settings.trust, "The site's clock")
    if skew is not None and not facts.skew_announced:
        events.append(skew)
    return Decision(
        status={"phase": phase}, events=tuple(events), wake_at=wake_at, confirm_live=demotes
    )


def _phase(facts: PhaseFacts, now: Now, settings: PhaseSettings) -> tuple[Phase, timedelta | None]:
    connected = _within(settings.stale_after, Phase.CONNECTED, facts, now, settings)
    if connected.alive:
        return Phase.CONNECTED, connected.wake_at
    stale = _within(settings.unreachable_after, Phase.STALE, facts, now, settings)
    return (Phase.STALE if stale.alive else Phase.UNREACHABLE), stale.wake_at


def _within(
    intervals: int, phase: Phase, facts: PhaseFacts, now: Now, settings: PhaseSettings
) -> Judgement:
    """Whether the site is alive within that many intervals; known if in `phase` or better."""
    interval = interval_in_force(facts, settings)
    timeout = interval * intervals
    return judge(
        facts.record,
        timeout,
        now,
        known=facts.phase is not None and _ORDER[facts.phase] <= _ORDER[phase],
        calm_until=facts.sight.calm_until(timeout, interval * settings.trust.changes),
    )


def _phase_changed(was: Phase, phase: Phase, record: Record | None, *, demotes: bool) -> EventNote:
    last = (
        "none was ever seen" if record is None else f"the last was at {format_time(record.stamp)}"
    )
    advice = (
        "Check `llmkube edge` at the site, its way to this cluster, and its credential."
        if demotes
        else "Nothing is to be done."
    )
    return EventNote(
        EventType.WARNING if demotes else EventType.NORMAL,
        "PhaseChanged",
        "SetPhase",
        f"Phase went from {was} to {phase}. Heartbeats of this site: {last}. {advice}",
    )
