"""A Mac's credential against the real API server: what it may do, and everything it may not.

Every call is made; nothing is asked of SelfSubjectAccessReview. The token is the one that
`llmkube metal token create` wrote, under the shipped admission policies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llmkube.api.names import REPORT_ANNOTATION, FieldManager
from llmkube.api.times import format_micro_time
from llmkube.cli.credentials import write
from llmkube.cli.metal_credentials import MetalTokenOptions, create_metal_token
from llmkube.cli.ownership import find
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import Forbidden, NotFound
from llmkube.kube.resources import (
    CLUSTERROLEBINDINGS,
    CLUSTERROLES,
    CONFIGMAPS,
    CRDS,
    EVENTS,
    FEDERATEDCLUSTERS,
    LEASES,
    METALNODES,
    NAMESPACES,
    NODES,
    PODS,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
    Resource,
)
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

SECRETS = Resource("", "v1", "secrets", "Secret")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
NAMESPACE = "mac-rights"
ACCOUNT, OTHER = "llmkube-metal-mac-a", "llmkube-metal-mac-b"

Attempt = Callable[[KubeClient], Awaitable[Any]]


@pytest.fixture(scope="module")
def credential_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("macs")


@pytest.fixture
async def mac(admin: KubeClient, credential_folder: Path) -> AsyncIterator[KubeClient]:
    """A client with the credential of `mac-a`; `mac-b` exists as well."""
    file = credential_folder / "mac-a"
    if not file.exists():
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        if await find(admin, NAMESPACES, NAMESPACE) is None:
            await admin.create(NAMESPACES, body)
        await create_metal_token(admin, MetalTokenOptions("mac-b", NAMESPACE))
        write(await create_metal_token(admin, MetalTokenOptions("mac-a", NAMESPACE)), file)
    async with KubeClient(await load_access(file), clock=SystemClock()) as client:
        yield client


def lease(name: str, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": LEASES.api_version,
        "kind": "Lease",
        "metadata": {"name": name, "namespace": NAMESPACE, **metadata},
        "spec": {"renewTime": format_micro_time(datetime.now(UTC))},
    }


# What it may -----------------------------------------------------------------------------------


async def test_it_may_read_its_metalnode(mac: KubeClient) -> None:
    assert (await mac.get(METALNODES, "mac-a", NAMESPACE))["metadata"]["name"] == "mac-a"


async def test_it_may_renew_its_lease_and_report(mac: KubeClient) -> None:
    found = await mac.get(LEASES, ACCOUNT, NAMESPACE)
    beat = {
        "metadata": {"annotations": {REPORT_ANNOTATION: "{}"}},
        "spec": {"renewTime": format_micro_time(datetime.now(UTC))},
    }
    found = await mac.merge_patch(LEASES, ACCOUNT, NAMESPACE, beat)
    await mac.update(LEASES, {**found, "spec": {**found["spec"], "leaseDurationSeconds": 120}})
    await mac.apply(LEASES, lease(ACCOUNT), field_manager=FieldManager.AGENT)


async def test_it_may_issue_its_own_next_token(mac: KubeClient) -> None:
    for ttl in (timedelta(hours=1), timedelta(days=30)):
        token = await mac.request_token(ACCOUNT, NAMESPACE, ttl=ttl)
        assert abs(token.expires_at - datetime.now(UTC) - ttl) < timedelta(minutes=2)


# What it may not -------------------------------------------------------------------------------


def getting(resource: Resource, name: str) -> Attempt:
    return lambda c: c.get(resource, name, NAMESPACE)


def listing(resource: Resource, namespace: str | None = NAMESPACE) -> Attempt:
    return lambda c: c.list(resource, namespace)


def watching(resource: Resource, name: str) -> Attempt:
    async def attempt(client: KubeClient) -> None:
        selector = f"metadata.name={name}"
        async with client.watch(resource, NAMESPACE, field_selector=selector) as stream:
            await stream.read()

    return attempt


def patching(
    resource: Resource, name: str, body: dict[str, Any], subresource: str | None = None
) -> Attempt:
    return lambda c: c.merge_patch(resource, name, NAMESPACE, body, subresource=subresource)


def creating(resource: Resource, **body: Any) -> Attempt:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return lambda c: c.create(resource, {**head, "metadata": {"name": "new"}, **body}, NAMESPACE)


def deleting(resource: Resource, name: str) -> Attempt:
    return lambda c: c.delete(resource, name, NAMESPACE)


def minting(account: str, *, audiences: tuple[str, ...] = (), **life: float) -> Attempt:
    ttl = timedelta(**life) if life else timedelta(hours=1)
    return lambda c: c.request_token(account, NAMESPACE, ttl=ttl, audiences=audiences)


RENEW = {"spec": {"renewTime": "2026-11-30T19:29:00.000000Z"}}
CONDITIONS = {"status": {"hostIP": "10.0.0.1"}}
POD = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
LISTED = (
    METALNODES,
    LEASES,
    SERVICEACCOUNTS,
    SECRETS,
    CONFIGMAPS,
    PODS,
    EVENTS,
    ROLES,
    ROLEBINDINGS,
    DEPLOYMENTS,
)
CLUSTER_WIDE = (NODES, NAMESPACES, FEDERATEDCLUSTERS, CLUSTERROLES, CLUSTERROLEBINDINGS, CRDS)

REFUSED: dict[str, Attempt] = {
    "read another MetalNode": getting(METALNODES, "mac-b"),
    "read another Lease": getting(LEASES, OTHER),
    "renew another Lease": patching(LEASES, OTHER, RENEW),
    "replace another Lease": lambda c: c.update(LEASES, lease(OTHER)),
    "apply another Lease": lambda c: c.apply(LEASES, lease(OTHER), field_manager="llmkube-agent"),
    "apply a Lease that does not exist": lambda c: c.apply(
        LEASES, lease("free"), field_manager="llmkube-agent"
    ),
    "create a Lease": creating(LEASES),
    "delete its Lease": deleting(LEASES, ACCOUNT),
    "watch its Lease": watching(LEASES, ACCOUNT),
    "watch its MetalNode": watching(METALNODES, "mac-a"),
    "change its spec": patching(METALNODES, "mac-a", {"spec": {"hostIP": "10.0.0.1"}}),
    "annotate its MetalNode": patching(METALNODES, "mac-a", {"metadata": {"annotations": {}}}),
    "write its status": patching(METALNODES, "mac-a", CONDITIONS, "status"),
    "read its status subresource": lambda c: c.merge_patch(
        METALNODES, "mac-a", NAMESPACE, {}, subresource="status"
    ),
    "apply its status": lambda c: c.apply(
        METALNODES,
        {
            "apiVersion": METALNODES.api_version,
            "kind": "MetalNode",
            "metadata": {"name": "mac-a", "namespace": NAMESPACE},
            **CONDITIONS,
        },
        field_manager="llmkube-heartbeat",
        subresource="status",
    ),
    "delete its MetalNode": deleting(METALNODES, "mac-a"),
    "create a MetalNode": creating(
        METALNODES, spec={"leaseName": "x", "serviceAccountName": "default"}
    ),
    "read its account": getting(SERVICEACCOUNTS, ACCOUNT),
    "change its account": patching(SERVICEACCOUNTS, ACCOUNT, {"metadata": {"labels": {"a": "b"}}}),
    "delete its account": deleting(SERVICEACCOUNTS, ACCOUNT),
    "read its Role": getting(ROLES, ACCOUNT),
    "widen its Role": patching(ROLES, ACCOUNT, {"rules": []}),
    "bind another Role": creating(
        ROLEBINDINGS,
        roleRef={"apiGroup": ROLES.group, "kind": "ClusterRole", "name": "admin"},
        subjects=[{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    ),
    "read a Secret": getting(SECRETS, "anything"),
    "create a Secret": creating(SECRETS),
    "create a Pod": creating(PODS, **POD),
    "record an Event": creating(EVENTS),
    "read the published CA": getting(CONFIGMAPS, "kube-root-ca.crt"),
    "mint another Mac's token": minting(OTHER),
    "mint the default account's token": minting("default"),
    "mint the controller's token": lambda c: c.request_token(
        "llmkube-controller", "llmkube-system", ttl=timedelta(hours=1)
    ),
    "mint a token for 100 years": minting(ACCOUNT, days=36_500),
    "mint a token for 31 days": minting(ACCOUNT, days=31),
    "mint a token for another audience": minting(ACCOUNT, audiences=("vault",)),
    "mint a token for two audiences": minting(
        ACCOUNT, audiences=("https://kubernetes.default.svc", "vault")
    ),
    **{f"list {r.plural}": listing(r) for r in LISTED},
    **{f"list all {r.plural}": listing(r, None) for r in (*LISTED, *CLUSTER_WIDE)},
}
BY_POLICY = {what for what in REFUSED if what.startswith("mint a token")}


@pytest.mark.parametrize("what", REFUSED)
async def test_it_may_not(what: str, mac: KubeClient) -> None:
    async def refused() -> bool:
        try:
            await REFUSED[what](mac)
        except Forbidden:
            return True
        return False

    if what in BY_POLICY:  # a new admission policy takes a moment to bind
        await eventually(refused, what)
    else:
        assert await refused()


async def test_nothing_of_it_was_changed_by_trying(mac: KubeClient, admin: KubeClient) -> None:
    node = await admin.get(METALNODES, "mac-a", NAMESPACE)
    assert "status" not in node
    assert "hostIP" not in node["spec"]
    with pytest.raises(NotFound):
        await admin.get(LEASES, "free", NAMESPACE)
