"""The verifier pod: one check as a Kubernetes object.

It passes the restricted pod security level, carries no token and no volume, and is confined to one
container with the verifier's image and command and literal environment: the admission policy in
config/admission allows this controller nothing else. It is owned by its MetalNode, so that it goes
with it, and it runs where `spec.verifier` says, so that it tests the path that relays will use.

Neighbours: `checks.CheckInputs` is what it asks, `verifier_answer` reads what became of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmkube.api import names
from llmkube.api.cached import CachedMetalNode
from llmkube.rules.checks import CheckInputs, CheckSettings
from llmkube.rules.verifier_answer import CONTAINER
from llmkube.verifier.policy import AddressPolicy
from llmkube.verifier.protocol import CHECK_VARIABLE, CheckRequest, encode_request

_NAME_LIMIT = 40
"""Of the MetalNode's name in the pod's: together with the rest it still makes a host name."""

MESH_OFF_LABELS: Mapping[str, str] = {
    "sidecar.istio.io/inject": "false",
    "istio.io/dataplane-mode": "none",
}
MESH_OFF_ANNOTATIONS: Mapping[str, str] = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "kuma.io/sidecar-injection": "disabled",
    "consul.hashicorp.com/connect-inject": "false",
}
"""A sidecar would be a second container, and would answer TCP in the Mac's place."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """`--verifier-image`, `--verifier-image-pull-secret`, and what the pod may use.

    Memory is request and limit at once. A starved handshake looks like a timeout, hence the
    generous CPU limit.
    """

    image: str
    pull_secret: str | None = None
    memory: str = "64Mi"
    cpu_request: str = "50m"
    cpu_limit: str = "1"


def pod_name(node_name: str, suffix: str) -> str:
    """A name that no other pod has. `suffix` is random: a name that others can foresee, they can
    take."""
    stem = node_name[:_NAME_LIMIT].replace(".", "-").rstrip("-")
    return f"llmkube-verify-{stem}-{suffix}"


def check_request(
    inputs: CheckInputs, policy: AddressPolicy, settings: CheckSettings
) -> CheckRequest:
    """The question that the pod carries."""
    return CheckRequest(
        input_hash=inputs.hash(),
        spki=inputs.pin.digest,
        certificate=inputs.certificate,
        port=inputs.port,
        addresses=inputs.addresses,
        allow=policy.allow,
        deny=policy.deny,
        connect_timeout=settings.connect_timeout,
        handshake_timeout=settings.handshake_timeout,
    )


def render_pod(
    node: CachedMetalNode,
    inputs: CheckInputs,
    *,
    name: str,
    policy: AddressPolicy,
    checks: CheckSettings,
    settings: PodSettings,
) -> dict[str, Any]:
    """The pod that checks these inputs for this MetalNode, ready to be created."""
    request = check_request(inputs, policy, checks)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(node, name, request),
        "spec": _spec(node, request, checks, settings),
    }


def _metadata(node: CachedMetalNode, name: str, request: CheckRequest) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": node.metadata.namespace,
        "labels": {
            names.MANAGED_BY_LABEL: names.MANAGED_BY,
            names.COMPONENT_LABEL: names.VERIFIER_COMPONENT,
            names.METALNODE_UID_LABEL: node.metadata.uid,
            **MESH_OFF_LABELS,
        },
        "annotations": {
            names.INPUT_HASH_ANNOTATION: request.input_hash,
            names.ADDRESSES_ANNOTATION: json.dumps(request.addresses),
            **MESH_OFF_ANNOTATIONS,
        },
        "ownerReferences": [
            {
                "apiVersion": "inference.llmkube.dev/v1alpha1",
                "kind": "MetalNode",
                "name": node.metadata.name,
                "uid": node.metadata.uid,
                # Without blockOwnerDeletion, which needs a further right on some clusters.
                "controller": True,
            }
        ],
    }


def _spec(
    node: CachedMetalNode, request: CheckRequest, checks: CheckSettings, settings: PodSettings
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max(1, math.ceil(checks.timeout.total_seconds())),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, settings)],
    }
    if settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
    placement = node.spec.verifier
    if placement is not None and placement.node_selector:
        spec["nodeSelector"] = dict(placement.node_selector)
    if placement is not None and placement.tolerations:
        spec["tolerations"] = [msgspec.to_builtins(item) for item in placement.tolerations]
    return spec


def _container(request: CheckRequest, settings: PodSettings) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": settings.image,
        "command": list(names.VERIFIER_COMMAND),
        "env": [{"name": CHECK_VARIABLE, "value": encode_request(request)}],
        "terminationMessagePolicy": "File",
        "resources": {
            "requests": {"cpu": settings.cpu_request, "memory": settings.memory},
            "limits": {"cpu": settings.cpu_limit, "memory": settings.memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
