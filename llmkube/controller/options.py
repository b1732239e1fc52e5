"""What an admin sets about the controller: the flags, as one frozen value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import llmkube
from llmkube.api.names import LEADER_LEASE, SYSTEM_NAMESPACE
from llmkube.controller.tuning import Tuning
from llmkube.health import BindAddress

Network = IPv4Network | IPv6Network

DEFAULT_VERIFIER_IMAGE = f"ghcr.io/llmkube/llmkube-verifier:v{llmkube.__version__}"


class ControllerName(StrEnum):
    """The reconcilers that can be run, alone or together."""

    HEARTBEAT = "heartbeat"
    VERIFICATION = "verification"
    FEDERATEDCLUSTER = "federatedcluster"


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `llmkube controller`; see its help for each."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespaces: Sequence[str] = ()
    controllers: frozenset[ControllerName] = frozenset(ControllerName)
    leader_elect: bool = False
    leader_elect_namespace: str = SYSTEM_NAMESPACE
    leader_elect_name: str = LEADER_LEASE
    metrics_bind_address: BindAddress | None = None
    health_probe_bind_address: BindAddress | None = None
    verifier_image: str = DEFAULT_VERIFIER_IMAGE
    verifier_image_pull_secret: str | None = None
    allow_cidrs: Sequence[Network] = ()
    deny_cidrs: Sequence[Network] = ()
    tuning: Tuning = field(default_factory=Tuning)
