"""Metric names, labels and buckets, as dashboards and alerts of the ecosystem expect them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from prometheus_client import generate_latest

from llmkube.informers.telemetry import QueueMetrics, ReconcileMetrics, ReflectorMetrics
from llmkube.metrics import Metrics

SECOND = timedelta(seconds=1)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def bounds(metrics: Metrics, name: str) -> list[str]:
    """The upper bounds of a histogram's buckets."""
    return [
        sample.labels["le"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"{name}_bucket"
    ]


def test_a_queue_has_the_workqueue_family(metrics: Metrics) -> None:
    queue: QueueMetrics = metrics.queue("heartbeat")
    queue.observe_queue(lambda: 3, lambda: (7 * SECOND, 4 * SECOND))
    queue.added()
    queue.retried()
    queue.waited(2 * SECOND)
    queue.worked(SECOND)
    labels = {"name": "heartbeat", "controller": "heartbeat"}
    expected = {
        "workqueue_depth": 3,
        "workqueue_adds_total": 1,
        "workqueue_retries_total": 1,
        "workqueue_unfinished_work_seconds": 7,
        "workqueue_longest_running_processor_seconds": 4,
        "workqueue_queue_duration_seconds_sum": 2,
        "workqueue_work_duration_seconds_sum": 1,
    }
    assert {name: value(metrics, name, **labels) for name in expected} == expected
    assert [float(le) for le in bounds(metrics, "workqueue_queue_duration_seconds")] == [
        pytest.approx(10.0**n) for n in range(-8, 4)
    ] + [float("inf")]


def test_gauges_are_read_when_scraped(metrics: Metrics) -> None:
    depth = [1]
    metrics.queue("q").observe_queue(lambda: depth[0], lambda: (SECOND, SECOND))
    depth[0] = 5
    assert value(metrics, "workqueue_depth", name="q", controller="q") == 5


def test_a_controller_has_the_reconcile_family_preset_to_zero(metrics: Metrics) -> None:
    metrics.reconcile("heartbeat")
    for result in ("error", "requeue_after", "requeue", "success"):
        name = "controller_runtime_reconcile_total"
        assert value(metrics, name, controller="heartbeat", result=result) == 0
    for name in (
        "controller_runtime_reconcile_errors_total",
        "controller_runtime_terminal_reconcile_errors_total",
        "controller_runtime_reconcile_panics_total",
        "controller_runtime_reconcile_timeouts_total",
        "controller_runtime_max_concurrent_reconciles",
        "controller_runtime_active_workers",
    ):
        assert value(metrics, name, controller="heartbeat") == 0, name
    found = bounds(metrics, "controller_runtime_reconcile_time_seconds")
    assert (found[0], found[-2], len(found)) == ("0.005", "60.0", 41)


def test_reconciles_are_counted_by_how_they_ended(metrics: Metrics) -> None:
    reconcile: ReconcileMetrics = metrics.reconcile("c")
    reconcile.workers(8)
    reconcile.started()
    reconcile.started()
    reconcile.finished("error", SECOND)
    reconcile.terminal_error()
    reconcile.panicked()
    reconcile.timed_out()
    labels = {"controller": "c"}
    assert value(metrics, "controller_runtime_max_concurrent_reconciles", **labels) == 8
    assert value(metrics, "controller_runtime_active_workers", **labels) == 1
    assert value(metrics, "controller_runtime_reconcile_errors_total", **labels) == 1
    assert value(metrics, "controller_runtime_reconcile_time_seconds_count", **labels) == 1
    for kind in ("terminal_reconcile_errors", "reconcile_panics", "reconcile_timeouts"):
        assert value(metrics, f"controller_runtime_{kind}_total", **labels) == 1


def test_a_reflector_shows_its_health(metrics: Metrics) -> None:
    reflector: ReflectorMetrics = metrics.reflector("leases")
    age: list[timedelta | None] = [None]
    reflector.observe_event_age(lambda: age[0])
    reflector.relisted()
    reflector.restarted("silence")
    reflector.bad_object()
    name = "llmkube_reflector_last_event_age_seconds"
    before = value(metrics, name, reflector="leases")
    assert before is not None
    assert before != before, "NaN: there was none"
    age[0] = 4 * SECOND
    assert value(metrics, name, reflector="leases") == 4
    assert value(metrics, "llmkube_reflector_relists_total", reflector="leases") == 1
    assert value(metrics, "llmkube_reflector_bad_objects_total", reflector="leases") == 1
    name = "llmkube_reflector_restarts_total"
    assert value(metrics, name, reflector="leases", reason="silence") == 1


def test_requests_have_the_rest_client_family(metrics: Metrics) -> None:
    rest = metrics.rest("https://cluster:6443/base")
    rest.answered("PATCH", 200, 2 * SECOND)
    rest.answered("GET", 200, SECOND)
    rest.failed("PATCH")
    rest.repeated("PATCH", 401)
    host = "cluster:6443"
    name = "rest_client_requests_total"
    assert value(metrics, name, code="200", method="PATCH", host=host) == 1
    assert value(metrics, name, code="<error>", method="PATCH", host=host) == 1
    name = "rest_client_request_retries_total"
    assert value(metrics, name, code="401", verb="PATCH", host=host) == 1
    name = "rest_client_request_duration_seconds_sum"
    assert value(metrics, name, verb="PATCH", host=host) == 2
    assert bounds(metrics, "rest_client_request_duration_seconds")[:3] == ["0.005", "0.025", "0.1"]


def test_a_leader_shows_itself(metrics: Metrics) -> None:
    leader = metrics.leader("llmkube-controller")
    labels = {"name": "llmkube-controller"}
    assert value(metrics, "leader_election_master_status", **labels) == 0
    leader.leading(True)
    leader.slow_path()
    assert value(metrics, "leader_election_master_status", **labels) == 1
    assert value(metrics, "leader_election_slowpath_total", **labels) == 1


def test_two_programs_in_one_process_do_not_add_up() -> None:
    one, other = Metrics(), Metrics()
    one.queue("q").added()
    other.queue("q")
    assert value(other, "workqueue_adds_total", name="q", controller="q") == 0


def test_everything_can_be_rendered(metrics: Metrics) -> None:
    metrics.queue("q")
    metrics.reconcile("q")
    metrics.reflector("r")
    metrics.rest("https://c")
    metrics.leader("l")
    text = generate_latest(metrics.registry).decode()
    assert "# HELP workqueue_depth " in text
    assert "_created" not in text, "noise that no dashboard reads"
