"""FederatedCluster.status.phase changes by those who may set it, and by nobody else (SPEC 4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE, FieldManager
from llmkube.cli.fleet_registration import push_rules
from llmkube.kube.errors import Forbidden
from llmkube.kube.resources import FEDERATEDCLUSTERS
from tests.support.accounts import create_account, grant_everywhere
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

ClientFor = Callable[[str, str], Awaitable["KubeClient"]]
Write = Callable[["KubeClient", str], Awaitable[Any]]
POLICY = "llmkube-federatedcluster-phase"
PUSH = {"lastHeartbeatTime": "2026-11-30T19:29:00.000001Z", "observedVersion": "v0.1.0"}


def site(name: str, **parts: Any) -> dict[str, Any]:
    head = {"apiVersion": FEDERATEDCLUSTERS.api_version, "kind": "FederatedCluster"}
    return {**head, "metadata": {"name": name}, **parts}


def applied(manager: str, status: dict[str, Any]) -> Write:
    return lambda client, name: client.apply(
        FEDERATEDCLUSTERS,
        site(name, status=status),
        field_manager=manager,
        subresource="status",
    )


def merged(status: dict[str, Any] | None) -> Write:
    return lambda client, name: client.merge_patch(
        FEDERATEDCLUSTERS, name, None, {"status": status}, subresource="status"
    )


def patched(*operations: dict[str, Any]) -> Write:
    return lambda client, name: client.json_patch(
        FEDERATEDCLUSTERS, name, None, list(operations), subresource="status"
    )


async def updated(client: KubeClient, name: str) -> Any:
    body = await client.get(FEDERATEDCLUSTERS, name)
    body.setdefault("status", {})["phase"] = "Connected"
    return await client.update(FEDERATEDCLUSTERS, body, subresource="status")


@pytest.fixture
async def edge(
    admin: KubeClient, client_for: ClientFor, shipped: ControlPlane, namespace: str
) -> tuple[KubeClient, str]:
    """An edge's own client, with the rights that `fleet register` gives, and its site's name.

    The policy is in force: a fresh one takes some seconds.
    """
    name = f"site-{namespace}"
    await admin.create(FEDERATEDCLUSTERS, site(name))
    await create_account(admin, namespace, name)
    await grant_everywhere(admin, namespace, name, push_rules(name))
    client = await client_for(namespace, name)

    async def refused() -> bool:
        try:
            await merged({"phase": "Stale"})(client, name)
        except Forbidden as error:
            return POLICY in error.message
        await merged({"phase": None})(admin, name)
        return False

    await eventually(refused, "the policy on phase is in force")
    return client, name


EDGE_WRITES = [
    pytest.param(merged(PUSH | {"phase": "Connected"}), id="merge patch, with its push"),
    pytest.param(merged({"phase": "Connected"}), id="merge patch of phase alone"),
    pytest.param(merged({"phase": ""}), id="merge patch to nothing"),
    pytest.param(
        applied(FieldManager.EDGE, PUSH | {"phase": "Connected"}), id="apply, with its push"
    ),
    pytest.param(
        applied(FieldManager.HUB, {"phase": "Connected"}), id="apply as the hub's manager"
    ),
    pytest.param(
        patched({"op": "add", "path": "/status", "value": {"phase": "Connected"}}),
        id="JSON patch of the whole status",
    ),
    pytest.param(updated, id="update, which its role lacks"),
]


@pytest.mark.parametrize("write", EDGE_WRITES)
async def test_an_edge_cannot_set_the_phase(edge: tuple[KubeClient, str], write: Write) -> None:
    client, name = edge
    with pytest.raises(Forbidden):
        await write(client, name)


HUB_PHASE = applied(FieldManager.HUB, {"phase": "Stale"})


@pytest.mark.parametrize(
    "write",
    [
        *EDGE_WRITES,
        pytest.param(merged({"phase": None}), id="merge patch: remove it"),
        pytest.param(merged(None), id="merge patch: remove the status"),
        pytest.param(patched({"op": "remove", "path": "/status/phase"}), id="JSON patch: remove"),
        pytest.param(
            patched({"op": "replace", "path": "/status/phase", "value": "Connected"}),
            id="JSON patch: replace",
        ),
        pytest.param(
            patched({"op": "move", "from": "/status/phase", "path": "/status/observedVersion"}),
            id="JSON patch: move it away",
        ),
    ],
)
async def test_an_edge_cannot_change_the_phase(
    admin: KubeClient, edge: tuple[KubeClient, str], write: Write
) -> None:
    client, name = edge
    await HUB_PHASE(admin, name)
    with pytest.raises(Forbidden):
        await write(client, name)
    assert (await admin.get(FEDERATEDCLUSTERS, name))["status"]["phase"] == "Stale"


async def test_an_apply_cannot_take_the_phase_over_and_drop_it(
    admin: KubeClient, edge: tuple[KubeClient, str]
) -> None:
    """Removal by apply: claim the unchanged value first, then leave it out."""
    client, name = edge
    await HUB_PHASE(admin, name)
    await applied(FieldManager.EDGE, PUSH | {"phase": "Stale"})(client, name)  # changes nothing
    await applied(FieldManager.EDGE, PUSH)(client, name)  # the hub still owns it
    assert (await admin.get(FEDERATEDCLUSTERS, name))["status"]["phase"] == "Stale"
    await applied(FieldManager.EDGE, PUSH | {"phase": "Stale"})(client, name)
    await applied(FieldManager.HUB, {})(admin, name)  # now the edge is the only owner
    with pytest.raises(Forbidden, match=POLICY):
        await applied(FieldManager.EDGE, PUSH)(client, name)


async def test_the_edges_own_push_passes(admin: KubeClient, edge: tuple[KubeClient, str]) -> None:
    client, name = edge
    await applied(FieldManager.EDGE, PUSH)(client, name)
    await HUB_PHASE(admin, name)
    later = PUSH | {"lastHeartbeatTime": "2026-11-30T19:29:30.000001Z"}
    written = await applied(FieldManager.EDGE, later)(client, name)
    assert written["status"] == later | {"phase": "Stale"}


async def test_an_edge_cannot_write_another_site(
    admin: KubeClient, edge: tuple[KubeClient, str], unique: Callable[[str], str]
) -> None:
    client, _ = edge
    other = unique("site")
    await admin.create(FEDERATEDCLUSTERS, site(other))
    for write in (applied(FieldManager.EDGE, PUSH), merged(PUSH)):
        with pytest.raises(Forbidden):
            await write(client, other)
    with pytest.raises(Forbidden):
        await client.merge_patch(FEDERATEDCLUSTERS, edge[1], None, {"spec": {"displayName": "x"}})


async def test_the_controller_and_a_cluster_admin_may_set_it(
    admin: KubeClient, client_for: ClientFor, edge: tuple[KubeClient, str]
) -> None:
    _, name = edge
    hub = await client_for(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    await applied(FieldManager.EDGE, PUSH)(admin, name)
    for phase in ("Connected", "Stale", "Unreachable"):
        written = await applied(FieldManager.HUB, {"phase": phase})(hub, name)
        assert written["status"] == PUSH | {"phase": phase}
    for write in (merged({"phase": "Connected"}), updated, merged({"phase": None})):
        await write(admin, name)


async def test_a_refusal_says_whose_the_phase_is(edge: tuple[KubeClient, str]) -> None:
    client, name = edge
    with pytest.raises(Forbidden) as caught:
        await merged({"phase": "Connected"})(client, name)
    for word in (name, "belongs to the datacenter controller", "set-phase"):
        assert word in caught.value.message


async def test_the_verb_can_be_given_for_one_site(
    admin: KubeClient, client_for: ClientFor, edge: tuple[KubeClient, str], namespace: str
) -> None:
    """RBAC's resourceNames hold for the made-up verb, too."""
    _, name = edge
    await create_account(admin, namespace, f"{name}-operator")
    rules = [
        *push_rules(name),
        {
            "apiGroups": [FEDERATEDCLUSTERS.group],
            "resources": [FEDERATEDCLUSTERS.plural],
            "resourceNames": [name],
            "verbs": ["set-phase"],
        },
    ]
    await grant_everywhere(admin, namespace, f"{name}-operator", rules)
    operator = await client_for(namespace, f"{name}-operator")

    async def may() -> bool:
        try:
            await merged({"phase": "Connected"})(operator, name)
        except Forbidden:
            return False
        return True

    await eventually(may, "an account with the verb sets the phase")


async def test_a_site_created_with_a_status_has_none(
    admin: KubeClient, shipped: ControlPlane, unique: Callable[[str], str]
) -> None:
    created = await admin.create(
        FEDERATEDCLUSTERS, site(unique("site"), status={"phase": "Connected"})
    )
    assert "status" not in created
