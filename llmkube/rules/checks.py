"""Checks: when a Mac is to be dialled back, and what each end of a check does to the bookkeeping.

That a check is *due* is a level, read from the status and the inputs; nothing has to be remembered
for it, so nothing is lost by a restart. Three things hold a due check back: the one that is
running, a fixed spacing after the last start, and a backoff that grows with consecutive failures.

Stamps in the status are wall-clock instants. Each is fixed on the monotonic clock once, when it is
first seen (`Anchor`): a later step of our clock changes nothing, and a stamp from the future counts
from when it was seen.

Neighbours: `candidates` makes the address list, `verification` puts these rules to work.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import MAXYEAR, UTC, datetime, timedelta

from llmkube.api.cached import CachedVerification, CachedVerifierPlacement
from llmkube.api.spki import SpkiPin
from llmkube.api.times import format_time, parse_time
from llmkube.clock import ZERO, Now

SECOND = timedelta(seconds=1)
_MAX_EXPONENT = 16
_MAX_FAILURES = 2**31 - 1
_FAR_AHEAD = datetime(9000, 1, 1, tzinfo=UTC)
"""Stands for stamps of the last year there is: behind its end, where later ones would be reckoned,
dates overflow. Far enough before it that what is reckoned from here is a stamp as it is."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The durations of a check's life, and how many checks may run at once in the cluster."""

    spacing: timedelta = timedelta(seconds=30)
    """Between two starts for one Mac, whatever it reports."""
    timeout: timedelta = timedelta(seconds=120)
    """`--check-timeout`: an answer counts until this long after the start."""
    backoff: timedelta = timedelta(seconds=30)
    """After the first failure; doubled with each further one."""
    backoff_cap: timedelta = timedelta(minutes=10)
    reverify: timedelta = timedelta(minutes=10)
    """A verified Mac is verified again after this long, give or take `reverify_jitter`."""
    reverify_jitter: float = 0.1
    true_lasts: timedelta = timedelta(minutes=30)
    """Reachable=True ends this long after the last success if no check gives an answer."""
    trouble: timedelta = timedelta(seconds=20)
    """How long a pod may be unschedulable or unpullable."""
    intake: timedelta = timedelta(seconds=30)
    """Reports that end no True are taken up at most this often."""
    connect_timeout: timedelta = timedelta(seconds=5)
    handshake_timeout: timedelta = timedelta(seconds=5)
    max_concurrent: int = 20
    """`--max-concurrent-checks`."""


