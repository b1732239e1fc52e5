"""What the verification reconciler looks up in the caches, and which changes concern it.

Three caches feed it: MetalNodes, the Leases that carry the agents' reports, and the verifier pods
(by label, so foreign pods may be among them). The indexes named here are the informers' part of
the contract: the composition root gives NODE_INDEXES and POD_INDEXES to the informers.
Neighbour: `verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llmkube.api.cached import CachedLease, CachedMetalNode, CachedPod
from llmkube.api.names import ConditionType
from llmkube.informers.guard import parse_version
from llmkube.informers.store import Change, Store
from llmkube.kube.resources import METALNODES
from llmkube.rules.checks import Bookkeeping

NODES_BY_LEASE = "verification-lease"
NODES_BY_UID = "verification-uid"
NODES_RUNNING = "verification-running"
PODS_BY_OWNER = "verification-owner"
PODS_BY_NODE_UID = "verification-node-uid"
_YES = "yes"


def report_text(lease: CachedLease | None) -> str | None:
    """The agent's report as the Lease carries it."""
    return None if lease is None else lease.report


def lease_key(node: CachedMetalNode) -> str:
    """The store key of the Lease that this Mac renews."""
    return f"{node.metadata.namespace}/{node.spec.lease_name}"


def owner_key(pod: CachedPod) -> str | None:
    """The key of the MetalNode that owns this pod, None if none does."""
    for owner in pod.metadata.owner_references:
        if owner.kind == METALNODES.kind and owner.api_version.startswith(METALNODES.group):
            return f"{pod.metadata.namespace}/{owner.name}"
    return None


def is_running(node: CachedMetalNode | None) -> bool:
    """Whether this MetalNode awaits the answer of a pod."""
    verification = node.status.verification if node is not None else None
    if verification is None or verification.pod_uid is None:
        return False
    return Bookkeeping.of(verification).running


def _owner(pod: CachedPod) -> Iterable[str]:
    key = owner_key(pod)
    return () if key is None else (key,)


def _node_uid(pod: CachedPod) -> Iterable[str]:
    labels = pod.metadata.labels
    return (labels.metalnode_uid,) if labels is not None and labels.metalnode_uid else ()


NODE_INDEXES: Mapping[str, Callable[[CachedMetalNode], Iterable[str]]] = {
    NODES_BY_LEASE: lambda node: (lease_key(node),),
    NODES_BY_UID: lambda node: (node.metadata.uid,),
    NODES_RUNNING: lambda node: (_YES,) if is_running(node) else (),
}
POD_INDEXES: Mapping[str, Callable[[CachedPod], Iterable[str]]] = {
    PODS_BY_OWNER: _owner,
    PODS_BY_NODE_UID: _node_uid,
}


class VerificationCaches:
    """The three stores, asked in the reconciler's own terms."""

    def __init__(
        self,
        nodes: Store[CachedMetalNode],
        leases: Store[CachedLease],
        pods: Store[CachedPod],
    ) -> None:
        self.nodes = nodes
        self.leases = leases
        self._pods = pods

    def nodes_of_lease(self, key: str) -> list[CachedMetalNode]:
        """The MetalNodes whose agent renews that Lease."""
        return self.nodes.by_index(NODES_BY_LEASE, key)

    def pods_of(self, node: CachedMetalNode) -> tuple[CachedPod, ...]:
        """Every pod with our label that is owned by this MetalNode or says so in its labels."""
        owned = self._pods.by_index(PODS_BY_OWNER, node.key)
        labelled = self._pods.by_index(PODS_BY_NODE_UID, node.metadata.uid)
        namespace = node.metadata.namespace
        found = {pod.metadata.uid: pod for pod in (*owned, *labelled)}
        return tuple(pod for pod in found.values() if pod.metadata.namespace == namespace)

    def pods_left_by(self, key: str) -> tuple[CachedPod, ...]:
        """The pods that a MetalNode of that key owns, whether it still exists or not."""
        return tuple(self._pods.by_index(PODS_BY_OWNER, key))

    def keys_of_pod(self, pod: CachedPod) -> set[str]:
        """The MetalNodes that a pod concerns: never any of another namespace."""
        keys = set(_owner(pod))
        for uid in _node_uid(pod):
            named = self.nodes.by_index(NODES_BY_UID, uid)
            keys.update(n.key for n in named if n.metadata.namespace == pod.metadata.namespace)
        return keys

    # For the slots ------------------------------------------------------------------------------
    def running(self) -> set[str]:
        """Keys of MetalNodes whose podUID names a pod that runs, or that still exists.

        A pod that is being deleted and whose result is known does not count: whoever may edit pods
        could put a finalizer on as many as there are slots, and nobody would be checked any more.
        """
        keys = {node.key for node in self.nodes.by_index(NODES_RUNNING, _YES)}
        for pod in self._pods.values():
            key = owner_key(pod) if pod.metadata.deletion_timestamp is None else None
            node = self.nodes.get(key) if key is not None else None
            verification = node.status.verification if node is not None else None
            if key and verification is not None and verification.pod_uid == pod.metadata.uid:
                keys.add(key)
        return keys

    def shows(self, key: str, version: str) -> bool:
        """Whether the cached MetalNode is as new as this resourceVersion, or gone."""
        node = self.nodes.get(key)
        if node is None:
            return True
        return parse_version(node.metadata.resource_version) >= parse_version(version)


# Which changes matter ---------------------------------------------------------------------------
def node_matters(change: Change[CachedMetalNode]) -> bool:
    """Whether a change of a MetalNode can change what we decide: heartbeats alone cannot."""
    if change.old is None or change.new is None:
        return True
    return _relevant(change.old) != _relevant(change.new)


def _relevant(node: CachedMetalNode) -> tuple[object, ...]:
    meta, status = node.metadata, node.status
    return (
        meta.uid,
        meta.generation,
        node.asked,
        meta.deletion_timestamp,
        node.spec,
        status.condition(ConditionType.AGENT_CONNECTED),
        status.condition(ConditionType.REACHABLE),
        status.observed_generation,
        status.host_ip,
        status.ingress_port,
        status.ingress_spki,
        status.candidates,
        status.verification,
    )


def lease_matters(change: Change[CachedLease]) -> bool:
    """Whether the report changed: a renewal alone is the heartbeat reconciler's business."""
    if change.old is None or change.new is None:
        return True
    return report_text(change.old) != report_text(change.new)
