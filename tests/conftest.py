"""Fixtures: one real control plane for the whole test session, fresh names for each test.

Nothing here imitates Kubernetes. `control_plane` is etcd, kube-apiserver and
kube-controller-manager; `shipped` adds exactly what a user installs from config/; `client_for`
gives a client under a ServiceAccount's own rights; `kubelet` runs pods as local processes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from devcluster.controlplane import ControlPlane

if TYPE_CHECKING:
    from devcluster.kubelet import Kubelet
    from llmkube.kube.client import KubeClient

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "config"

# How long an example takes says something about the machine, not about the code.
settings.register_profile("llmkube", deadline=None)
settings.load_profile("llmkube")

_numbers = itertools.count(1)
ClientFor = Callable[[str, str], Awaitable["KubeClient"]]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """The control plane of this test session, with nothing of LLMKube installed."""
    with asyncio.Runner() as runner:
        starting = ControlPlane.start()
        cluster = runner.run(starting.__aenter__())
        try:
            yield cluster
        finally:
            runner.run(starting.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with our CRDs established."""
    asyncio.run(install_crds(control_plane))
    return control_plane


@pytest.fixture(scope="session")
def shipped(crds: ControlPlane) -> ControlPlane:
    """The control plane with our CRDs, the shipped RBAC and the shipped admission policies."""
    asyncio.run(install_rights(crds))
    return crds


async def install_crds(cluster: ControlPlane) -> None:
    """Apply config/crd and wait until both kinds are served."""
    await cluster.kubectl("apply", "--server-side", "-k", str(CONFIG / "crd"))
    await cluster.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "-f", str(CONFIG / "crd" / "bases")
    )


async def install_rights(cluster: ControlPlane) -> None:
    """Apply config/rbac and config/admission, as `kubectl apply -k config/default` would."""
    for part in ("namespace", "rbac", "admission"):
        await cluster.kubectl("apply", "--server-side", "-k", str(CONFIG / part))


@pytest.fixture
def unique() -> Callable[[str], str]:
    """A factory of names that no other test uses."""
    return unique_name


def unique_name(prefix: str = "test") -> str:
    return f"{prefix}-{next(_numbers)}-{os.urandom(2).hex()}"


@pytest.fixture
async def namespace(control_plane: ControlPlane) -> AsyncIterator[str]:
    """A namespace of this test's own, deleted afterwards."""
    name = unique_name("ns")
    await control_plane.kubectl("create", "namespace", name)
    await control_plane.kubectl(
        "wait", "--for=create", f"--namespace={name}", "serviceaccount/default", "--timeout=30s"
    )
    yield name
    await control_plane.kubectl("delete", "namespace", name, "--wait=false", check=False)


@pytest.fixture
async def admin(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """A client as cluster-admin."""
    async with AsyncExitStack() as stack:
        yield await open_client(stack, control_plane.admin_kubeconfig)


@pytest.fixture
async def client_for(control_plane: ControlPlane) -> AsyncIterator[ClientFor]:
    """A factory of clients under a ServiceAccount's own rights: `await client_for(ns, account)`."""
    async with AsyncExitStack() as stack:

        async def make(namespace: str, account: str) -> KubeClient:
            path = await control_plane.service_account_kubeconfig(namespace, account)
            return await open_client(stack, path)

        yield make


async def open_client(stack: AsyncExitStack, kubeconfig: Path) -> KubeClient:
    """A client for that kubeconfig, closed with the stack."""
    from llmkube.clock import SystemClock
    from llmkube.kube.client import KubeClient
    from llmkube.kube.config import load_access

    access = await load_access(kubeconfig)
    return await stack.enter_async_context(KubeClient(access, clock=SystemClock()))


@pytest.fixture
async def kubelet(control_plane: ControlPlane) -> AsyncIterator[Kubelet]:
    """The kubelet stand-in, running until the test ends."""
    from devcluster.kubelet import Kubelet

    async with Kubelet.start(control_plane.admin_kubeconfig) as running:
        yield running
