"""Names that more than one program must spell alike.

Label, annotation, field-manager, condition and reason names are part of the public contract:
dashboards, NetworkPolicies and scripts are written against them.
"""

from __future__ import annotations

from enum import StrEnum

# Annotations -----------------------------------------------------------------------------------
REPORT_ANNOTATION = "inference.llmkube.dev/report"
"""On the Lease, written by the agent: its report, one JSON document."""
MAX_REPORT_BYTES = 16 * 1024
"""A longer report is no report (the API server takes annotations of 256 KiB)."""
VERIFY_ANNOTATION = "inference.llmkube.dev/verify-requested"
"""On the MetalNode, written by `llmkube metal verify`: the lastStartTime it saw ("" if none)."""
INPUT_HASH_ANNOTATION = "inference.llmkube.dev/input-hash"
"""On a verifier pod: the hash of what it checks."""
ADDRESSES_ANNOTATION = "inference.llmkube.dev/addresses"
"""On a verifier pod: the addresses it was asked to dial, a JSON list."""

# Labels ----------------------------------------------------------------------------------------
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "llmkube"
COMPONENT_LABEL = "app.kubernetes.io/component"
VERIFIER_COMPONENT = "verifier"
"""Verifier pods carry COMPONENT_LABEL=VERIFIER_COMPONENT and MANAGED_BY_LABEL=MANAGED_BY."""
METALNODE_UID_LABEL = "inference.llmkube.dev/metalnode-uid"
"""On a verifier pod: its MetalNode's UID (a name can be longer than a label value)."""
VERIFIER_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY},{COMPONENT_LABEL}={VERIFIER_COMPONENT}"

# Where things live -----------------------------------------------------------------------------
SYSTEM_NAMESPACE = "llmkube-system"
CONTROLLER_ACCOUNT = "llmkube-controller"
LEADER_LEASE = "llmkube-controller"
METAL_ACCOUNT_PREFIX = "llmkube-metal-"
"""ServiceAccount and Lease of MetalNode NAME are named llmkube-metal-NAME; the admission policy
that caps self-issued tokens knows accounts made by llmkube by these prefixes."""
EDGE_ACCOUNT_PREFIX = "llmkube-edge-"

VERIFIER_COMMAND = ("python", "-m", "llmkube.verifier")


class FieldManager(StrEnum):
    """One manager per owner of status fields; each apply carries its owner's complete set."""

    HEARTBEAT = "llmkube-heartbeat"
    VERIFICATION = "llmkube-verification"
    HUB = "llmkube-hub"
    EDGE = "llmkube-edge"
    AGENT = "llmkube-agent"
    CLI = "llmkube-cli"


class ConditionType(StrEnum):
    AGENT_CONNECTED = "AgentConnected"
    REACHABLE = "Reachable"


class ConnectedReason(StrEnum):
    """Reasons of AgentConnected."""

    HEARTBEAT_RECEIVED = "HeartbeatReceived"
    LEASE_NOT_FOUND = "LeaseNotFound"
    NEVER_CONNECTED = "NeverConnected"
    HEARTBEAT_EXPIRED = "HeartbeatExpired"
    SERVICE_ACCOUNT_NOT_FOUND = "ServiceAccountNotFound"


class ReachableReason(StrEnum):
    """Reasons of Reachable."""

    VERIFIED = "Verified"
    INVALID_SPEC = "InvalidSpec"
    NO_REPORT = "NoReport"
    INVALID_REPORT = "InvalidReport"
    NO_CANDIDATES = "NoCandidates"
    NO_ALLOWED_ADDRESS = "NoAllowedAddress"
    VERIFICATION_FAILED = "VerificationFailed"
    CERTIFICATE_MISMATCH = "CertificateMismatch"
    VERIFICATION_PENDING = "VerificationPending"
    AGENT_DISCONNECTED = "AgentDisconnected"
    VERIFIER_FAILED = "VerifierFailed"


class Phase(StrEnum):
    """FederatedCluster phases, best first."""

    CONNECTED = "Connected"
    STALE = "Stale"
    UNREACHABLE = "Unreachable"
