"""What the informers keep of each object: the fields that our rules read, and nothing else.

Decoding is the hottest path of the controller, and its caches are most of its memory; hence
msgspec structs without garbage-collector bookkeeping, holding a part of each object. Timestamps
stay text (`times.parse_time` reads them), enums stay text (an unknown one costs its object a
message, not the decoder an error). All structs are frozen: stores hand them out without copying.
Neighbours: `metalnode` and `federatedcluster` are the complete types, for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import intern
from typing import TypeVar

import msgspec
from msgspec import field

from llmkube.api.names import (
    MAX_REPORT_BYTES,
    METALNODE_UID_LABEL,
    REPORT_ANNOTATION,
    VERIFY_ANNOTATION,
)
from llmkube.verifier.protocol import CHECK_VARIABLE

T = TypeVar("T", bound="CachedObject")


class BadObject(ValueError):
    """An object that does not have the shape its kind promises; the message says where."""


class Part(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A part of an object. `gc=False` is safe: no part can refer back to its owner."""


class OwnerReference(Part, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str


class Identity(Part, frozen=True):
    """The metadata that stores need. `name` is the only field that every object is sure to have."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""

    @property
    def key(self) -> str:
        """`namespace/name`, or `name` of a cluster-scoped object.

        Interned: stores, indexes, queues and books all hold the same text.
        """
        return intern(f"{self.namespace}/{self.name}" if self.namespace else self.name)


class Meta(Identity, frozen=True):
    """ObjectMeta, as far as rules read it."""

    generation: int = 0
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class CachedObject(Part, frozen=True):
    """The base of everything that a store holds."""

    metadata: Identity

    @property
    def key(self) -> str:
        return self.metadata.key


class CachedMeta(CachedObject, frozen=True):
    """PartialObjectMetadata: of ServiceAccounts only their existence matters."""


# Lease ------------------------------------------------------------------------------------------
class LeaseSpec(Part, frozen=True):
    renew_time: str | None = None
    lease_duration_seconds: int | None = None


TOO_LONG = " " * (MAX_REPORT_BYTES + 1)
"""Stands for every report that is longer than any valid one, and is refused for the same reason.
Whoever may write a Lease could otherwise have the controller hold 256 KiB for each."""


class LeaseAnnotations(Part, frozen=True):
    """Only the agent's report: a Mac may add any others, and they would cost memory."""

    report: str | None = field(default=None, name=REPORT_ANNOTATION)

    def __post_init__(self) -> None:
        if self.report is not None and len(self.report) > MAX_REPORT_BYTES:
            msgspec.structs.force_setattr(self, "report", TOO_LONG)


class LeaseMeta(Identity, frozen=True):
    annotations: LeaseAnnotations | None = None


class CachedLease(CachedObject, frozen=True):
    """A Lease. There are as many as there are Macs, and each changes every 30 s."""

    metadata: LeaseMeta
    spec: LeaseSpec = LeaseSpec()

    @property
    def report(self) -> str | None:
        """The agent's report: untrusted text."""
        annotations = self.metadata.annotations
        return None if annotations is None else annotations.report


# MetalNode --------------------------------------------------------------------------------------
class CachedCondition(Part, frozen=True):
    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int | None = None


class CachedVerifierPlacement(Part, frozen=True):
    """Copied to the verifier pod verbatim, so nothing here is interpreted."""

    node_selector: dict[str, str] | None = None
    tolerations: tuple[dict[str, str | int], ...] | None = None


class CachedMetalNodeSpec(Part, frozen=True):
    lease_name: str = ""
    service_account_name: str = ""
    host_ip: str | None = field(default=None, name="hostIP")
    verifier: CachedVerifierPlacement | None = None


class CachedCandidate(Part, frozen=True):
    address: str
    result: str
    source: str | None = None
    checked_at: str | None = None


class CachedCapacity(Part, frozen=True):
    chip: str | None = None
    gpu_cores: int | None = None
    memory: str | None = None
    memory_bytes: int | None = None
    metal_version: str | None = None


class CachedVerification(Part, frozen=True):
    last_start_time: str | None = None
    pod_uid: str | None = field(default=None, name="podUID")
    last_check_time: str | None = None
    input_hash: str | None = None
    consecutive_failures: int | None = None


class CachedMetalNodeStatus(Part, frozen=True):
    conditions: tuple[CachedCondition, ...] = ()
    last_heartbeat_time: str | None = None
    agent_version: str | None = None
    capacity: CachedCapacity | None = None
    observed_generation: int | None = None
    host_ip: str | None = field(default=None, name="hostIP")
    ingress_port: int | None = None
    ingress_spki: str | None = field(default=None, name="ingressSPKI")
    candidates: tuple[CachedCandidate, ...] = ()
    verification: CachedVerification | None = None

    def condition(self, kind: str) -> CachedCondition | None:
        """The condition of that type, or None."""
        for condition in self.conditions:
            if condition.type == kind:
                return condition
        return None


class MetalNodeAnnotations(Part, frozen=True):
    """Only what asks for a check: of others there may be 256 KiB, and they say nothing to us."""

    verify: str | None = field(default=None, name=VERIFY_ANNOTATION)


class MetalNodeMeta(Identity, frozen=True):
    generation: int = 0
    deletion_timestamp: str | None = None
    annotations: MetalNodeAnnotations | None = None


class CachedMetalNode(CachedObject, frozen=True):
    metadata: MetalNodeMeta
    spec: CachedMetalNodeSpec = CachedMetalNodeSpec()
    status: CachedMetalNodeStatus = CachedMetalNodeStatus()

    @property
    def asked(self) -> str | None:
        """What `llmkube metal verify` left on it: the lastStartTime that it saw."""
        annotations = self.metadata.annotations
        return None if annotations is None else annotations.verify


# FederatedCluster -------------------------------------------------------------------------------
class CachedFederatedClusterSpec(Part, frozen=True):
    heartbeat_interval_seconds: int | None = None


class CachedFederatedCapacity(Part, frozen=True):
    gpus_allocatable: int = 0
    gpus_total: int = 0
    nodes: int = 0


class CachedFederatedClusterStatus(Part, frozen=True):
    phase: str | None = None
    last_heartbeat_time: str | None = None
    capacity: CachedFederatedCapacity | None = None


class CachedFederatedCluster(CachedObject, frozen=True):
    metadata: Meta
    spec: CachedFederatedClusterSpec = CachedFederatedClusterSpec()
    status: CachedFederatedClusterStatus = CachedFederatedClusterStatus()


# Pod --------------------------------------------------------------------------------------------
class PodLabels(Part, frozen=True):
    metalnode_uid: str | None = field(default=None, name=METALNODE_UID_LABEL)


class PodMeta(Identity, frozen=True):
    """Of the owners only MetalNodes are kept."""

    deletion_timestamp: str | None = None
    labels: PodLabels | None = None
    owner_references: tuple[OwnerReference, ...] = ()

    def __post_init__(self) -> None:
        owners = tuple(owner for owner in self.owner_references if owner.kind == "MetalNode")
        msgspec.structs.force_setattr(self, "owner_references", owners)


class EnvVar(Part, frozen=True):
    name: str = ""
    value: str | None = None


class Container(Part, frozen=True):
    """Of a verifier pod, its environment holds what it was asked; nobody can change that."""

    name: str = ""
    env: tuple[EnvVar, ...] = ()

    def __post_init__(self) -> None:
        question = tuple(variable for variable in self.env if variable.name == CHECK_VARIABLE)
        msgspec.structs.force_setattr(self, "env", question)


class PodSpec(Part, frozen=True):
    containers: tuple[Container, ...] = ()


class PodCondition(Part, frozen=True):
    """For example PodScheduled=False, reason Unschedulable, in the scheduler's own words."""

    type: str
    status: str = "Unknown"
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class ContainerWaiting(Part, frozen=True):
    reason: str | None = None
    message: str | None = None


class ContainerRunning(Part, frozen=True):
    started_at: str | None = None


class ContainerTerminated(Part, frozen=True):
    """`message` is the termination message: what the verifier reports, still to be validated."""

    exit_code: int = 0
    signal: int | None = None
    reason: str | None = None
    message: str | None = None
    started_at: str | None = None
    finished_at: str | None = None


class ContainerState(Part, frozen=True):
    waiting: ContainerWaiting | None = None
    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(Part, frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()


class PodStatus(Part, frozen=True):
    phase: str = ""
    reason: str | None = None
    message: str | None = None
    start_time: str | None = None
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class CachedPod(CachedObject, frozen=True):
    """A pod with a verifier's labels, which anybody may put on his: of one that no MetalNode owns
    nothing is kept that could be large. (One that a MetalNode owns and does not name is deleted.)
    """

    metadata: PodMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def __post_init__(self) -> None:
        if not self.metadata.owner_references:
            msgspec.structs.force_setattr(self, "spec", PodSpec())


# Decoders ---------------------------------------------------------------------------------------
Buffer = bytes | bytearray | memoryview | msgspec.Raw


def _decoder(kind: type[T]) -> Callable[[Buffer], T]:
    decode_json = msgspec.json.Decoder(kind).decode

    def decode(data: Buffer) -> T:
        try:
            return decode_json(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadObject(f"{kind.__name__}: {error}") from error

    return decode


decode_lease = _decoder(CachedLease)
"""JSON of one Lease → CachedLease. Like all decoders here it raises BadObject, nothing else."""
decode_metalnode = _decoder(CachedMetalNode)
decode_federatedcluster = _decoder(CachedFederatedCluster)
decode_pod = _decoder(CachedPod)
decode_meta = _decoder(CachedMeta)
