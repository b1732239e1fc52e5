"""Every duration and bound of the edge, with its production value. Tests scale them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """The rhythm of the pushes."""

    default_interval: timedelta = timedelta(seconds=30)
    """Where the FederatedCluster names no interval; the datacenter assumes the same."""
    jitter: float = 0.1
    """Each pause is drawn from interval · [1 - jitter, 1]: never later than promised. After a
    failure it is drawn from pause · [1, 1 + jitter]: never sooner than the datacenter asked for."""
    push_timeout: timedelta = timedelta(seconds=10)
    """One request to the datacenter."""
    collect_timeout: timedelta = timedelta(seconds=8)
    """All reads of the local cluster, which happen at once; a heartbeat waits no longer."""
    first_retry: timedelta = timedelta(seconds=1)
    retry_cap: timedelta = timedelta(seconds=30)
    """Longest pause after a failure (the interval, where that is shorter)."""
    look_again: timedelta = timedelta(minutes=5)
    """With a longer interval than this, the object is read in between: its interval may change."""
    stuck: timedelta = timedelta(minutes=3)
    """/healthz fails if no push was tried for three intervals and this long."""
    sleep_threshold: timedelta = timedelta(seconds=30)
    """The boot clock ran ahead of the monotonic one by this much: the machine was asleep."""
    look_around: timedelta = timedelta(seconds=5)
    """How often to look for a rotated credential, and whether the machine slept."""
