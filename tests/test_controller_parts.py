"""What is connected before anything runs: queues that wait for leadership, metrics from zero."""

from __future__ import annotations

import pytest

from llmkube.clock import SystemClock
from llmkube.controller.options import ControllerName, Options
from llmkube.controller.parts import Parts
from llmkube.kube.client import KubeClient
from llmkube.kube.events import EventRecorder
from llmkube.metrics import Metrics

pytestmark = pytest.mark.cluster


@pytest.fixture
def parts(admin: KubeClient) -> Parts:
    clock = SystemClock()
    recorder = EventRecorder(admin, clock, "test", "one")
    return Parts(Options(), admin, recorder, Metrics(), clock)


@pytest.mark.parametrize("name", list(ControllerName))
async def test_every_controller_counts_from_zero_before_it_runs(
    parts: Parts, name: ControllerName
) -> None:
    def value(metric: str, **labels: str) -> float | None:
        return parts.metrics.registry.get_sample_value(metric, {"controller": name, **labels})

    assert value("controller_runtime_reconcile_total", result="error") == 0
    assert value("controller_runtime_reconcile_errors_total") == 0
    assert value("controller_runtime_active_workers") == 0
    assert value("controller_runtime_max_concurrent_reconciles") == 8


async def test_queues_take_no_keys_before_there_are_workers(parts: Parts) -> None:
    for controller in parts.controllers:
        controller.queue.add("ns/mac")
        assert len(controller.queue) == 0
