"""What an edge reports about its cluster: pure counting, and what to say when counting failed.

A status has two parts, each with all of its fields or not there at all: `capacity` (nodes and
GPUs) and `inference` (Models and InferenceServices). A part that could not be read for a passing
reason repeats its last good value; one that the edge may not read, or whose kind the cluster does
not have, is left out. Neighbour: `local`, which reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

P = TypeVar("P")

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
INT32_MAX = 2**31 - 1
_QUANTITY = re.compile(r"(\d{1,15})(?:\.0+)?(k|M|G|T|Ki|Mi|Gi|Ti)?")
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGT", 1)
}


# What is read ----------------------------------------------------------------------------------
class _Partial(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The fields we count. Leaves are untyped: one odd object must not cost the whole count."""


class NodeSpec(_Partial, frozen=True):
    unschedulable: Any = None


class NodeCondition(_Partial, frozen=True):
    type: Any = None
    status: Any = None


class NodeStatus(_Partial, frozen=True):
    capacity: dict[str, Any] | None = None
    allocatable: dict[str, Any] | None = None
    conditions: list[NodeCondition] | None = None


class Node(_Partial, frozen=True):
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)

    @property
    def takes_pods(self) -> bool:
        """Ready and schedulable."""
        ready = any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())
        return ready and self.spec.unschedulable is not True


class ServiceStatus(_Partial, frozen=True):
    phase: Any = None


class Service(_Partial, frozen=True):
    """An InferenceService."""

    status: ServiceStatus | None = None


class Counted(_Partial, frozen=True):
    """Anything of which only the number matters."""


# What is reported ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Capacity:
    """`status.capacity`."""

    nodes: int
    gpus_total: int
    gpus_allocatable: int

    def as_status(self) -> dict[str, int]:
        return {
            "nodes": self.nodes,
            "gpusTotal": self.gpus_total,
            "gpusAllocatable": self.gpus_allocatable,
        }


@dataclass(frozen=True, slots=True)
class Inference:
    """`status.inference`."""

    models: int
    services_total: int
    services_ready: int
    services_failed: int

    def as_status(self) -> dict[str, int]:
        return {
            "models": self.models,
            "servicesTotal": self.services_total,
            "servicesReady": self.services_ready,
            "servicesFailed": self.services_failed,
        }


def count_nodes(nodes: Iterable[Node]) -> Capacity:
    """Total GPUs from the capacity of all nodes; allocatable ones from those that take pods."""
    count = total = allocatable = 0
    for node in nodes:
        count += 1
        total += count_gpus(node.status.capacity)
        if node.takes_pods:
            allocatable += count_gpus(node.status.allocatable)
    return Capacity(_int32(count), _int32(total), _int32(allocatable))


def count_gpus(resources: Mapping[str, Any] | None) -> int:
    """GPUs of all vendors."""
    return sum(parse_count((resources or {}).get(name)) for name in GPU_RESOURCES)


def parse_count(quantity: Any) -> int:
    """A whole quantity of an extended resource; 0 for whatever is none."""
    if isinstance(quantity, int) and not isinstance(quantity, bool):
        return max(quantity, 0)
    match = _QUANTITY.fullmatch(quantity) if isinstance(quantity, str) else None
    return int(match[1]) * _SUFFIXES.get(match[2], 1) if match else 0


def count_inference(models: int, services: Iterable[Service]) -> Inference:
    """Models, and InferenceServices by phase."""
    phases = [service.status.phase if service.status else None for service in services]
    return Inference(
        models=_int32(models),
        services_total=_int32(len(phases)),
        services_ready=_int32(phases.count("Ready")),
        services_failed=_int32(phases.count("Failed")),
    )


def _int32(value: int) -> int:
    return min(value, INT32_MAX)


# What came of reading --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fresh(Generic[P]):
    """Read just now."""

    value: P


@dataclass(frozen=True, slots=True)
class Omitted:
    """Not to be had here: the cluster does not have this kind, or forbids us to read it."""

    why: str
    forbidden: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Not to be had now."""

    why: str


Reading = Fresh[P] | Omitted | Failed


def settle(reading: Reading[P], last_good: P | None) -> P | None:
    """What to report for a part: what was read, its last good value, or nothing."""
    match reading:
        case Fresh(value):
            return value
        case Failed():
            return last_good
        case Omitted():
            return None


def read_capacity(found: Mapping[str, Any]) -> Capacity | None:
    """`status.capacity` as the datacenter has it from an earlier run; None if it is not whole."""
    names = ("nodes", "gpusTotal", "gpusAllocatable")
    numbers = _numbers(found.get("capacity"), names)
    return None if numbers is None else Capacity(*numbers)


def read_inference(found: Mapping[str, Any]) -> Inference | None:
    """`status.inference` as the datacenter has it from an earlier run; None if it is not whole."""
    names = ("models", "servicesTotal", "servicesReady", "servicesFailed")
    numbers = _numbers(found.get("inference"), names)
    return None if numbers is None else Inference(*numbers)


def _numbers(part: Any, names: tuple[str, ...]) -> list[int] | None:
    if not isinstance(part, Mapping):
        return None
    numbers = [part.get(name) for name in names]
    return numbers if all(isinstance(number, int) for number in numbers) else None  # type: ignore[return-value]
