"""What caches keep: the fields that rules read, decoded from whole objects, robustly."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.api import cached
from llmkube.api.cached import (
    TOO_LONG,
    BadObject,
    CachedLease,
    decode_federatedcluster,
    decode_lease,
    decode_meta,
    decode_metalnode,
    decode_pod,
)
from llmkube.api.crdgen import FEDERATEDCLUSTER, METALNODE, Definition, object_schema
from llmkube.api.names import MAX_REPORT_BYTES, METALNODE_UID_LABEL, VERIFY_ANNOTATION
from llmkube.api.report import InvalidReport, parse_report

METADATA = {
    "name": "studio",
    "namespace": "llm",
    "uid": "u-1",
    "resourceVersion": "42",
    "generation": 3,
    "annotations": {"inference.llmkube.dev/report": "{}"},
    "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    "ownerReferences": [
        {
            "apiVersion": "inference.llmkube.dev/v1alpha1",
            "kind": "MetalNode",
            "name": "n",
            "uid": "o",
        }
    ],
}


def encoded(**parts: Any) -> bytes:
    return json.dumps({"apiVersion": "x/v1", "kind": "X", "metadata": METADATA, **parts}).encode()


def test_a_lease() -> None:
    lease = decode_lease(
        encoded(spec={"renewTime": "2026-11-30T19:29:00.000000Z", "leaseDurationSeconds": 120})
    )
    assert lease.key == "llm/studio"
    assert (lease.metadata.uid, lease.metadata.resource_version) == ("u-1", "42")
    assert lease.report == "{}"
    assert lease.spec.renew_time == "2026-11-30T19:29:00.000000Z"
    assert lease.spec.lease_duration_seconds == 120


def test_a_metalnode_with_the_names_that_are_no_camel_case() -> None:
    node = decode_metalnode(
        encoded(
            spec={
                "leaseName": "l",
                "serviceAccountName": "s",
                "hostIP": "10.0.0.1",
                "verifier": {
                    "nodeSelector": {"zone": "a"},
                    "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 5}],
                },
            },
            status={
                "hostIP": "10.0.0.2",
                "ingressSPKI": "pin",
                "ingressPort": 9443,
                "candidates": [{"address": "10.0.0.2", "result": "NeverHeardOf"}],
                "verification": {"podUID": "p", "consecutiveFailures": 2},
                "capacity": {"gpuCores": 40, "memoryBytes": 2**37},
                "conditions": [{"type": "Reachable", "status": "True", "reason": "Verified"}],
            },
        )
    )
    assert node.spec.host_ip == "10.0.0.1"
    assert node.spec.verifier is not None
    assert node.spec.verifier.tolerations == (
        {"key": "gpu", "operator": "Exists", "tolerationSeconds": 5},
    )
    assert node.status.host_ip == "10.0.0.2"
    assert node.status.ingress_spki == "pin"
    assert node.status.candidates[0].result == "NeverHeardOf"
    assert node.status.verification is not None
    assert node.status.verification.pod_uid == "p"
    assert node.status.capacity is not None
    assert node.status.capacity.gpu_cores == 40
    condition = node.status.condition("Reachable")
    assert condition is not None
    assert condition.reason == "Verified"
    assert node.status.condition("AgentConnected") is None


def test_a_lease_costs_no_more_memory_than_the_longest_valid_report() -> None:
    """Whoever may write a Lease may put 256 KiB on it, and there may be thousands of them."""
    longest = "x" * MAX_REPORT_BYTES
    for report, kept in ((longest, longest), (longest + "x", TOO_LONG), ("ü" * 200_000, TOO_LONG)):
        annotations = {"inference.llmkube.dev/report": report, "other": "y" * 100_000}
        lease = decode_lease(encoded(metadata={**METADATA, "annotations": annotations}))
        assert lease.report == kept
    assert lease.report is TOO_LONG, "one text for all of them"
    with pytest.raises(InvalidReport, match="more than 16384 bytes"):
        parse_report(TOO_LONG)


def test_of_a_metalnodes_annotations_only_the_question_is_kept() -> None:
    asking = {VERIFY_ANNOTATION: "2026-11-30T19:29:00Z", "other": "y" * 200_000}
    node = decode_metalnode(encoded(metadata={**METADATA, "annotations": asking}))
    assert node.asked == "2026-11-30T19:29:00Z"
    assert len(msgspec.json.encode(node)) < 1_000
    assert decode_metalnode(encoded()).asked is None


def test_a_federatedcluster() -> None:
    raw = {
        "metadata": {"name": "floor-3"},
        "spec": {"heartbeatIntervalSeconds": 5},
        "status": {
            "phase": "Stale",
            "capacity": {"gpusTotal": 8, "gpusAllocatable": 7, "nodes": 2},
        },
    }
    site = decode_federatedcluster(json.dumps(raw).encode())
    assert site.key == "floor-3"
    assert site.spec.heartbeat_interval_seconds == 5
    assert site.status.phase == "Stale"
    assert site.status.capacity is not None
    assert site.status.capacity.gpus_total == 8


def test_of_a_pod_only_the_question_is_kept_and_of_a_strangers_nothing() -> None:
    """Anybody may put a verifier's labels on thousands of pods."""
    filler = "y" * 200_000
    question = {"name": "LLMKUBE_CHECK", "value": "{}"}
    env = [{"name": "OTHER", "value": filler}, question]
    stranger = {"apiVersion": "v1", "kind": "ConfigMap", "name": filler[:253], "uid": "c"}
    metadata = {
        **METADATA,
        "annotations": {"a": filler},
        "labels": {METALNODE_UID_LABEL: "u-2", "b": "c"},
        "ownerReferences": [stranger, *METADATA["ownerReferences"]],
    }
    spec = {"containers": [{"name": "verifier", "env": env}]}
    ours = decode_pod(encoded(metadata=metadata, spec=spec))
    assert [owner.kind for owner in ours.metadata.owner_references] == ["MetalNode"]
    assert [variable.value for variable in ours.spec.containers[0].env] == ["{}"]
    assert ours.metadata.labels is not None
    assert ours.metadata.labels.metalnode_uid == "u-2"
    question["value"] = filler
    foreign = decode_pod(encoded(metadata={**metadata, "ownerReferences": [stranger]}, spec=spec))
    assert foreign.spec.containers == ()
    for pod in (ours, foreign):
        assert len(msgspec.json.encode(pod)) < 1_000


