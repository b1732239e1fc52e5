"""FederatedCluster: an edge cluster as the datacenter sees it.

The status has two writers: the *edge* (field manager `llmkube-edge`) owns everything but `phase`,
the *hub* (`llmkube-hub`, the datacenter's controller) owns `phase` alone. The API server enforces
the boundary (config/admission). Neighbour: `rules.phase`, which decides the phase.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from llmkube.api.meta import (
    API_VERSION_TEXT,
    KIND_TEXT,
    ApiModel,
    Int32,
    ObjectMeta,
    Time,
)


class FederatedClusterSpec(ApiModel):
    data_residency_tier: str | None = Field(
        None,
        description="DataResidencyTier is recorded now and enforced later by the federation router"
        ' (#1237). It is a free-form tier label (for example "eu", "floor-3").',
    )
    display_name: str | None = Field(None, description="DisplayName is a human label for the site.")
    heartbeat_interval_seconds: Int32 | None = Field(
        None,
        ge=5,
        description="HeartbeatIntervalSeconds is how often the edge is expected to push status. The"
        " datacenter derives staleness thresholds from it (3x Stale, 10x Unreachable).",
    )


class FederatedCapacity(ApiModel):
    gpus_allocatable: Int32
    gpus_total: Int32
    nodes: Int32


class FederatedInference(ApiModel):
    models: Int32
    services_failed: Int32
    services_ready: Int32
    services_total: Int32


class FederatedClusterStatus(ApiModel):
    # owner: edge
    capacity: FederatedCapacity | None = Field(
        None, description="Capacity is edge-owned node/GPU capacity."
    )
    # owner: edge
    inference: FederatedInference | None = Field(
        None, description="Inference is edge-owned inference health."
    )
    # owner: edge
    last_heartbeat_time: Time | None = Field(
        None,
        description="LastHeartbeatTime is edge-owned: set to now on every successful push.",
    )
    # owner: edge
    observed_version: str | None = Field(
        None,
        description="ObservedVersion is edge-owned: the LLMKube/operator version on the site.",
    )
    # owner: hub
    phase: str | None = Field(
        None, description="Phase is datacenter-owned: Connected, Stale, or Unreachable."
    )


class FederatedCluster(ApiModel):
    """FederatedCluster is an edge cluster that reports to this datacenter cluster. The edge pushes
    its status outbound; the datacenter derives the phase from the pushes' regularity."""

    api_version: Literal["federation.llmkube.dev/v1alpha1"] = Field(
        "federation.llmkube.dev/v1alpha1", description=API_VERSION_TEXT
    )
    kind: Literal["FederatedCluster"] = Field("FederatedCluster", description=KIND_TEXT)
    metadata: ObjectMeta
    spec: FederatedClusterSpec | None = Field(
        None,
        description="FederatedClusterSpec is admin-owned. displayName and dataResidencyTier are set"
        " at registration; the edge and the datacenter controller only write status.",
    )
    status: FederatedClusterStatus | None = Field(
        None,
        description="FederatedClusterStatus has two writers. The edge writes everything except"
        " Phase, over an RBAC-scoped status-subresource client. The datacenter controller writes"
        " ONLY Phase, from LastHeartbeatTime staleness.",
    )
