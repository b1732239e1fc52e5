"""MetalNode: a Mac outside the cluster that serves LLMs, and what the cluster knows about it.

`spec` is written by the admin only, `status` by the controller only, and within the status each
field has one of two owners (field managers of server-side apply): *heartbeat* and *verification*,
named below at each field. Neighbours: `report` is what the Mac itself claims, `cached` what the
controller's caches keep of this type.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from llmkube.api.candidates import MAX_CANDIDATES, CandidateResult
from llmkube.api.meta import (
    API_VERSION_TEXT,
    ATOMIC_LIST,
    DNS_SUBDOMAIN,
    KIND_TEXT,
    ApiModel,
    Condition,
    Int32,
    Int64,
    ObjectMeta,
    Time,
    list_map,
)


class Toleration(ApiModel):
    """core/v1 Toleration, with its own words."""

    effect: str | None = Field(
        None,
        description="Effect indicates the taint effect to match. Empty means match all taint"
        " effects. When specified, allowed values are NoSchedule, PreferNoSchedule and NoExecute.",
    )
    key: str | None = Field(
        None,
        description="Key is the taint key that the toleration applies to. Empty means match all"
        " taint keys. If the key is empty, operator must be Exists; this combination means to match"
        " all values and all keys.",
    )
    operator: str | None = Field(
        None,
        description="Operator represents a key's relationship to the value. Valid operators are"
        " Exists, Equal, Lt, and Gt. Defaults to Equal. Exists is equivalent to wildcard for value,"
        " so that a pod can tolerate all taints of a particular category. Lt and Gt perform numeric"
        " comparisons (requires feature gate TaintTolerationComparisonOperators).",
    )
    toleration_seconds: Int64 | None = Field(
        None,
        description="TolerationSeconds represents the period of time the toleration (which must be"
        " of effect NoExecute, otherwise this field is ignored) tolerates the taint. By default, it"
        " is not set, which means tolerate the taint forever (do not evict). Zero and negative"
        " values will be treated as 0 (evict immediately) by the system.",
    )
    value: str | None = Field(
        None,
        description="Value is the taint value the toleration matches to. If the operator is Exists,"
        " the value should be empty, otherwise just a regular string.",
    )


class VerifierPlacement(ApiModel):
    node_selector: dict[str, str] | None = Field(
        None, description="NodeSelector is copied to the verifier pod."
    )
    tolerations: list[Toleration] | None = Field(
        None,
        description="Tolerations are copied to the verifier pod.",
        json_schema_extra=ATOMIC_LIST,
    )


class MetalNodeSpec(ApiModel):
    host_ip: str | None = Field(
        None,
        alias="hostIP",
        max_length=45,
        description="HostIP is an address the admin knows reaches this Mac. It is tried before the"
        " agent's own candidates and is still verified by the dial-back; it is never trusted on its"
        " own. The controller validates it (Reachable=False, reason InvalidSpec, when it is not an"
        " IP address) rather than a CEL rule, whose isIP() would need Kubernetes 1.31.",
    )
    lease_name: str = Field(
        min_length=1,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="LeaseName is the coordination.k8s.io Lease, in this namespace, that the agent"
        " renews as its heartbeat and annotates with its report.",
    )
    service_account_name: str = Field(
        min_length=1,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="ServiceAccountName is the ServiceAccount the Mac's agent authenticates as."
        " Deleting that ServiceAccount revokes every token the agent holds.",
    )
    verifier: VerifierPlacement | None = Field(
        None,
        description="Verifier places the dial-back verifier pod. Point it at the nodes the relay"
        " pods for this Mac run on, so the check tests the network path the relay will use.",
    )


class Candidate(ApiModel):
    address: str = Field(description="Address is an IP address.")
    checked_at: Time | None = Field(
        None,
        description="CheckedAt is when the verifier finished the check that produced Result.",
    )
    result: CandidateResult = Field(description="Result is the dial-back outcome.")
    source: str | None = Field(
        None,
        description="Source says where the address came from: override (spec.hostIP or the agent's"
        " --host-ip), tailnet, lan or docker-host.",
    )


class Capacity(ApiModel):
    chip: str | None = Field(
        None, description='Chip is the CPU brand string (for example "Apple M5 Max").'
    )
    gpu_cores: Int32 | None = Field(None, description="GPUCores is the GPU core count.")
    memory: str | None = Field(
        None,
        description="Memory is MemoryBytes as a quantity (for example 128Gi), for display.",
    )
    memory_bytes: Int64 | None = Field(
        None, description="MemoryBytes is the Mac's unified memory in bytes."
    )
    metal_version: str | None = Field(
        None,
        description='MetalVersion is the Metal family the GPU supports (for example "Metal 4").',
    )


class Verification(ApiModel):
    consecutive_failures: Int32 | None = Field(
        None,
        description="ConsecutiveFailures counts checks in a row that verified no address; it sets"
        " the retry backoff.",
    )
    input_hash: str | None = Field(
        None,
        description="InputHash identifies the pin, ingress certificate, port, candidate list and"
        " verifier placement the last completed check ran against. A change starts a new check.",
    )
    last_check_time: Time | None = Field(
        None, description="LastCheckTime is when the last completed check finished."
    )
    last_start_time: Time | None = Field(
        None,
        description="LastStartTime is when the controller last started a verifier pod. Starts are"
        " at least 30 seconds apart, whatever the Mac reports.",
    )
    pod_uid: str | None = Field(
        None,
        alias="podUID",
        description="PodUID is the UID of the verifier pod the controller last created. Only that"
        " pod's results are read.",
    )


class MetalNodeStatus(ApiModel):
    # owner: heartbeat
    agent_version: str | None = Field(
        None, description="AgentVersion is the version the agent reports."
    )
    # owner: verification
    candidates: list[Candidate] | None = Field(
        None,
        max_length=MAX_CANDIDATES,
        description="Candidates are the addresses tried, in preference order, with the last"
        " dial-back result for each.",
        json_schema_extra=ATOMIC_LIST,
    )
    # owner: heartbeat
    capacity: Capacity | None = Field(
        None, description="Capacity is the hardware the agent reports."
    )
    # owners: heartbeat has AgentConnected, verification has Reachable
    conditions: list[Condition] | None = Field(
        None,
        description="Conditions: AgentConnected and Reachable.",
        json_schema_extra=list_map("type"),
    )
    # owner: verification
    host_ip: str | None = Field(
        None,
        alias="hostIP",
        description="HostIP is the first candidate the dial-back verified. It is set only while"
        " Reachable is True.",
    )
    # owner: verification
    ingress_port: Int32 | None = Field(
        None, description="IngressPort is the agent's TLS ingress port."
    )
    # owner: verification
    ingress_spki: str | None = Field(
        None,
        alias="ingressSPKI",
        description="IngressSPKI is the base64 SHA-256 digest of the agent ingress certificate's"
        " public key, as the agent reports it. The dial-back and the relay complete TLS only"
        " against this key; the dial-back also requires the certificate the agent reports, which"
        " must name this MetalNode's UID.",
    )
    # owner: heartbeat
    last_heartbeat_time: Time | None = Field(
        None,
        description="LastHeartbeatTime is the Lease's renewTime, accurate to about a minute: it"
        " advances when AgentConnected changes or when it is more than 60 seconds behind. The Lease"
        " holds the exact time.",
    )
    # owner: verification
    observed_generation: Int64 | None = Field(
        None, description="ObservedGeneration is the spec generation this status reflects."
    )
    # owner: verification
    verification: Verification | None = Field(
        None, description="Verification is the dial-back bookkeeping."
    )


class MetalNode(ApiModel):
    """MetalNode is a Mac outside the cluster whose GPU serves LLMs. It joins over an outbound
    connection; its status says whether its agent is alive and at which address and TLS key pods
    in this cluster have really reached it."""

    api_version: Literal["inference.llmkube.dev/v1alpha1"] = Field(
        "inference.llmkube.dev/v1alpha1", description=API_VERSION_TEXT
    )
    kind: Literal["MetalNode"] = Field("MetalNode", description=KIND_TEXT)
    metadata: ObjectMeta
    spec: MetalNodeSpec = Field(
        description="MetalNodeSpec is written by the cluster admin (llmkube metal token create)."
        " The agent has no write access to it."
    )
    status: MetalNodeStatus | None = Field(
        None, description="MetalNodeStatus is written only by the controller."
    )