def test_a_pod_that_ended() -> None:
    terminated = {"exitCode": 0, "message": "{}", "finishedAt": "2026-11-30T19:29:00Z"}
    pod = decode_pod(
        encoded(
            spec={"nodeName": "n"},
            status={
                "phase": "Succeeded",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                ],
                "containerStatuses": [{"name": "verifier", "state": {"terminated": terminated}}],
            },
        )
    )
    assert pod.metadata.owner_references[0].uid == "o"
    assert pod.status.conditions[0].reason == "Unschedulable"
    state = pod.status.container_statuses[0].state
    assert state.terminated is not None
    assert state.terminated.message == "{}"


DECODERS: list[Callable[[bytes], Any]] = [
    decode_lease,
    decode_metalnode,
    decode_federatedcluster,
    decode_pod,
    decode_meta,
]


@pytest.mark.parametrize("decode", DECODERS)
def test_metadata_alone_is_enough(decode: Callable[[bytes], Any]) -> None:
    assert decode(b'{"metadata":{"name":"a"}}').key == "a"


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"{}", id="no metadata"),
        pytest.param(b'{"metadata":{}}', id="no name"),
        pytest.param(b'{"metadata":{"name":1}}', id="a number for a name"),
        pytest.param(b'{"metadata":{"name":"\xff"}}', id="not UTF-8"),
        pytest.param(b'{"metadata":{"name":"a"},"x":' + b"[" * 100_000, id="a nesting bomb"),
    ],
)
def test_a_malformed_object_is_a_bad_object(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(BadObject):
        decode(data)


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(BadObject):
            decode(data)


def test_cached_objects_cost_the_garbage_collector_nothing() -> None:
    lease = decode_lease(encoded(spec={}))
    assert not gc.is_tracked(lease)
    assert not gc.is_tracked(lease.metadata)
    for kind in vars(cached).values():
        if isinstance(kind, type) and issubclass(kind, cached.Part):
            assert kind.__struct_config__.frozen
            assert not kind.__struct_config__.gc


def test_cached_objects_cannot_be_changed() -> None:
    lease: Any = decode_lease(encoded(spec={}))
    assert isinstance(lease, CachedLease)
    with pytest.raises(AttributeError):
        lease.spec = None


# The same contract twice ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        pytest.param(cached.CachedMetalNode, METALNODE, id="MetalNode"),
        pytest.param(cached.CachedFederatedCluster, FEDERATEDCLUSTER, id="FederatedCluster"),
    ],
)
def test_caches_know_only_fields_that_the_crd_has(kind: type, definition: Definition) -> None:
    schema = object_schema(definition.model)["properties"]
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if field.encode_name != "metadata":
            known = paths(field.type, field.encode_name)
            assert known <= schema_paths(schema[field.encode_name], field.encode_name)


def paths(kind: Any, prefix: str) -> set[str]:
    """The wire names of a type's fields, with their JSON types."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return set().union(*(paths(one, prefix) for one in types))
        case msgspec.inspect.VarTupleType(item_type=item):
            return {f"{prefix}: array"} | paths(item, f"{prefix}[]")
        case msgspec.inspect.StructType(fields=fields):
            below = (paths(f.type, f"{prefix}.{f.encode_name}") for f in fields)
            return {f"{prefix}: object"}.union(*below)
        case msgspec.inspect.StrType():
            return {f"{prefix}: string"}
        case msgspec.inspect.IntType():
            return {f"{prefix}: integer"}
        case msgspec.inspect.DictType():
            return {f"{prefix}: object"}
        case _:
            return set()  # None


def schema_paths(schema: dict[str, Any], prefix: str) -> set[str]:
    found = {f"{prefix}: {schema['type']}"}
    if "items" in schema:
        found |= schema_paths(schema["items"], f"{prefix}[]")
    for name, child in schema.get("properties", {}).items():
        found |= schema_paths(child, f"{prefix}.{name}")
    return found
