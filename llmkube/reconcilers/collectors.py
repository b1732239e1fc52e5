"""Series about single objects, read from the caches when they are scraped.

No Gauge is kept per object: what is in the cache has series, what is gone has none, and a scrape
costs the caches nothing in between. `render` writes the text itself, because generic samples of
ten thousand objects take the interpreter lock for a third of a second; it is meant to be called in
a thread, for which it takes a snapshot first (cached objects are immutable).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmkube.api.cached import CachedFederatedCluster, CachedMetalNode
from llmkube.api.candidates import CandidateResult
from llmkube.api.names import ConditionType, Phase
from llmkube.api.times import parse_time
from llmkube.rules.liveness import Record

O = TypeVar("O")  # noqa: E741 - an object
Value = float | int
Labels = tuple[str, ...]
"""Label values. Names of objects and enums: none of them needs escaping."""


@dataclass(frozen=True, slots=True)
class Family:
    """A gauge with one series for each row that `rows` finds in an object (and what the liveness
    book knows of it)."""

    name: str
    help: str
    labels: Labels
    rows: Callable[[Any, Record | None], Iterable[tuple[Labels, Value]]]


class ObjectCollector(Collector):
    """The series of one kind. `objects` takes a snapshot of the cache, `record_of` looks an object
    up in the liveness book."""

    def __init__(
        self,
        families: Sequence[Family],
        objects: Callable[[], list[O]],
        record_of: Callable[[O], Record | None],
    ) -> None:
        self._families = families
        self._objects: Callable[[], list[Any]] = objects
        self._record_of: Callable[[Any], Record | None] = record_of

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(f.name, f.help, labels=f.labels) for f in self._families]

    def collect(self) -> Iterable[Metric]:
        for family, rows in self._snapshot():
            metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in rows:
                metric.add_metric(labels, value)
            yield metric

    def render(self) -> bytes:
        """The same in the text exposition format."""
        lines: list[str] = []
        for family, rows in self._snapshot():
            lines.append(f"# HELP {family.name} {family.help}\n# TYPE {family.name} gauge\n")
            form = ",".join(f'{label}="%s"' for label in family.labels)
            form = f"{family.name}{{{form}}} "
            lines.extend([f"{form % labels}{value}\n" for labels, value in rows])
        return "".join(lines).encode()

    def _snapshot(self) -> Iterator[tuple[Family, Iterator[tuple[Labels, Value]]]]:
        known = [(obj, self._record_of(obj)) for obj in self._objects()]
        for family in self._families:
            yield family, (row for obj, record in known for row in family.rows(obj, record))


def render_metrics(
    registry: CollectorRegistry, collectors: Sequence[ObjectCollector]
) -> tuple[bytes, str]:
    """Everything there is to scrape, and its content type."""
    parts = [generate_latest(registry), *(collector.render() for collector in collectors)]
    return b"".join(parts), CONTENT_TYPE_PLAIN_0_0_4


# MetalNodes -------------------------------------------------------------------------------------
def _condition(kind: ConditionType) -> Callable[[CachedMetalNode, Record | None], Any]:
    def rows(node: CachedMetalNode, _record: Record | None) -> list[tuple[Labels, Value]]:
        found = node.status.condition(kind)
        return [] if found is None else [(_of(node), int(found.status == "True"))]

    return rows


def _of(node: CachedMetalNode) -> Labels:
    return node.metadata.namespace, node.metadata.name


def _heartbeat(record: Record | None, mirrored: str | None) -> float | None:
    stamp = parse_time(mirrored) if record is None else record.stamp
    return None if stamp is None else stamp.timestamp()


def _metalnode_heartbeat(
    node: CachedMetalNode, record: Record | None
) -> list[tuple[Labels, Value]]:
    at = _heartbeat(record, node.status.last_heartbeat_time)
    return [] if at is None else [(_of(node), at)]


def _metalnode_skew(node: CachedMetalNode, record: Record | None) -> list[tuple[Labels, Value]]:
    if record is None or record.skew is None:
        return []
    return [(_of(node), record.skew.total_seconds())]


def _candidates(node: CachedMetalNode, _record: Record | None) -> list[tuple[Labels, Value]]:
    """Only the results that occur, and only known words: ten thousand Macs have few series."""
    counts = Counter(candidate.result for candidate in node.status.candidates)
    return [((*_of(node), r.value), counts[r]) for r in CandidateResult if counts[r]]


_METALNODE = ("namespace", "name")
METALNODE_FAMILIES = (
    Family(
        "llmkube_metalnode_connected",
        "1 if AgentConnected is True, else 0",
        _METALNODE,
        _condition(ConditionType.AGENT_CONNECTED),
    ),
    Family(
        "llmkube_metalnode_reachable",
        "1 if Reachable is True, else 0",
        _METALNODE,
        _condition(ConditionType.REACHABLE),
    ),
    Family(
        "llmkube_metalnode_heartbeat_timestamp_seconds",
        "The agent's last heartbeat, by the Mac's clock",
        _METALNODE,
        _metalnode_heartbeat,
    ),
    Family(
        "llmkube_metalnode_clock_skew_seconds",
        "The Mac's clock minus the controller's, at the last heartbeat seen",
        _METALNODE,
        _metalnode_skew,
    ),
    Family(
        "llmkube_metalnode_candidates",
        "Addresses of the Mac, by the result of their last dial-back",
        (*_METALNODE, "result"),
        _candidates,
    ),
)


# FederatedClusters ------------------------------------------------------------------------------
def _phase(cluster: CachedFederatedCluster, _record: Record | None) -> list[tuple[Labels, Value]]:
    name, now = cluster.metadata.name, cluster.status.phase
    return [] if now is None else [((name, phase.value), int(now == phase)) for phase in Phase]


def _site_heartbeat(
    cluster: CachedFederatedCluster, record: Record | None
) -> list[tuple[Labels, Value]]:
    at = _heartbeat(record, cluster.status.last_heartbeat_time)
    return [] if at is None else [((cluster.metadata.name,), at)]


def _gpus(cluster: CachedFederatedCluster, _record: Record | None) -> list[tuple[Labels, Value]]:
    capacity, name = cluster.status.capacity, cluster.metadata.name
    if capacity is None:
        return []
    return [
        ((name, "total"), capacity.gpus_total),
        ((name, "allocatable"), capacity.gpus_allocatable),
    ]


def _site_skew(
    cluster: CachedFederatedCluster, record: Record | None
) -> list[tuple[Labels, Value]]:
    if record is None or record.skew is None:
        return []
    return [((cluster.metadata.name,), record.skew.total_seconds())]


FEDERATEDCLUSTER_FAMILIES = (
    Family(
        "llmkube_federatedcluster_phase",
        "1 for the phase that the site is in, 0 for the others",
        ("name", "phase"),
        _phase,
    ),
    Family(
        "llmkube_federatedcluster_heartbeat_timestamp_seconds",
        "The site's last heartbeat, by the site's clock",
        ("name",),
        _site_heartbeat,
    ),
    Family(
        "llmkube_federatedcluster_gpus",
        "GPUs of the site, as it last reported them",
        ("name", "kind"),
        _gpus,
    ),
    Family(
        "llmkube_federatedcluster_clock_skew_seconds",
        "The site's clock minus the hub's, at the last trusted heartbeat",
        ("name",),
        _site_skew,
    ),
)
