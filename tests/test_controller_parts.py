"""What the controller's informers ask of the API server, as `controller.parts` builds them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.clock import SystemClock
from llmkube.controller.options import ControllerName, Options
from llmkube.controller.parts import Parts
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import LEASES, SERVICEACCOUNTS
from llmkube.metrics import Metrics
from tests.support.background import background
from tests.support.faultproxy import FaultProxy
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

NODE_LEASES = "kube-node-lease"


@pytest.fixture
async def proxy(shipped: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(shipped) as proxy:
        yield proxy


@asynccontextmanager
async def informing(proxy: FaultProxy, cluster: ControlPlane, *namespaces: str) -> Any:
    """The informers of the heartbeat controller, under its own account, synced."""
    path = await cluster.service_account_kubeconfig(
        SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT, server=proxy.server, ca_pem=proxy.ca_pem
    )
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        client = KubeClient(await load_access(path), clock=clock)
        await stack.enter_async_context(client)
        options = Options(controllers=frozenset({ControllerName.HEARTBEAT}), namespaces=namespaces)
        recorder = EventRecorder(client, clock, "llmkube-controller", "test")
        parts = Parts(options, client, recorder, Metrics(), clock)
        await stack.enter_async_context(background(*(i.run() for i in parts.informers.values())))
        for informer in parts.informers.values():
            await informer.wait_synced()
        yield parts


def manifest(resource: Any, name: str) -> dict[str, Any]:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, "metadata": {"name": name}}


async def test_leases_everywhere_but_those_of_nodes(
    shipped: ControlPlane,
    proxy: FaultProxy,
    admin: KubeClient,
    namespace: str,
    unique: Callable[[str], str],
) -> None:
    listed, watched = unique("mac"), unique("mac")
    node = unique("node")
    await admin.create(LEASES, manifest(LEASES, listed), namespace)
    await admin.create(LEASES, manifest(LEASES, node), NODE_LEASES)
    async with informing(proxy, shipped) as parts:
        leases = parts.informers["leases"].store
        assert f"{namespace}/{listed}" in leases
        await admin.merge_patch(LEASES, node, NODE_LEASES, {"spec": {"holderIdentity": "kubelet"}})
        await admin.create(LEASES, manifest(LEASES, watched), namespace)
        await eventually(lambda: f"{namespace}/{watched}" in leases, "the later one is seen")
        assert [key for key in leases.keys() if key.startswith(f"{NODE_LEASES}/")] == []  # noqa: SIM118
        asked = [request.target for request in proxy.requests if "/leases?" in request.target]
        assert len(asked) >= 2
        assert all("fieldSelector=metadata.namespace%21%3Dkube-node-lease" in a for a in asked)
    await admin.delete(LEASES, node, NODE_LEASES)


async def test_only_the_namespaces_that_were_asked_for(
    shipped: ControlPlane, proxy: FaultProxy, admin: KubeClient, namespace: str
) -> None:
    await admin.create(LEASES, manifest(LEASES, "mac"), namespace)
    async with informing(proxy, shipped, namespace, SYSTEM_NAMESPACE) as parts:
        assert f"{namespace}/mac" in parts.informers["leases"].store
    for resource in ("leases", "serviceaccounts", "metalnodes"):
        asked = [r.target for r in proxy.requests if f"/{resource}?" in r.target]
        scopes = {target.split("/namespaces/")[1].split("/")[0] for target in asked}
        assert scopes == {namespace, SYSTEM_NAMESPACE}


async def test_of_accounts_only_the_metadata_travels(
    shipped: ControlPlane, proxy: FaultProxy, admin: KubeClient, namespace: str
) -> None:
    await admin.create(SERVICEACCOUNTS, manifest(SERVICEACCOUNTS, "mac"), namespace)
    async with informing(proxy, shipped) as parts:
        assert f"{namespace}/mac" in parts.informers["serviceaccounts"].store
        await admin.create(SERVICEACCOUNTS, manifest(SERVICEACCOUNTS, "later"), namespace)
        accounts = parts.informers["serviceaccounts"].store
        await eventually(lambda: f"{namespace}/later" in accounts, "the later one is seen")
    asked = [request for request in proxy.requests if "/serviceaccounts?" in request.target]
    lists = [request.accept for request in asked if "watch=" not in request.target]
    watches = [request.accept for request in asked if "watch=" in request.target]
    assert lists
    assert all("as=PartialObjectMetadataList" in accept for accept in lists)
    assert watches
    assert all("as=PartialObjectMetadata;" in f"{accept};" for accept in watches)
