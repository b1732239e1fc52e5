"""The CRDs on a real API server: what it takes, what it refuses, what it keeps apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from llmkube.api.crdgen import DEFINITIONS, Definition, object_schema
from llmkube.api.federatedcluster import (
    FederatedCapacity,
    FederatedCluster,
    FederatedClusterSpec,
    FederatedClusterStatus,
    FederatedInference,
)
from llmkube.api.meta import Condition, ConditionStatus, ObjectMeta
from llmkube.api.metalnode import (
    Candidate,
    CandidateResult,
    Capacity,
    MetalNode,
    MetalNodeSpec,
    MetalNodeStatus,
    Toleration,
    Verification,
    VerifierPlacement,
)
from llmkube.kube.errors import Invalid
from llmkube.kube.resources import CRDS, FEDERATEDCLUSTERS, METALNODES
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

Unique = Callable[[str], str]
METALNODE_SPEC = {"leaseName": "lease", "serviceAccountName": "account"}
NOW = "2026-11-30T19:29:00Z"


@pytest.fixture(scope="module")
def ns(crds: ControlPlane) -> Iterator[str]:
    """One namespace for all cases here: each has objects of its own."""
    name = "crd-constraints"
    asyncio.run(crds.kubectl("create", "namespace", name))
    yield name
    asyncio.run(crds.kubectl("delete", "namespace", name, "--wait=false"))


def metalnode(name: str, **parts: Any) -> dict[str, Any]:
    head = {"apiVersion": METALNODES.api_version, "kind": "MetalNode", "metadata": {"name": name}}
    return {**head, "spec": METALNODE_SPEC, **parts}


def site(name: str, **parts: Any) -> dict[str, Any]:
    head = {"apiVersion": FEDERATEDCLUSTERS.api_version, "kind": "FederatedCluster"}
    return {**head, "metadata": {"name": name}, **parts}


def condition(**changes: Any) -> dict[str, Any]:
    valid = {
        "type": "Reachable",
        "status": "True",
        "reason": "Verified",
        "message": "",
        "lastTransitionTime": NOW,
    }
    return {key: value for key, value in (valid | changes).items() if value is not ...}


def spec(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (METALNODE_SPEC | changes).items() if value is not ...}


def candidates(count: int = 1, **changes: Any) -> dict[str, Any]:
    one = {"address": "10.0.0.1", "result": "Pending"} | changes
    return {"candidates": [{k: v for k, v in one.items() if v is not ...}] * count}


SPECS = [
    # (what it is about, accepted, refused)
    ("hostIP of 45 and 46 characters", spec(hostIP="1" * 45), spec(hostIP="1" * 46)),
    ("hostIP is text", spec(hostIP="10.0.0.1"), spec(hostIP=10)),
    ("leaseName is a DNS name", spec(leaseName="a.b-c.d"), spec(leaseName="-a")),
    ("leaseName has no capitals", spec(leaseName="a"), spec(leaseName="A")),
    ("leaseName does not end in a dot", spec(leaseName="a.b"), spec(leaseName="a.")),
    ("leaseName is not empty", spec(leaseName="0"), spec(leaseName="")),
    ("leaseName of 253 and 254", spec(leaseName="a" * 253), spec(leaseName="a" * 254)),
    ("leaseName is required", spec(), spec(leaseName=...)),
    ("serviceAccountName is a DNS name", spec(), spec(serviceAccountName="a_b")),
    ("serviceAccountName is not empty", spec(serviceAccountName="a"), spec(serviceAccountName="")),
    (
        "serviceAccountName of 253 and 254",
        spec(serviceAccountName="a" * 253),
        spec(serviceAccountName="a" * 254),
    ),
    ("serviceAccountName is required", spec(), spec(serviceAccountName=...)),
    (
        "nodeSelector maps text to text",
        spec(verifier={"nodeSelector": {"zone": "a"}}),
        spec(verifier={"nodeSelector": {"zone": 1}}),
    ),
    (
        "tolerations are objects",
        spec(verifier={"tolerations": [{"key": "gpu", "operator": "Exists"}]}),
        spec(verifier={"tolerations": ["gpu"]}),
    ),
    (
        "tolerationSeconds is an integer",
        spec(verifier={"tolerations": [{"tolerationSeconds": -1}]}),
        spec(verifier={"tolerations": [{"tolerationSeconds": "5"}]}),
    ),
]

STATUSES = [
    ("17 and 18 candidates", candidates(17), candidates(18)),
    ("a candidate has an address", candidates(), candidates(address=...)),
    ("a candidate has a result", candidates(), candidates(result=...)),
    *(
        (f"result {result.value}", candidates(result=result.value), candidates(result=result.name))
        for result in CandidateResult
    ),
    ("an unknown result", candidates(result="Error"), candidates(result="Fine")),
    ("checkedAt is a timestamp", candidates(checkedAt=NOW), candidates(checkedAt="yesterday")),
    ("source is free text", candidates(source="starlink"), candidates(source=1)),
    ("gpuCores is an integer", {"capacity": {"gpuCores": 40}}, {"capacity": {"gpuCores": 1.5}}),
    (
        "gpuCores fits 32 bits",
        {"capacity": {"gpuCores": 2**31 - 1}},
        {"capacity": {"gpuCores": 2**31}},
    ),
    (
        "memoryBytes is an integer of 64 bits",
        {"capacity": {"memoryBytes": 2**63 - 1}},
        {"capacity": {"memoryBytes": "137438953472"}},
    ),
    (
        "lastHeartbeatTime is a timestamp",
        {"lastHeartbeatTime": "2026-11-30T19:29:00.123456Z"},
        {"lastHeartbeatTime": "2026-11-30"},
    ),
    ("ingressPort is an integer", {"ingressPort": 9443}, {"ingressPort": "9443"}),
    ("observedGeneration is an integer", {"observedGeneration": 1}, {"observedGeneration": "1"}),
    (
        "lastCheckTime is a timestamp",
        {"verification": {"lastCheckTime": NOW}},
        {"verification": {"lastCheckTime": "never"}},
    ),
    (
        "lastStartTime is a timestamp",
        {"verification": {"lastStartTime": NOW}},
        {"verification": {"lastStartTime": ""}},
    ),
    (
        "consecutiveFailures is an integer",
        {"verification": {"consecutiveFailures": 3}},
        {"verification": {"consecutiveFailures": "3"}},
    ),
]

CONDITIONS = [
    ("reason without a space", condition(), condition(reason="not verified")),
    ("reason begins with a letter", condition(reason="V1"), condition(reason="1V")),
    ("reason is not empty", condition(reason="V"), condition(reason="")),
    ("reason of 1024 and 1025", condition(reason="V" * 1024), condition(reason="V" * 1025)),
    ("reason is required", condition(), condition(reason=...)),
    ("status is one of three", condition(status="Unknown"), condition(status="true")),
    ("status is required", condition(), condition(status=...)),
    ("message may be empty but not missing", condition(message=""), condition(message=...)),
    (
        "message of 32768 and 32769",
        condition(message="x" * 32768),
        condition(message="x" * 32769),
    ),
    ("type of 316 and 317", condition(type="T" * 316), condition(type="T" * 317)),
    ("type without a space", condition(type="example.com/Up"), condition(type="Is up")),
    ("type is required", condition(), condition(type=...)),
    (
        "lastTransitionTime is a timestamp",
        condition(),
        condition(lastTransitionTime="2026-11-30 19:29"),
    ),
    ("lastTransitionTime is required", condition(), condition(lastTransitionTime=...)),
    (
        "observedGeneration is at least 0",
        condition(observedGeneration=0),
        condition(observedGeneration=-1),
    ),
]

CAPACITY = {"gpusAllocatable": 7, "gpusTotal": 8, "nodes": 2}
INFERENCE = {"models": 1, "servicesFailed": 0, "servicesReady": 2, "servicesTotal": 2}


def without(parts: dict[str, int], key: str) -> dict[str, int]:
    return {name: value for name, value in parts.items() if name != key}


SITE_STATUSES = [
    *(
        (f"capacity needs {key}", {"capacity": CAPACITY}, {"capacity": without(CAPACITY, key)})
        for key in CAPACITY
    ),
    *(
        (f"inference needs {key}", {"inference": INFERENCE}, {"inference": without(INFERENCE, key)})
        for key in INFERENCE
    ),
    (
        "nodes is an integer of 32 bits",
        {"capacity": CAPACITY},
        {"capacity": CAPACITY | {"nodes": 2**31}},
    ),
    (
        "lastHeartbeatTime is a timestamp",
        {"lastHeartbeatTime": "2026-11-30T19:29:00.123456Z"},
        {"lastHeartbeatTime": "soon"},
    ),
    ("observedVersion is text", {"observedVersion": "v0.1.0"}, {"observedVersion": 1}),
    ("phase is text", {"phase": "Connected"}, {"phase": 1}),
]

SITE_SPECS = [
    ("an interval of 5 and 4", {"heartbeatIntervalSeconds": 5}, {"heartbeatIntervalSeconds": 4}),
    (
        "an interval is an integer of 32 bits",
        {"heartbeatIntervalSeconds": 2**31 - 1},
        {"heartbeatIntervalSeconds": 2**31},
    ),
    ("displayName is text", {"displayName": "Floor 3"}, {"displayName": 3}),
    ("dataResidencyTier is text", {"dataResidencyTier": "eu"}, {"dataResidencyTier": ["eu"]}),
]

Cases = list[tuple[str, dict[str, Any], dict[str, Any]]]


def table(cases: Cases) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("accepted", "refused"), [pytest.param(a, r, id=what) for what, a, r in cases]
    )


@table(SPECS)
async def test_metalnode_spec(
    admin: KubeClient, ns: str, unique: Unique, accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    await admin.create(METALNODES, metalnode(unique("spec"), spec=accepted), ns)
    with pytest.raises(Invalid):
        await admin.create(METALNODES, metalnode(unique("spec"), spec=refused), ns)


async def test_metalnode_needs_a_spec(admin: KubeClient, ns: str, unique: Unique) -> None:
    body = metalnode(unique("spec"))
    del body["spec"]
    with pytest.raises(Invalid, match=r"spec: Required value"):
        await admin.create(METALNODES, body, ns)


@table(STATUSES)
async def test_metalnode_status(
    admin: KubeClient, ns: str, unique: Unique, accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    await check_status(admin, ns, unique("status"), accepted, refused)


@table(CONDITIONS)
async def test_condition(
    admin: KubeClient, ns: str, unique: Unique, accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    name = unique("condition")
    await check_status(admin, ns, name, {"conditions": [accepted]}, {"conditions": [refused]})


async def check_status(
    admin: KubeClient, ns: str, name: str, accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    await admin.create(METALNODES, metalnode(name), ns)
    with pytest.raises(Invalid):  # first, for the accepted one would be merged into it
        await admin.merge_patch(METALNODES, name, ns, {"status": refused}, subresource="status")
    patch = {"status": accepted}
    written = await admin.merge_patch(METALNODES, name, ns, patch, subresource="status")
    assert written["status"] == accepted


@table(SITE_SPECS)
async def test_site_spec(
    admin: KubeClient,
    crds: ControlPlane,
    unique: Unique,
    accepted: dict[str, Any],
    refused: dict[str, Any],
) -> None:
    await admin.create(FEDERATEDCLUSTERS, site(unique("spec"), spec=accepted))
    with pytest.raises(Invalid):
        await admin.create(FEDERATEDCLUSTERS, site(unique("spec"), spec=refused))


@table(SITE_STATUSES)
async def test_site_status(
    admin: KubeClient,
    crds: ControlPlane,
    unique: Unique,
    accepted: dict[str, Any],
    refused: dict[str, Any],
) -> None:
    name = unique("status")
    await admin.create(FEDERATEDCLUSTERS, site(name))  # a site without spec is fine
    with pytest.raises(Invalid):  # first, for the accepted one would be merged into it
        await admin.merge_patch(
            FEDERATEDCLUSTERS, name, None, {"status": refused}, subresource="status"
        )
    patch = {"status": accepted}
    written = await admin.merge_patch(FEDERATEDCLUSTERS, name, None, patch, subresource="status")
    assert written["status"] == accepted


# Definitions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("resource", [METALNODES, FEDERATEDCLUSTERS], ids=lambda r: r.kind)
async def test_established_and_structural(
    admin: KubeClient, crds: ControlPlane, resource: Any
) -> None:
    definition = await admin.get(CRDS, f"{resource.plural}.{resource.group}")
    conditions = {c["type"]: c["status"] for c in definition["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
async def test_explain_shows_every_field(crds: ControlPlane, definition: Definition) -> None:
    async def explained() -> str:
        command = ("explain", definition.plural, "--recursive")
        return (await crds.kubectl(*command, check=False)).stdout

    # OpenAPI is published a moment after the CRD is established.
    text = await eventually(explained, f"kubectl explain knows {definition.plural}")
    assert sorted(paths(object_schema(definition.model))) == sorted(explained_paths(text))


def paths(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield prefix + name
        yield from paths(child.get("items", child), f"{prefix}{name}.")


def explained_paths(text: str) -> Iterator[str]:
    """The paths of the indented tree, without metadata's, which are the API server's."""
    above: list[str] = []
    for line in text.partition("FIELDS:")[2].splitlines():
        if "\t<" in line:
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            above[depth:] = [line.split("\t")[0].strip()]
            if above[0] != "metadata" or depth == 0:
                yield ".".join(above)


async def test_explain_tells_what_a_field_means(crds: ControlPlane) -> None:
    async def explained() -> str:
        result = await crds.kubectl("explain", "mn.status.ingressSPKI", check=False)
        return " ".join(result.stdout.split())

    text = await eventually(explained, "kubectl explain knows the short name")
    assert "which must name this MetalNode's UID." in text


async def test_columns_show_what_the_status_says(
    crds: ControlPlane, admin: KubeClient, ns: str, unique: Unique
) -> None:
    name = unique("columns")
    await admin.create(METALNODES, metalnode(name), ns)
    status = {
        "capacity": {"chip": "Apple M5 Max", "memory": "128Gi", "gpuCores": 40},
        "hostIP": "100.101.2.3",
        "ingressPort": 9443,
        "agentVersion": "v0.1.0",
        "conditions": [condition(), condition(type="AgentConnected", status="False")],
    }
    await admin.merge_patch(METALNODES, name, ns, {"status": status}, subresource="status")
    narrow = await crds.kubectl("get", "mn", name, "-n", ns)
    assert narrow.stdout.split()[:6] == [
        "NAME",
        "CHIP",
        "MEMORY",
        "HOST-IP",
        "CONNECTED",
        "REACHABLE",
    ]
    assert "Apple M5 Max   128Gi    100.101.2.3   False       True" in narrow.stdout
    assert "9443" not in narrow.stdout
    wide = await crds.kubectl("get", "mn", name, "-n", ns, "-o", "wide")
    for shown in ("v0.1.0", "9443", "40", "Verified", "REACHABLE REASON"):
        assert shown in wide.stdout
    by_category = await crds.kubectl("get", "llmkube", "-n", ns, "-o", "name")
    assert f"metalnode.inference.llmkube.dev/{name}" in by_category.stdout


# Behaviour --------------------------------------------------------------------------------------
async def test_a_status_write_leaves_the_spec_alone_and_the_reverse(
    admin: KubeClient, ns: str, unique: Unique
) -> None:
    name = unique("apart")
    created = await admin.create(METALNODES, metalnode(name, status={"hostIP": "10.9.9.9"}), ns)
    assert "status" not in created
    patch = {"spec": {"hostIP": "10.0.0.9"}, "status": {"hostIP": "10.0.0.1"}}
    after_status = await admin.merge_patch(METALNODES, name, ns, patch, subresource="status")
    assert after_status["spec"] == METALNODE_SPEC
    assert after_status["status"] == {"hostIP": "10.0.0.1"}
    assert after_status["metadata"]["generation"] == 1
    patch = {"spec": {"hostIP": "10.0.0.9"}, "status": {"hostIP": "10.6.6.6"}}
    after_spec = await admin.merge_patch(METALNODES, name, ns, patch)
    assert after_spec["spec"]["hostIP"] == "10.0.0.9"
    assert after_spec["status"] == {"hostIP": "10.0.0.1"}
    assert after_spec["metadata"]["generation"] == 2


async def test_unknown_fields_are_pruned(admin: KubeClient, ns: str, unique: Unique) -> None:
    name = unique("pruned")
    toleration = {"key": "a", "vegetable": "leek"}
    body = metalnode(
        name, spec=spec(colour="blue", verifier={"tolerations": [toleration]}), surprise={}
    )
    created = await admin.create(METALNODES, body, ns)
    assert created["spec"] == spec(verifier={"tolerations": [{"key": "a"}]})
    assert "surprise" not in created
    status = {"mood": "good", "capacity": {"chip": "M5", "smell": "new"}}
    written = await admin.merge_patch(
        METALNODES, name, ns, {"status": status}, subresource="status"
    )
    assert written["status"] == {"capacity": {"chip": "M5"}}


async def test_two_managers_share_the_conditions(
    admin: KubeClient, ns: str, unique: Unique
) -> None:
    """The list-map: each condition has its owner, and an apply removes only its own."""
    name = unique("conditions")
    await admin.create(METALNODES, metalnode(name), ns)

    async def apply(manager: str, *kinds: str) -> list[str]:
        body = metalnode(name, status={"conditions": [condition(type=kind) for kind in kinds]})
        del body["spec"]
        body["metadata"]["namespace"] = ns
        written = await admin.apply(METALNODES, body, field_manager=manager, subresource="status")
        return sorted(c["type"] for c in written.get("status", {}).get("conditions", ()))

    assert await apply("llmkube-heartbeat", "AgentConnected") == ["AgentConnected"]
    assert await apply("llmkube-verification", "Reachable") == ["AgentConnected", "Reachable"]
    assert await apply("llmkube-verification") == ["AgentConnected"]


async def test_a_metalnode_makes_the_round_trip(admin: KubeClient, ns: str, unique: Unique) -> None:
    at = datetime(2026, 11, 30, 19, 29, 0, 123456, tzinfo=UTC)
    node = MetalNode(
        metadata=ObjectMeta(name=unique("round-trip"), namespace=ns),
        spec=MetalNodeSpec(
            host_ip="2001:db8::1",
            lease_name="lease",
            service_account_name="account",
            verifier=VerifierPlacement(
                node_selector={"zone": "a"},
                tolerations=[Toleration(key="gpu", operator="Exists", toleration_seconds=2**40)],
            ),
        ),
    )
    created = MetalNode.from_json(await admin.create(METALNODES, node.to_json(), ns))
    assert created.spec == node.spec
    status = MetalNodeStatus(
        agent_version="v0.1.0",
        candidates=[
            Candidate(address="2001:db8::1", result=CandidateResult.REACHABLE, checked_at=at)
        ],
        capacity=Capacity(
            chip="Apple M5 Max",
            gpu_cores=40,
            memory="128Gi",
            memory_bytes=2**37,
            metal_version="Metal 4",
        ),
        conditions=[
            Condition(
                type="Reachable",
                status=ConditionStatus.TRUE,
                reason="Verified",
                message="ünï\u00e7ode",
                last_transition_time=at.replace(microsecond=0),
                observed_generation=1,
            )
        ],
        host_ip="2001:db8::1",
        ingress_port=9443,
        ingress_spki="pin",
        last_heartbeat_time=at,
        observed_generation=1,
        verification=Verification(
            consecutive_failures=0,
            input_hash="hash",
            last_check_time=at,
            last_start_time=at.replace(microsecond=0),
            pod_uid="uid",
        ),
    )
    body = created.model_copy(update={"status": status}).to_json()
    written = MetalNode.from_json(await admin.update(METALNODES, body, subresource="status"))
    read = MetalNode.from_json(await admin.get(METALNODES, str(created.metadata.name), ns))
    assert written.status == read.status == status


async def test_a_federatedcluster_makes_the_round_trip(
    admin: KubeClient, crds: ControlPlane, unique: Unique
) -> None:
    site = FederatedCluster(
        metadata=ObjectMeta(name=unique("round-trip")),
        spec=FederatedClusterSpec(
            data_residency_tier="eu", display_name="Floor 3", heartbeat_interval_seconds=5
        ),
    )
    created = FederatedCluster.from_json(await admin.create(FEDERATEDCLUSTERS, site.to_json()))
    assert created.spec == site.spec
    status = FederatedClusterStatus(
        capacity=FederatedCapacity(gpus_allocatable=7, gpus_total=8, nodes=2),
        inference=FederatedInference(
            models=1, services_failed=0, services_ready=2, services_total=2
        ),
        last_heartbeat_time=datetime(2026, 11, 30, 19, 29, 0, 5, tzinfo=UTC),
        observed_version="v0.1.0",
        phase="Connected",
    )
    body = created.model_copy(update={"status": status}).to_json()
    written = await admin.update(FEDERATEDCLUSTERS, body, subresource="status")
    assert FederatedCluster.from_json(written).status == status
    assert json.dumps(written).count("2026-11-30T19:29:00.000005Z") >= 1
