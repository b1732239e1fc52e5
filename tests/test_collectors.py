"""Per-object series: what is cached has them, what is gone has none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from llmkube.api.cached import (
    CachedCondition,
    CachedFederatedCapacity,
    CachedFederatedCluster,
    CachedFederatedClusterStatus,
    CachedMetalNode,
    CachedMetalNodeStatus,
    Meta,
)
from llmkube.informers.store import Store
from llmkube.reconcilers.collectors import (
    FEDERATEDCLUSTER_FAMILIES,
    METALNODE_FAMILIES,
    ObjectCollector,
    render_metrics,
)
from llmkube.rules.liveness import Record

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
BEAT = Record("u", START, SECOND, SECOND, SECOND, skew=-90 * SECOND)


def node(name: str, connected: str, *, last: str | None = None) -> CachedMetalNode:
    return CachedMetalNode(
        metadata=Meta(name=name, namespace="macs", uid=name),
        status=CachedMetalNodeStatus(
            conditions=(CachedCondition("AgentConnected", connected),), last_heartbeat_time=last
        ),
    )


def site(name: str, phase: str | None) -> CachedFederatedCluster:
    return CachedFederatedCluster(
        metadata=Meta(name=name),
        status=CachedFederatedClusterStatus(
            phase=phase, capacity=CachedFederatedCapacity(gpus_total=8, gpus_allocatable=6)
        ),
    )


def samples(text: str) -> dict[str, float]:
    """All series of an exposition, by name and sorted labels."""
    return {
        s.name + str(sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def scraped(collector: ObjectCollector) -> dict[str, float]:
    """What a scrape shows; both ways of rendering must agree on it."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    text, _ = render_metrics(registry, ())
    own, content_type = render_metrics(CollectorRegistry(), [collector])
    assert content_type.startswith("text/plain")
    assert samples(own.decode()) == samples(text.decode())
    return samples(own.decode())


def key(metric: str, /, **labels: str) -> str:
    return metric + str(sorted(labels.items()))


def test_a_mac_that_beats() -> None:
    collector = ObjectCollector(METALNODE_FAMILIES, lambda: [node("m1", "True")], lambda _: BEAT)
    labels = {"namespace": "macs", "name": "m1"}
    assert scraped(collector) == {
        key("llmkube_metalnode_connected", **labels): 1,
        key("llmkube_metalnode_heartbeat_timestamp_seconds", **labels): START.timestamp(),
        key("llmkube_metalnode_clock_skew_seconds", **labels): -90,
    }


def test_a_mac_that_was_not_seen_yet_shows_what_its_status_says() -> None:
    silent = node("m1", "False", last="2026-01-01T00:00:00Z")
    collector = ObjectCollector(METALNODE_FAMILIES, lambda: [silent], lambda _: None)
    labels = {"namespace": "macs", "name": "m1"}
    assert scraped(collector) == {
        key("llmkube_metalnode_connected", **labels): 0,
        key("llmkube_metalnode_heartbeat_timestamp_seconds", **labels): START.timestamp(),
    }


@pytest.mark.parametrize("phase", ["Connected", "Stale", "Unreachable"])
def test_a_site_is_in_one_phase(phase: str) -> None:
    collector = ObjectCollector(
        FEDERATEDCLUSTER_FAMILIES, lambda: [site("s1", phase)], lambda _: None
    )
    found = scraped(collector)
    for name in ("Connected", "Stale", "Unreachable"):
        series = key("llmkube_federatedcluster_phase", name="s1", phase=name)
        assert found[series] == (1 if name == phase else 0)
    assert found[key("llmkube_federatedcluster_gpus", name="s1", kind="allocatable")] == 6


def test_series_of_deleted_objects_disappear() -> None:
    store: Store[CachedMetalNode] = Store()
    store.put(node("m1", "True"))
    store.put(node("m2", "True"))
    collector = ObjectCollector(METALNODE_FAMILIES, store.values, lambda _: None)
    assert len(scraped(collector)) == 2
    store.remove("macs/m1")
    assert list(scraped(collector)) == [
        key("llmkube_metalnode_connected", namespace="macs", name="m2")
    ]


def test_they_join_the_rest_of_the_metrics() -> None:
    registry = CollectorRegistry()
    Gauge("up", "Whether we are", registry=registry).set(1)
    collector = ObjectCollector(
        FEDERATEDCLUSTER_FAMILIES, lambda: [site("s1", None)], lambda _: BEAT
    )
    body, _ = render_metrics(registry, [collector])
    found = samples(body.decode())
    assert found["up[]"] == 1
    assert found[key("llmkube_federatedcluster_clock_skew_seconds", name="s1")] == -90
