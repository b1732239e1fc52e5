"""What a Mac's or an edge's account may issue to itself: 30 days, for the API server (SPEC 3.5)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from llmkube.api.names import EDGE_ACCOUNT_PREFIX, METAL_ACCOUNT_PREFIX, SYSTEM_NAMESPACE
from llmkube.cli.fleet_registration import renewal_rules
from llmkube.cli.metal_credentials import agent_rules
from llmkube.kube.errors import Forbidden
from llmkube.kube.resources import CONFIGMAPS, ROLEBINDINGS
from tests.support.accounts import create_account, grant
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

ClientFor = Callable[[str, str], Awaitable["KubeClient"]]
POLICY = "llmkube-account-tokens"
MONTH = timedelta(days=30)
CENTURY = timedelta(days=36500)
OWN_AUDIENCE = "https://kubernetes.default.svc"
MAC = f"{METAL_ACCOUNT_PREFIX}studio"
EDGE = f"{EDGE_ACCOUNT_PREFIX}floor-3"


@pytest.fixture
async def make_account(
    admin: KubeClient, client_for: ClientFor, shipped: ControlPlane, namespace: str
) -> Callable[[str], Awaitable[KubeClient]]:
    """Makes an account with the rights that the CLI gives: its client, the policy in force."""

    async def make(name: str) -> KubeClient:
        await create_account(admin, namespace, name)
        rules = agent_rules("studio", name) if name == MAC else renewal_rules(name)
        await grant(admin, namespace, name, rules)
        client = await client_for(namespace, name)

        async def has_its_rights() -> bool:
            try:
                await client.request_token(name, namespace, ttl=timedelta(hours=1))
            except Forbidden:
                return False
            return True

        await eventually(has_its_rights, f"{name} may renew its token")
        if name.startswith((METAL_ACCOUNT_PREFIX, EDGE_ACCOUNT_PREFIX)):

            async def capped() -> bool:
                try:
                    await client.request_token(name, namespace, ttl=CENTURY)
                except Forbidden as error:
                    return POLICY in error.message
                return False

            await eventually(capped, "the policy on tokens is in force")
        return client

    return make


Make = Callable[[str], Awaitable["KubeClient"]]
ACCOUNTS = [pytest.param(MAC, id="a Mac"), pytest.param(EDGE, id="an edge")]


@pytest.mark.parametrize("account", ACCOUNTS)
async def test_thirty_days_and_not_a_second_more(
    make_account: Make, namespace: str, account: str
) -> None:
    client = await make_account(account)
    issued = await client.request_token(account, namespace, ttl=MONTH)
    assert issued.token
    with pytest.raises(Forbidden, match="2592000 seconds at most"):
        await client.request_token(account, namespace, ttl=MONTH + timedelta(seconds=1))
    with pytest.raises(Forbidden, match=POLICY):
        await client.request_token(account, namespace, ttl=CENTURY)


@pytest.mark.parametrize("account", ACCOUNTS)
async def test_for_the_api_server_and_for_nobody_else(
    make_account: Make, namespace: str, account: str
) -> None:
    client = await make_account(account)
    hour = timedelta(hours=1)
    await client.request_token(account, namespace, ttl=hour)  # the default audience
    await client.request_token(account, namespace, ttl=hour, audiences=[OWN_AUDIENCE])
    for audiences in (["vault"], [OWN_AUDIENCE, "vault"], ["sts.amazonaws.com"]):
        with pytest.raises(Forbidden, match="llmkube-tokens"):
            await client.request_token(account, namespace, ttl=hour, audiences=audiences)


async def test_only_its_own(admin: KubeClient, make_account: Make, namespace: str) -> None:
    """RBAC names the one account; the policy holds even if somebody widened the role."""
    client = await make_account(MAC)
    hour = timedelta(hours=1)
    with pytest.raises(Forbidden):
        await client.request_token("default", namespace, ttl=hour)
    await create_account(admin, namespace, "victim")
    rules = [{"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}]
    await grant(admin, namespace, "victim", rules)  # a Role that is bound to the Mac, too
    await grant_also(admin, namespace, "victim", MAC)

    async def refused_by_policy() -> bool:
        try:
            await client.request_token("victim", namespace, ttl=hour)
        except Forbidden as error:
            return "for itself only" in error.message
        return False

    await eventually(refused_by_policy, "a Mac cannot issue another account's token")


async def grant_also(admin: KubeClient, namespace: str, role_of: str, account: str) -> None:
    binding = {
        "apiVersion": ROLEBINDINGS.api_version,
        "kind": "RoleBinding",
        "metadata": {"name": f"{account}-also"},
        "roleRef": {
            "apiGroup": ROLEBINDINGS.group,
            "kind": "Role",
            "name": f"{role_of}-granted",
        },
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    await admin.create(ROLEBINDINGS, binding, namespace)


async def test_people_and_other_accounts_are_none_of_its_business(
    admin: KubeClient, make_account: Make, namespace: str
) -> None:
    await make_account(MAC)
    year = timedelta(days=365)
    await admin.request_token(MAC, namespace, ttl=year, audiences=["vault"])
    backup = await make_account("backup")
    await backup.request_token("backup", namespace, ttl=year, audiences=["vault"])


async def test_the_audience_is_a_parameter(
    admin: KubeClient, make_account: Make, namespace: str
) -> None:
    client = await make_account(MAC)
    name = "llmkube-tokens"
    original = (await admin.get(CONFIGMAPS, name, SYSTEM_NAMESPACE))["data"]

    async def issues(audience: str) -> bool:
        try:
            await client.request_token(MAC, namespace, ttl=timedelta(hours=1), audiences=[audience])
        except Forbidden:
            return False
        return True

    try:
        gke = {"data": {"audiences": "https://container.example/projects/p"}}
        await admin.merge_patch(CONFIGMAPS, name, SYSTEM_NAMESPACE, gke)
        await eventually(
            lambda: issues("https://container.example/projects/p"), "the new audience passes"
        )
        assert not await issues(OWN_AUDIENCE)
    finally:
        await admin.merge_patch(CONFIGMAPS, name, SYSTEM_NAMESPACE, {"data": original})
    await eventually(lambda: issues(OWN_AUDIENCE), "the old audience passes again")
