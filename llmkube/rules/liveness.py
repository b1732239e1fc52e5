"""Liveness: is the sender of a stamp still alive?

One pure rule for Macs (a Lease's renewTime) and edge clusters (lastHeartbeatTime): alive means
`now <= reference + timeout`, on the monotonic clock, and the next instant is the one to wake at.
A `Record` is what one observer knows of one sender. `observe` folds sightings into it: each stamp
fixes the reference once, when it is seen, so that a later step of our own wall clock changes
nothing. How far a stamp is believed depends on how it was come by:

* at *first sight* (a start, a re-list after blindness, a new UID, a first stamp) it is judged by
  its own age; if it lies in the future it proves nothing and hence improves nothing;
* as an *observed change* it is trusted to mean "alive when seen" once `Trust.changes` changes
  before it in a row have moved the stamp forward; until then it is judged by its own age, too.
  So a sender whose clock is slow by hours is alive, and an old stamp is simply old.

Nothing here ever raises or reads a clock. `judge` adds what holds expiry back; read `calm` for
that, then `heartbeat` and `phase`, which put the rule to work.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from llmkube.clock import ZERO, Now
from llmkube.rules.calm import FOREVER

INSTANT = timedelta(microseconds=1)
"""The grain of our clocks: bounds are inclusive, and this is the first moment after."""


@dataclass(frozen=True, slots=True)
class Trust:
    """When an observed change is believed, and from where on clocks disagree.

    `changes` is how many changes before it in a row must have moved the stamp forward. Within
    `tolerance` a stamp's own age is believed, whoever sent it: that much is the way it took, not
    skew. Skew beyond `skew_limit` is worth a warning.
    """

    changes: int
    tolerance: timedelta = timedelta(seconds=2)
    skew_limit: timedelta = timedelta(seconds=60)


class Sighting(msgspec.Struct, frozen=True, gc=False):
    """A sender's stamp as it was just seen.

    `uid` is the UID of the object that carries it; `stamp` is None where there is none. `period`
    is what the object says of its rhythm (a timeout or an interval); it holds from this stamp on.
    `first_sight` says that this came from a list rather than from a change that we watched.
    """

    uid: str
    stamp: datetime | None
    period: timedelta
    first_sight: bool
    late: bool = False
    """It may have waited until our sight came back: its age says nothing about a clock."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """What we know of one sender. Instants without a date are monotonic readings."""

    uid: str
    stamp: datetime
    period: timedelta
    """The timeout or interval that was in force when the stamp was seen."""
    seen: timedelta
    """When the stamp was first seen."""
    reference: timedelta
    """When the sender was last alive, for all we can tell. Never later than `seen`."""
    forward: int = 0
    """How many changes in a row have moved the stamp forward; counted up to `Trust.changes`."""
    improves: bool = True
    """False for a stamp from the future at first sight: it may postpone expiry, never end it."""
    backwards: bool = False
    """The stamp was seen moving backwards, and is judged by its age."""
    skew: timedelta | None = None
    """Sender's clock minus ours at the last trusted change; None before there was one."""


def observe(record: Record | None, sighting: Sighting, now: Now, trust: Trust) -> Record | None:
    """The record after a sighting; None as long as no stamp was ever seen.

    Idempotent: the same stamp again is no news. A stamp that is gone is silence, not news either.
    """
    if record is None or record.uid != sighting.uid:
        return None if sighting.stamp is None else _first(sighting, sighting.stamp, now, trust)
    stamp = sighting.stamp
    if stamp is None or stamp == record.stamp:
        return record
    if sighting.first_sight:
        return _seen_again(record, _first(sighting, stamp, now, trust), trust)
    return _changed(record, sighting, stamp, now, trust)


def _own_reference(stamp: datetime, now: Now) -> timedelta:
    return now.mono - max(ZERO, now.wall - stamp)


