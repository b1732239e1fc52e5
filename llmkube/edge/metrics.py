"""Metrics of the edge: does it push, when did it last, and which of its sources fail."""

from __future__ import annotations

from datetime import datetime, timedelta

from prometheus_client import Counter, Gauge, Histogram

from llmkube.kube.errors import Forbidden, NotFound, TooManyRequests, Unauthorized, Unavailable
from llmkube.metrics import REST_LATENCY_BUCKETS, Metrics

SUCCESS = "success"
OTHER = "other"
_RESULTS: dict[type[Exception], str] = {
    Unauthorized: "unauthorized",
    Forbidden: "forbidden",
    NotFound: "not_found",
    TooManyRequests: "throttled",
    Unavailable: "unavailable",
}
SOURCES = ("nodes", "models", "inferenceservices")


class EdgeMetrics:
    """One edge's pushes. All series exist from the start."""

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        pushes = Counter(
            "llmkube_edge_pushes",
            "Pushes to the datacenter, by how they ended",
            ("result",),
            registry=registry,
        )
        self._pushes = {
            result: pushes.labels(result) for result in (SUCCESS, OTHER, *_RESULTS.values())
        }
        self._last = Gauge(
            "llmkube_edge_last_push_timestamp_seconds",
            "Stamp of the last push that arrived; 0 before the first",
            registry=registry,
        )
        self._seconds = Histogram(
            "llmkube_edge_push_duration_seconds",
            "How long pushes took that arrived",
            buckets=REST_LATENCY_BUCKETS,
            registry=registry,
        )
        source_up = Gauge(
            "llmkube_edge_source_up",
            "1 if the source was read for the last report",
            ("source",),
            registry=registry,
        )
        self._sources = {source: source_up.labels(source) for source in SOURCES}

    def pushed(self, stamp: datetime, took: timedelta) -> None:
        """A push with that stamp arrived."""
        self._pushes[SUCCESS].inc()
        self._last.set(stamp.timestamp())
        self._seconds.observe(took.total_seconds())

    def failed(self, error: Exception) -> None:
        """A push did not arrive."""
        self._pushes[_RESULTS.get(type(error), OTHER)].inc()

    def source(self, name: str, *, up: bool) -> None:
        """Whether a source was read."""
        self._sources[name].set(1 if up else 0)
