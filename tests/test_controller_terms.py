"""What is connected before anything runs: queues that wait for leadership, metrics from zero."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from llmkube.api.cached import CachedPod
from llmkube.clock import Clock, SystemClock
from llmkube.controller.options import ControllerName, Options
from llmkube.controller.parts import Parts
from llmkube.controller.tuning import Tuning
from llmkube.informers.options import ReflectorSettings
from llmkube.kube.client import KubeClient
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import METALNODES
from llmkube.metrics import Metrics
from tests.support.clock import FakeClock

pytestmark = pytest.mark.cluster


@pytest.fixture
def parts(admin: KubeClient) -> Parts:
    return build(admin, SystemClock())


def build(client: KubeClient, clock: Clock, **tuning: Any) -> Parts:
    recorder = EventRecorder(client, clock, "test", "one")
    return Parts(Options(tuning=Tuning(**tuning)), client, recorder, Metrics(), clock)


@pytest.mark.parametrize("name", list(ControllerName))
async def test_every_controller_counts_from_zero_before_it_runs(
    parts: Parts, name: ControllerName
) -> None:
    def value(metric: str, **labels: str) -> float | None:
        return parts.metrics.registry.get_sample_value(metric, {"controller": name, **labels})

    assert value("controller_runtime_reconcile_total", result="error") == 0
    assert value("controller_runtime_reconcile_errors_total") == 0
    assert value("controller_runtime_active_workers") == 0
    assert value("controller_runtime_max_concurrent_reconciles") == 32


async def test_queues_take_no_keys_before_there_are_workers(parts: Parts) -> None:
    for controller in parts.controllers:
        controller.queue.add("ns/mac")
        assert len(controller.queue) == 0


async def test_how_long_an_echo_is_awaited_is_a_setting(admin: KubeClient) -> None:
    clock = FakeClock()
    settings = ReflectorSettings(echo_limit=timedelta(seconds=1))
    guard = build(admin, clock, reflector=settings).informers["metalnodes"].guard()
    guard.wrote("ns/mac", "some-uid", "7")
    assert guard.check("ns/mac") == "wait"
    clock.advance(timedelta(seconds=1))
    assert guard.check("ns/mac") == "read live"


async def test_a_term_begins_with_pods_whose_mac_went_while_nobody_led(parts: Parts) -> None:
    owner = {"apiVersion": METALNODES.api_version, "kind": "MetalNode", "name": "gone", "uid": "u"}
    metadata = {
        "name": "check",
        "namespace": "macs",
        "uid": "p",
        "resourceVersion": "1",
        "ownerReferences": [owner],
    }
    pod = msgspec.convert({"metadata": metadata}, CachedPod)
    parts.informers["pods"].put(pod, SystemClock().now(), first_sight=True)
    (verification,) = (one for one in parts.controllers if one.name == "verification")
    assert len(verification.queue) == 0
    verification.queue.resume()
    verification.enqueue_all()
    assert await verification.queue.get() == "macs/gone"
