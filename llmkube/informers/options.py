"""The durations and sizes of a reflector. Tests scale them; their relations matter.

The inactivity timeout must exceed the minute between two bookmarks, and stay below the 75 s of
history that the API server's watch cache keeps, so that a dead connection costs a reconnect and
not a re-list.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class ReflectorSettings:
    """How a reflector lists, watches and waits."""

    page_size: int = 500
    """Objects per page of a list."""
    inactivity_timeout: timedelta = timedelta(seconds=70)
    """A stream that is silent for so long is dead."""
    silent_streams: int = 3
    """So many silent streams in a row, and the reflector lists: see `backoff`."""
    shortest_server_timeout: timedelta = timedelta(minutes=5)
    longest_server_timeout: timedelta = timedelta(minutes=10)
    """The server ends each watch at a random time between these, so that not all end together."""
    short_watch: timedelta = timedelta(seconds=1)
    """A stream that ends sooner without an event counts as a failure."""
    backoff_base: timedelta = timedelta(milliseconds=800)
    backoff_cap: timedelta = timedelta(seconds=30)
    """Before jitter, which adds up to as much again."""
    backoff_reset: timedelta = timedelta(minutes=2)
    """So long without a failure, and the back-off starts from the beginning."""
    longest_wait: timedelta = timedelta(minutes=2)
    """A longer Retry-After is cut to this: a liveness probe expects an attempt every 3 minutes."""
    catch_up: timedelta = timedelta(seconds=5)
    """A watch that resumes shows everything that it missed at once; that is over after so long."""
    long_silence: timedelta = timedelta(seconds=60)
    """Bookmarks come each minute, so what comes after a longer silence may have waited: for a
    server that hung, or for us to be woken."""
    echo_limit: timedelta = timedelta(seconds=5)
    """So long after a write of ours that the cache does not show, the object is read live."""
    line_cap: int = 64 * 1024 * 1024
    """Bytes of the longest line of a stream; etcd's largest object has about 1.5 MiB."""
    slice_size: int = 100
    """Objects handled before the event loop gets its turn."""


DEFAULTS = ReflectorSettings()
