"""Every duration and bound of the agent, with its production value. Tests scale them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Bounds of the TLS ingress."""

    max_connections: int = 512
    """At the cap the oldest stranger makes room; authorised connections are never cut for it."""
    handshake_timeout: timedelta = timedelta(seconds=10)
    request_timeout: timedelta = timedelta(seconds=10)
    """From the handshake to the end of the headers of the first authorised request."""
    keepalive_timeout: timedelta = timedelta(seconds=75)
    """An authorised connection may idle between requests this long (and take it for headers)."""
    close_timeout: timedelta = timedelta(seconds=2)
    """How long a peer may take for its close_notify, or for a body we will not read."""
    connect_timeout: timedelta = timedelta(seconds=5)
    """To the LLM server, which is on this machine."""
    upstream_silence: timedelta = timedelta(minutes=15)
    """The LLM server may say nothing this long: a long prompt takes minutes to read."""
    client_stall: timedelta = timedelta(minutes=5)
    """A client may neither send nor take a byte this long in the middle of a body."""
    drain_timeout: timedelta = timedelta(seconds=10)
    """On SIGTERM, running requests get this long to end."""


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """The rhythm of the Lease."""

    interval: timedelta = timedelta(seconds=30)
    lease_duration: timedelta = timedelta(seconds=120)
    """`leaseDurationSeconds`: silence after which the cluster calls this machine disconnected."""
    jitter: float = 0.1
    """Each pause is drawn from interval · (1 ± jitter), so that a fleet does not beat in step."""
    first_retry: timedelta = timedelta(seconds=1)
    retry_cap: timedelta = timedelta(seconds=15)
    attempt_timeout: timedelta = timedelta(seconds=10)
    """One request; shorter than the retry cap, because a connection may be dead after sleep."""
    reread_interval: timedelta = timedelta(minutes=10)
    """The MetalNode is read anew this often, besides whenever something hints at a new one."""
    tick: timedelta = timedelta(seconds=2)
    """How often to look whether the machine slept or the kubeconfig was replaced."""
    sleep_threshold: timedelta = timedelta(seconds=5)
    """The boot clock ran ahead of the monotonic one by this much: the machine was asleep."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All of them."""

    ingress: IngressSettings = field(default_factory=IngressSettings)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    part_retry: timedelta = timedelta(seconds=5)
    """A part that failed (say, the port is taken) is started again after this pause."""
    hardware_patience: timedelta = timedelta(seconds=10)
    """The first beat waits this long for the hardware, which macOS takes seconds to tell."""
