"""Waiting until the shipped admission policies let the controller create its pods.

A new ValidatingAdmissionPolicy takes seconds to bind, and until its parameters are there it
refuses everything.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmkube.api.cached import CachedMetalNode, CachedMetalNodeSpec, Meta
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.api.spki import SpkiPin
from llmkube.controller.options import DEFAULT_VERIFIER_IMAGE
from llmkube.kube.errors import Forbidden, NotFound
from llmkube.kube.resources import PODS
from llmkube.rules.checks import CheckInputs, CheckSettings
from llmkube.rules.verifier_pod import PodSettings, pod_name, render_pod
from llmkube.verifier.policy import AddressPolicy
from tests.conftest import open_client
from tests.support.reports import make_certificate
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane


async def wait_until_pods_are_allowed(cluster: ControlPlane) -> Path:
    """A kubeconfig of the controller's account, once that may create verifier pods."""
    path = await cluster.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    node = CachedMetalNode(
        metadata=Meta(name="probe", namespace="default", uid="probe"),
        spec=CachedMetalNodeSpec(lease_name="probe", service_account_name="probe"),
    )
    inputs = CheckInputs(SpkiPin(bytes(32)), make_certificate(), 9443, ("127.0.0.1",))
    pod = render_pod(
        node,
        inputs,
        name=pod_name("probe", secrets.token_hex(4)),
        policy=AddressPolicy(),
        checks=CheckSettings(),
        settings=PodSettings(DEFAULT_VERIFIER_IMAGE),
    )
    async with AsyncExitStack() as stack:
        client = await open_client(stack, path)

        async def allowed() -> bool:
            try:
                made = await client.create(PODS, pod)
            except Forbidden:
                return False
            meta = made["metadata"]
            with suppress(NotFound):  # its owner does not exist: garbage collection may be faster
                await client.delete(PODS, meta["name"], meta["namespace"], grace_seconds=0)
            return True

        await eventually(allowed, "the controller may create verifier pods")
    return path