# Inputs -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CheckInputs:
    """Everything that one check depends on. `addresses` are the allowed ones, in order."""

    pin: SpkiPin
    certificate: bytes
    port: int
    addresses: tuple[str, ...]
    placement: CachedVerifierPlacement | None = None

    def hash(self) -> str:
        """What `verification.inputHash` holds: equal for equal inputs, across restarts."""
        placement = self.placement or CachedVerifierPlacement()
        document = {
            "pin": str(self.pin),
            "certificate": hashlib.sha256(self.certificate).hexdigest(),
            "port": self.port,
            "addresses": self.addresses,
            "nodeSelector": placement.node_selector or {},
            "tolerations": placement.tolerations or (),
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


# Bookkeeping ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """`status.verification`, parsed."""

    last_start: datetime | None = None
    pod_uid: str | None = None
    last_check: datetime | None = None
    input_hash: str | None = None
    failures: int = 0

    @classmethod
    def of(cls, cached: CachedVerification | None) -> Bookkeeping:
        if cached is None:
            return cls()
        return cls(
            last_start=_stamp(cached.last_start_time),
            pod_uid=cached.pod_uid or None,
            last_check=_stamp(cached.last_check_time),
            input_hash=cached.input_hash or None,
            failures=min(max(cached.consecutive_failures or 0, 0), _MAX_FAILURES),
        )

    def to_json(self) -> dict[str, object]:
        """The wire form; a count of no failures is written once there was a result."""
        document: dict[str, object] = {}
        if self.last_start is not None:
            document["lastStartTime"] = format_time(self.last_start)
        if self.pod_uid is not None:
            document["podUID"] = self.pod_uid
        if self.last_check is not None:
            document["lastCheckTime"] = format_time(self.last_check)
        if self.input_hash is not None:
            document["inputHash"] = self.input_hash
        if self.failures or self.last_check is not None:
            document["consecutiveFailures"] = self.failures
        return document

    @property
    def unanswered(self) -> bool:
        """The last start has no result."""
        if self.last_start is None:
            return False
        return self.last_check is None or self.last_check < self.last_start

    @property
    def running(self) -> bool:
        """A pod is out there whose answer is awaited."""
        return self.pod_uid is not None and self.unanswered

    def started(self, now: Now) -> Bookkeeping:
        """The first write of a start. Rounded up, and later than every stamp before it.

        So a start is told from the one before by its time alone, and never seems answered by an
        earlier result, not even after our clock was set back.
        """
        start = _round_up(now.wall)
        for before in (self.last_check, self.last_start):
            if before is not None:
                start = max(start, before + SECOND)
        return replace(self, last_start=start, pod_uid=None)

    def named(self, pod_uid: str) -> Bookkeeping:
        """The third write of a start."""
        return replace(self, pod_uid=pod_uid)

    def completed(self, now: Now, input_hash: str, *, verified: bool) -> Bookkeeping:
        """The check gave an answer; `verified` says that some address answered as this Mac."""
        check = now.wall.replace(microsecond=0)
        if self.last_start is not None:
            check = max(check, self.last_start)
        return replace(
            self,
            last_check=check,
            input_hash=input_hash,
            failures=0 if verified else min(self.failures + 1, _MAX_FAILURES),
        )

    def unanswerable(self) -> Bookkeeping:
        """The check can give no answer any more, which proves nothing about the Mac."""
        return replace(self, pod_uid=None, failures=min(self.failures + 1, _MAX_FAILURES))


def _stamp(text: str | None) -> datetime | None:
    """A stamp of the status, from which later ones can be reckoned."""
    stamp = parse_time(text)
    return _FAR_AHEAD if stamp is not None and stamp.year == MAXYEAR else stamp


def _round_up(instant: datetime) -> datetime:
    whole = instant.replace(microsecond=0)
    return whole if whole == instant else whole + SECOND


# Time -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Anchor:
    """A wall-clock stamp and the monotonic reading that it stands for."""

    stamp: datetime
    mono: timedelta


def anchor(stamp: datetime | None, before: Anchor | None, now: Now) -> Anchor | None:
    """Fix a stamp on the monotonic clock, once.

    A stamp further in the future than rounding explains counts from now.
    """
    if stamp is None or (before is not None and before.stamp == stamp):
        return None if stamp is None else before
    age = now.wall - stamp
    return Anchor(stamp, now.mono - (age if age > -SECOND else ZERO))


@dataclass(frozen=True, slots=True)
class Anchors:
    """The two stamps that checks are timed by."""

    start: Anchor | None = None
    check: Anchor | None = None

    def seen(self, book: Bookkeeping, now: Now) -> Anchors:
        return Anchors(
            anchor(book.last_start, self.start, now), anchor(book.last_check, self.check, now)
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The inputs last started, remembered with the start they belong to."""

    stamp: datetime | None
    input_hash: str


def last_inputs(started: Started | None, book: Bookkeeping, current: str) -> Started:
    """What the inputs last started were, as far as anyone knows.

    After a restart, or when another leader made the last start: what was last checked; assumed
    equal to the present ones if that start has no result.
    """
    if started is not None and started.stamp == book.last_start:
        return started
    if book.unanswered or book.input_hash is None:
        return Started(book.last_start, current)
    return Started(book.last_start, book.input_hash)


# Schedule ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Claim:
    """What decides when the next check may start. All of it is read from status and inputs."""

    uid: str
    book: Bookkeeping
    anchors: Anchors
    input_hash: str
    last_started_hash: str
    reachable: bool
    asked: bool
    """`llmkube metal verify` asks."""
    connected_since: datetime | None
    """When AgentConnected last turned True."""


def next_start(claim: Claim, settings: CheckSettings) -> timedelta | None:
    """The monotonic instant from which on a check may start; None while one is running.

    It may lie in the past: then the check is due and waits for nothing but a free slot.
    """
    book, anchors = claim.book, claim.anchors
    if book.running:
        return None
    ready = timedelta.min
    if not _due_now(claim) and anchors.check is not None:
        ready = anchors.check.mono + reverify_after(claim.uid, settings)
    if book.failures and not _exempt(claim):
        ready = max(ready, _backoff_ends(claim, settings))
    if anchors.start is not None:
        ready = max(ready, anchors.start.mono + settings.spacing)
    return ready


def _due_now(claim: Claim) -> bool:
    book = claim.book
    changed = claim.input_hash != book.input_hash
    return not claim.reachable or book.unanswered or changed or claim.asked


def _exempt(claim: Claim) -> bool:
    """Whether something happened since the last failure that makes another try worthwhile."""
    start, since = claim.book.last_start, claim.connected_since
    came_back = since is not None and (start is None or since > start)
    return claim.asked or came_back or claim.input_hash != claim.last_started_hash


def _backoff_ends(claim: Claim, settings: CheckSettings) -> timedelta:
    pause = backoff(claim.book.failures, settings)
    if claim.book.unanswered and claim.anchors.start is not None:
        return claim.anchors.start.mono + settings.timeout + pause
    return timedelta.min if claim.anchors.check is None else claim.anchors.check.mono + pause


def backoff(failures: int, settings: CheckSettings) -> timedelta:
    """The pause after that many failures in a row (0 for none)."""
    if failures <= 0:
        return ZERO
    # The count comes from a status field: clamp the exponent, not the result.
    grown: timedelta = settings.backoff * (1 << min(failures - 1, _MAX_EXPONENT))
    return min(grown, settings.backoff_cap)


def reverify_after(uid: str, settings: CheckSettings) -> timedelta:
    """The re-verification interval of one Mac: spread over the fleet, fixed for each UID."""
    digest = hashlib.sha256(uid.encode()).digest()
    spread = int.from_bytes(digest[:4], "big") / 0xFFFFFFFF * 2 - 1
    return settings.reverify * (1 + settings.reverify_jitter * spread)


def asks(annotation: str | None, last_start: datetime | None) -> bool:
    """Whether the `verify` annotation asks for a check.

    It carries the lastStartTime that its writer saw ("" for none), and asks until there is a newer
    start. No clocks are compared.
    """
    if annotation is None:
        return False
    if not annotation:
        return last_start is None
    return last_start is not None and _stamp(annotation) == last_start


def in_utc(instant: datetime) -> str:
    """An instant as messages show it."""
    return format_time(instant.astimezone(UTC))
