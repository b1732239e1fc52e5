"""What a reflector does next, as a table, and how long it waits first.

Each attempt of a reflector - a list, then a watch from where it ended - has one `Ending`. Pure:
`after` says where to begin the next attempt, `Backoff` how long to wait before it.

| ending                                       | next attempt                     | wait          |
|----------------------------------------------|----------------------------------|---------------|
| END: the server closed the stream, by design | watch from the last version      | a little      |
| SHORT: closed at once without an event       | list                             | back-off      |
| SILENCE, BROKEN: dead, cut or never reached  | the same again                   | back-off      |
| STUCK: several silent streams in a row       | list, not older than we know     | back-off      |
| THROTTLED: 429                               | the same again                   | as asked, too |
| UNAUTHORIZED, FORBIDDEN, MISSING, UNAVAILABLE| the same again, for ever         | back-off      |
| EXPIRED: 410 while watching                  | list, not older than we know     | back-off      |
| EXPIRED while listing                        | list the newest                  | back-off      |
| BAD_EVENT, BUG                               | list                             | back-off      |

Silence alone never lists: bookmarks are not guaranteed (KEP-956). But a version that the server has
not reached yet, as after a restore of etcd, gives a watch that is open and silent for ever; only a
list finds that out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum

from llmkube.clock import ZERO
from llmkube.informers.events import Garbled, StreamError
from llmkube.informers.options import ReflectorSettings
from llmkube.informers.splitter import LineTooLong
from llmkube.kube.errors import (
    ApiError,
    Forbidden,
    Gone,
    NotFound,
    TooManyRequests,
    Unauthorized,
)


class Mode(StrEnum):
    """Where an attempt begins."""

    LIST_NEWEST = "list newest"
    """A consistent list, whatever it costs the server: at the start, or when nothing else goes."""
    LIST = "list"
    """Not older than the version we know: any server's cache can answer (kubernetes#86430)."""
    WATCH = "watch"


class Ending(StrEnum):
    """Why an attempt ended: the `reason` of the restart metric."""

    END = "end"
    SHORT = "short"
    SILENCE = "silence"
    STUCK = "stuck"
    BROKEN = "broken"
    THROTTLED = "throttled"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    MISSING = "missing"
    UNAVAILABLE = "unavailable"
    EXPIRED = "expired"
    BAD_EVENT = "bad_event"
    BUG = "bug"


_BY_CLASS: tuple[tuple[type[Exception], Ending], ...] = (
    (Gone, Ending.EXPIRED),
    (TooManyRequests, Ending.THROTTLED),
    (Unauthorized, Ending.UNAUTHORIZED),
    (Forbidden, Ending.FORBIDDEN),
    (NotFound, Ending.MISSING),
    (Garbled, Ending.BAD_EVENT),
    (LineTooLong, Ending.BAD_EVENT),
)


def classify(error: Exception) -> Ending:
    """The ending that an exception stands for."""
    if isinstance(error, StreamError):
        return Ending.EXPIRED if error.expired else Ending.BAD_EVENT
    for cls, ending in _BY_CLASS:
        if isinstance(error, cls):
            return ending
    if isinstance(error, ApiError):
        return Ending.UNAVAILABLE if error.status else Ending.BROKEN
    return Ending.BUG


def after(mode: Mode, ending: Ending) -> Mode:
    """Where the attempt after one that began with `mode` begins."""
    match ending:
        case Ending.SHORT | Ending.STUCK | Ending.BAD_EVENT | Ending.BUG:
            return Mode.LIST_NEWEST if mode is Mode.LIST_NEWEST else Mode.LIST
        case Ending.EXPIRED:
            return Mode.LIST if mode is Mode.WATCH else Mode.LIST_NEWEST
        case _:
            return mode


class Backoff:
    """Exponential with jitter up to twice the delay; starts anew after a time without failures.

    `uniform` returns a random number from 0 to 1.
    """

    def __init__(self, settings: ReflectorSettings, uniform: Callable[[], float]) -> None:
        self._settings = settings
        self._uniform = uniform
        self._failures = 0
        self._last: timedelta | None = None

    def next(self, now: timedelta, at_least: timedelta | None = None) -> timedelta:
        """How long to wait after a failure at `now`; `at_least` is the server's Retry-After."""
        settings = self._settings
        if self._last is not None and now - self._last >= settings.backoff_reset:
            self._failures = 0
        factor: int = 2 ** min(self._failures, 16)
        delay = min(settings.backoff_base * factor, settings.backoff_cap)
        delay *= 1 + self._uniform()
        delay = max(delay, min(at_least or ZERO, settings.longest_wait))
        self._failures += 1
        self._last = now + delay
        return delay

    def pause(self, lived: timedelta) -> timedelta:
        """How long to wait after an orderly end of a stream that lived so long: hardly.

        But a server that closes each stream at once does not make us spin.
        """
        jitter = self._settings.short_watch * 0.1 * self._uniform()
        return max(jitter, self._settings.short_watch - lived)
