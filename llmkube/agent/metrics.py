"""The agent's own metrics and health, for whoever watches the Mac itself (--metrics-bind-address).

The cluster does not need them: what it knows of a machine it has seen itself. Next:
`llmkube.health`, which serves them.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from llmkube.clock import Clock
from llmkube.health import Checks, Route, health_routes, metrics_routes


class AgentMetrics:
    """Counts what the parts tell."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._beats = Counter(
            "llmkube_agent_heartbeats",
            "Heartbeats tried, by result: ok, or the class of the failure.",
            ["result"],
            registry=self._registry,
        )
        self._last = Gauge(
            "llmkube_agent_last_heartbeat_timestamp_seconds",
            "When the Lease was last renewed; 0 if never.",
            registry=self._registry,
        )
        self._requests = Counter(
            "llmkube_agent_ingress_requests",
            "Requests answered at the ingress, by HTTP status code.",
            ["code"],
            registry=self._registry,
        )
        self._connections = Gauge(
            "llmkube_agent_ingress_connections",
            "Open connections at the ingress, handshakes included.",
            registry=self._registry,
        )
        self._trouble: str | None = "no heartbeat yet"

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Where to read the number of connections at each scrape."""
        self._connections.set_function(count)

    def beat(self, failure: Exception | None) -> None:
        """A heartbeat arrived, or did not."""
        if failure is None:
            self._beats.labels("ok").inc()
            self._last.set(self._clock.now().wall.timestamp())
            self._trouble = None
        else:
            self._beats.labels(type(failure).__name__).inc()
            self._trouble = f"the last heartbeat failed: {failure}"

    def answered(self, status: int) -> None:
        """The ingress answered a request."""
        self._requests.labels(str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def routes(self) -> list[Route]:
        """/healthz (alive at all), /readyz (the last heartbeat arrived) and /metrics."""
        ready = Checks()
        ready.add("heartbeat", lambda: self._trouble)
        return [*health_routes(Checks(), ready), *metrics_routes(self.render)]
