"""Which Events are worth telling the API server, and how often: the pure part of the recorder.

The same thing said again about the same object within the window is one Event whose series counts
up. New things are limited per object by a token bucket, so that one flapping or hostile machine
cannot flood a namespace, and the backlog as a whole is bounded. What is dropped is counted. The
loop that writes is `llmkube.kube.events`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from llmkube.api.times import format_micro_time
from llmkube.clock import Now
from llmkube.kube.resources import EVENTS, Resource
from llmkube.log import redact

SERIES_WINDOW = timedelta(minutes=6)
"""A series that is silent for longer has ended (as in client-go)."""
SERIES_PACE = timedelta(minutes=1)
"""A series is written at most this often."""
BURST = 25
"""How many different Events an object may cause at once (client-go's spam filter)."""
REFILL = timedelta(minutes=5)
"""After which time it may cause one more."""
BACKLOG = 5_000
"""How many Events may wait for the API server."""
NOTE_BYTES = 1_024
NAME_LENGTH = 253
CLUSTER_SCOPE_NAMESPACE = "default"
"""The only namespace in which the API server takes Events about cluster-scoped objects."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The object that an Event is about. `namespace` is "" for cluster-scoped ones."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    resource_version: str

    @property
    def event_namespace(self) -> str:
        return self.namespace or CLUSTER_SCOPE_NAMESPACE

    def body(self) -> dict[str, str]:
        fields = {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
            "resourceVersion": self.resource_version,
        }
        return {key: value for key, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class Saying:
    """What is said; equal sayings about one object are one series."""

    uid: str
    type: str
    reason: str
    action: str
    note: str


@dataclass(slots=True)
class Series:
    """One Event and its repetitions. `written` is how many of `count` the API server knows of."""

    regarding: ObjectRef
    saying: Saying
    first_seen: datetime
    last_seen: datetime
    last_mono: timedelta
    due: timedelta
    name: str
    count: int = 1
    written: int = 0

    def rename(self) -> None:
        """Begin a new Event: the old one has expired at the API server, or its name was taken."""
        self.name, self.written = event_name(self.regarding.name), 0

    def body(self, controller: str, instance: str) -> dict[str, Any]:
        """The Event to create."""
        event: dict[str, Any] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": self.name, "namespace": self.regarding.event_namespace},
            "eventTime": format_micro_time(self.first_seen),
            "reportingController": controller,
            "reportingInstance": instance[:128],
            "type": self.saying.type,
            "reason": self.saying.reason[:128],
            "action": self.saying.action[:128],
            "note": self.saying.note,
            "regarding": self.regarding.body(),
        }
        return event | (self.patch() if self.count > 1 else {})

    def patch(self) -> dict[str, Any]:
        """The repetitions, as a merge patch."""
        last = format_micro_time(self.last_seen)
        return {"series": {"count": self.count, "lastObservedTime": last}}


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: timedelta

    def take(self, mono: timedelta) -> bool:
        self.tokens = min(BURST, self.tokens + (mono - self.filled_at) / REFILL)
        self.filled_at = mono
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class EventBook:
    """All series in progress. Time comes in with each call."""

    dropped: int = 0
    _series: dict[Saying, Series] = field(default_factory=dict)
    _due: dict[int, Series] = field(default_factory=dict)  # by id: an ended one may still wait
    _buckets: dict[str, _Bucket] = field(default_factory=dict)
    _swept_at: timedelta | None = None

    def say(self, regarding: ObjectRef, saying: Saying, now: Now) -> bool:
        """Take an Event in; False if it is dropped."""
        self._sweep(now.mono)
        series = self._series.get(saying)
        if series is not None and now.mono - series.last_mono <= SERIES_WINDOW:
            series.count += 1
            series.last_seen, series.last_mono = now.wall, now.mono
            self._due.setdefault(id(series), series)
            return True
        if len(self._due) >= BACKLOG or not self._allowed(regarding.uid, now.mono):
            self.dropped += 1
            return False
        series = Series(
            regarding, saying, now.wall, now.wall, now.mono, now.mono, event_name(regarding.name)
        )
        self._series[saying] = self._due[id(series)] = series
        return True

    def ready(self, mono: timedelta) -> Iterator[Series]:
        """The series to write now, oldest first."""
        return iter([series for series in self._due.values() if series.due <= mono])

    def next_due(self) -> timedelta | None:
        """When `ready` has something, None if nothing waits."""
        return min((series.due for series in self._due.values()), default=None)

    def wrote(self, series: Series, count: int, mono: timedelta) -> None:
        """The API server knows of `count` repetitions."""
        series.written, series.due = count, mono + SERIES_PACE
        if series.count == count:
            self._due.pop(id(series), None)

    def give_up(self, series: Series) -> None:
        """The API server will not take it."""
        self.dropped += 1
        self._due.pop(id(series), None)
        if self._series.get(series.saying) is series:
            del self._series[series.saying]

    def _allowed(self, uid: str, mono: timedelta) -> bool:
        return self._buckets.setdefault(uid, _Bucket(BURST, mono)).take(mono)

    def _sweep(self, mono: timedelta) -> None:
        """Forget what has ended, once per window: memory follows activity, not history."""
        if self._swept_at is not None and mono - self._swept_at < SERIES_WINDOW:
            return
        self._swept_at = mono
        for saying, series in list(self._series.items()):
            if id(series) not in self._due and mono - series.last_mono > SERIES_WINDOW:
                del self._series[saying]
        for uid, bucket in list(self._buckets.items()):
            if bucket.tokens + (mono - bucket.filled_at) / REFILL >= BURST:
                del self._buckets[uid]


def event_name(regarding: str) -> str:
    """A fresh name for an Event about an object of that name."""
    suffix = secrets.token_hex(8)
    return f"{regarding[: NAME_LENGTH - len(suffix) - 1].rstrip('.-')}.{suffix}"


def clean_note(note: str) -> str:
    """A note as the API server takes it: one line, no credentials, at most 1,024 bytes.

    Notes quote schedulers, plugins and remote peers, and everyone in the namespace reads them.
    """
    text = redact(_CONTROL.sub(" ", note).strip())
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= NOTE_BYTES:
        return encoded.decode()
    return encoded[: NOTE_BYTES - 3].decode("utf-8", "ignore") + "…"
