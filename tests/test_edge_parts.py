"""What an edge counts, and what it says when counting failed: tables and properties."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.edge.local import combine
from llmkube.edge.parts import (
    Capacity,
    Failed,
    Fresh,
    Inference,
    Node,
    Omitted,
    Service,
    count_inference,
    count_nodes,
    parse_count,
    read_capacity,
    read_inference,
    settle,
)
from llmkube.edge.pusher import (
    Report,
    build_status,
    left_behind,
    read_interval,
    retry_pause,
)
from llmkube.edge.settings import EdgeSettings
from llmkube.kube.errors import TooManyRequests, Unavailable

SETTINGS = EdgeSettings()
CAPACITY = Capacity(3, 8, 6)
INFERENCE = Inference(4, 5, 3, 1)


def node(
    capacity: Any = None,
    allocatable: Any = None,
    *,
    ready: Any = "True",
    unschedulable: Any = None,
) -> Node:
    body = {
        "spec": {"unschedulable": unschedulable},
        "status": {
            "capacity": capacity,
            "allocatable": allocatable if allocatable is not None else capacity,
            "conditions": [{"type": "MemoryPressure", "status": "False"}]
            + ([{"type": "Ready", "status": ready}] if ready else []),
        },
    }
    return msgspec.json.decode(msgspec.json.encode(body), type=Node)


def service(phase: Any) -> Service:
    return msgspec.json.decode(msgspec.json.encode({"status": {"phase": phase}}), type=Service)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param([], Capacity(0, 0, 0), id="no nodes"),
        pytest.param([node({"cpu": "8"})], Capacity(1, 0, 0), id="a node without GPUs counts"),
        pytest.param(
            [
                node(
                    {
                        "nvidia.com/gpu": "4",
                        "amd.com/gpu": "2",
                        "gpu.intel.com/i915": "1",
                        "gpu.intel.com/xe": "1",
                        "nvidia.com/mig-1g.5gb": "7",
                    }
                )
            ],
            Capacity(1, 8, 8),
            id="GPUs of four kinds add up, and no others",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "4"}, {"nvidia.com/gpu": "3"})],
            Capacity(1, 4, 3),
            id="allocatable comes from allocatable",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "4"}, ready="False")],
            Capacity(1, 4, 0),
            id="a node that is not ready has no allocatable GPUs",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "4"}, ready="Unknown")],
            Capacity(1, 4, 0),
            id="a node of unknown state has no allocatable GPUs",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "4"}, ready=None)],
            Capacity(1, 4, 0),
            id="a node without a Ready condition has no allocatable GPUs",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "4"}, unschedulable=True), node({"amd.com/gpu": 2})],
            Capacity(2, 6, 2),
            id="a cordoned node has no allocatable GPUs",
        ),
        pytest.param(
            [msgspec.json.decode(b"{}", type=Node), node(None, None)],
            Capacity(2, 0, 0),
            id="a node without a status counts as a node",
        ),
        pytest.param(
            [node({"nvidia.com/gpu": "2147483647"}), node({"nvidia.com/gpu": "1"})],
            Capacity(2, 2**31 - 1, 2**31 - 1),
            id="sums end at what the field holds",
        ),
    ],
)
def test_nodes_and_gpus(nodes: list[Node], expected: Capacity) -> None:
    assert count_nodes(nodes) == expected


@pytest.mark.parametrize(
    ("quantity", "count"),
    [
        ("0", 0),
        ("8", 8),
        (8, 8),
        ("2k", 2000),
        ("1Ki", 1024),
        ("4.0", 4),
        ("", 0),
        ("-1", 0),
        (-1, 0),
        ("1.5", 0),
        ("500m", 0),
        ("eight", 0),
        (None, 0),
        (True, 0),
        ([8], 0),
        ("9" * 400, 0),
    ],
)
def test_quantities(quantity: Any, count: int) -> None:
    assert parse_count(quantity) == count


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans()))
def test_no_quantity_is_negative_or_an_error(quantity: Any) -> None:
    assert parse_count(quantity) >= 0


def test_services_by_phase() -> None:
    phases = ["Ready", "Ready", "Failed", "Pending", "", None, 7, "ready"]
    services = [service(phase) for phase in phases]
    services.append(msgspec.json.decode(b"{}", type=Service))
    assert count_inference(3, services) == Inference(3, 9, 2, 1)


@pytest.mark.parametrize(
    ("models", "services", "expected"),
    [
        pytest.param(
            Fresh(1), Fresh([service("Ready")]), Fresh(Inference(1, 1, 1, 0)), id="both read"
        ),
        pytest.param(Omitted("a"), Fresh([]), Omitted("a"), id="no Models: no part"),
        pytest.param(Fresh(1), Omitted("b"), Omitted("b"), id="no InferenceServices: no part"),
        pytest.param(Failed("a"), Omitted("b"), Omitted("b"), id="omitting wins over repeating"),
        pytest.param(Failed("a"), Fresh([]), Failed("a"), id="half a reading is none"),
    ],
)
def test_the_inference_part_is_whole_or_not_there(
    models: Any, services: Any, expected: Any
) -> None:
    assert combine(models, services) == expected


@pytest.mark.parametrize(
    ("reading", "last_good", "reported"),
    [
        pytest.param(Fresh(CAPACITY), None, CAPACITY, id="what was read"),
        pytest.param(Failed("timeout"), CAPACITY, CAPACITY, id="a passing failure repeats"),
        pytest.param(Failed("timeout"), None, None, id="nothing to repeat"),
        pytest.param(Omitted("403"), CAPACITY, None, id="a 403 or 404 omits"),
    ],
)
def test_settling_a_part(reading: Any, last_good: Any, reported: Any) -> None:
    assert settle(reading, last_good) == reported


NOW = datetime(2026, 11, 30, 19, 29, tzinfo=UTC)


def test_a_status_is_complete_and_never_holds_a_phase() -> None:
    assert build_status(Report(CAPACITY, INFERENCE), NOW) == {
        "lastHeartbeatTime": "2026-11-30T19:29:00.000000Z",
        "observedVersion": "v0.1.0",
        "capacity": {"nodes": 3, "gpusTotal": 8, "gpusAllocatable": 6},
        "inference": {
            "models": 4,
            "servicesTotal": 5,
            "servicesReady": 3,
            "servicesFailed": 1,
        },
    }
    assert set(build_status(Report(), NOW)) == {"lastHeartbeatTime", "observedVersion"}


def test_what_the_datacenter_has_is_read_back_only_if_it_is_whole() -> None:
    status = build_status(Report(CAPACITY, INFERENCE), NOW)
    assert (read_capacity(status), read_inference(status)) == (CAPACITY, INFERENCE)
    assert read_capacity({}) is None
    assert read_capacity({"capacity": {"nodes": 1}}) is None
    assert read_inference({"inference": []}) is None


def test_fields_of_ours_that_stayed_are_found() -> None:
    sent = build_status(Report(), NOW)
    answered = {**sent, "phase": "Connected", "capacity": {}, "other": 1}
    assert left_behind(sent, answered) == ["capacity"]
    assert left_behind(answered, answered) == []


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({}, 30),
        ({"spec": None}, 30),
        ({"spec": {"heartbeatIntervalSeconds": 5}}, 5),
        ({"spec": {"heartbeatIntervalSeconds": 0}}, 30),
        ({"spec": {"heartbeatIntervalSeconds": -5}}, 30),
        ({"spec": {"heartbeatIntervalSeconds": "5"}}, 30),
        ({"spec": {"heartbeatIntervalSeconds": 2**31 - 1}}, 2**31 - 1),
        ({"spec": {"heartbeatIntervalSeconds": 2**63}}, 30),
    ],
)
def test_the_interval_of_an_answer(spec: dict[str, Any], seconds: int) -> None:
    assert read_interval(spec, SETTINGS) == timedelta(seconds=seconds)


@given(
    st.integers(1, 10_000),
    st.timedeltas(timedelta(seconds=5), timedelta(days=30)),
    st.timedeltas(timedelta(0), timedelta(days=1)),
)
def test_retries_grow_to_a_cap_and_never_beyond_the_interval(
    failures: int, interval: timedelta, asked: timedelta
) -> None:
    for error in (Unavailable("down"), TooManyRequests("slow", retry_after=asked)):
        pause = retry_pause(failures, error, interval, SETTINGS)
        assert timedelta(seconds=1) <= pause <= min(SETTINGS.retry_cap, interval)
        assert retry_pause(failures + 1, error, interval, SETTINGS) >= pause