def _first(sighting: Sighting, stamp: datetime, now: Now, trust: Trust) -> Record:
    return Record(
        uid=sighting.uid,
        stamp=stamp,
        period=sighting.period,
        seen=now.mono,
        reference=_own_reference(stamp, now),
        improves=stamp - now.wall <= trust.tolerance,
    )


def _seen_again(record: Record, first: Record, trust: Trust) -> Record:
    """After blindness: not a change, but the sender cannot have died before what we knew.

    Unless the stamp went back: then what we knew of a sender who needs our trust is void.
    """
    if first.stamp < record.stamp and trust.changes > 0:
        return msgspec.structs.replace(first, skew=record.skew)
    return msgspec.structs.replace(
        first,
        reference=max(first.reference, record.reference),
        forward=record.forward,
        skew=record.skew,
    )


def _changed(record: Record, sighting: Sighting, stamp: datetime, now: Now, trust: Trust) -> Record:
    forward = stamp > record.stamp
    row = record.forward if forward else 0
    trusted = row >= trust.changes
    reference = _own_reference(stamp, now)
    if trusted and now.wall - stamp >= trust.tolerance:
        reference = now.mono
    elif forward:  # whoever moves a stamp forward was alive after he had set the one before
        reference = max(reference, record.reference)
    return Record(
        uid=record.uid,
        stamp=stamp,
        period=sighting.period,
        seen=now.mono,
        reference=reference,
        forward=min(row + 1, trust.changes) if forward else 0,
        backwards=not forward and not trusted,
        skew=stamp - now.wall if trusted and not sighting.late else record.skew,
    )


def skewed(record: Record | None, trust: Trust) -> bool:
    """Whether the sender's clock is known to disagree with ours by more than the limit."""
    return record is not None and record.skew is not None and abs(record.skew) > trust.skew_limit


class Judgement(msgspec.Struct, frozen=True, gc=False):
    """`alive`, and the monotonic instant at which that ends unless something is seen.

    None: it does not end, or only some time after our sight has returned. `held` says that the
    time is over, and only our own blindness holds the expiry back.
    """

    alive: bool
    wake_at: timedelta | None = None
    held: bool = False


DEAD = Judgement(alive=False)


def judge(
    record: Record | None,
    timeout: timedelta,
    now: Now,
    *,
    known: bool,
    calm_until: timedelta | None,
) -> Judgement:
    """Whether the sender is alive at `now`, `timeout` (inclusive) after its reference.

    `known` says that it counted as alive before. Only then can expiry be held back: up to and
    including `calm_until`, which is None when our sight is clear (see `calm`). Without a record
    there is no stamp, which is expiry as well.
    """
    if record is None:
        return _held(calm_until) if known and _holds(calm_until, now.mono) else DEAD
    if not known and not record.improves:
        return DEAD
    deadline = record.reference + timeout
    # A stamp that was already too old when it was seen moving back is news, not silence.
    stepped_back = record.backwards and deadline < record.seen
    if now.mono <= deadline:
        return Judgement(alive=True, wake_at=_end(deadline, calm_until))
    if not known or stepped_back or not _holds(calm_until, now.mono):
        return DEAD
    return _held(calm_until)


def _end(deadline: timedelta, calm_until: timedelta | None) -> timedelta:
    """When life ends without news: after the deadline, or after the calm if that ends later.

    While we are blind it is the deadline: should our sight return before, it is the right one.
    """
    if calm_until is None or calm_until == FOREVER:
        return deadline + INSTANT
    return max(deadline, calm_until) + INSTANT


def _holds(calm_until: timedelta | None, instant: timedelta) -> bool:
    return calm_until is not None and instant <= calm_until


def _held(calm_until: timedelta | None) -> Judgement:
    return Judgement(alive=True, wake_at=_after(calm_until), held=True)


def _after(calm_until: timedelta | None) -> timedelta | None:
    """The first instant after the calm; None while nobody can say when it ends."""
    if calm_until is None or calm_until == FOREVER:
        return None
    return calm_until + INSTANT
