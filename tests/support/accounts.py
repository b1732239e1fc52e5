"""ServiceAccounts with given rights, for tests that act under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmkube.kube.resources import (
    CLUSTERROLEBINDINGS,
    CLUSTERROLES,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
)

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Rules = Sequence[Mapping[str, Any]]
RBAC = "rbac.authorization.k8s.io"


async def create_account(admin: KubeClient, namespace: str, name: str) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    await admin.create(SERVICEACCOUNTS, account, namespace)


async def grant(
    admin: KubeClient, namespace: str, account: str, rules: Rules, *, of: str | None = None
) -> None:
    """Give the account of namespace `of` (else of the same one) these rights in a namespace."""
    head = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": f"{account}-granted"}}
    await admin.create(ROLES, {**head, "kind": "Role", "rules": rules}, namespace)
    binding = {**head, "kind": "RoleBinding", **_binding("Role", account, of or namespace)}
    await admin.create(ROLEBINDINGS, binding, namespace)


async def grant_everywhere(admin: KubeClient, namespace: str, account: str, rules: Rules) -> None:
    """Give the account these rights cluster-wide."""
    head = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": f"{account}-granted"}}
    await admin.create(CLUSTERROLES, {**head, "kind": "ClusterRole", "rules": rules})
    binding = {**head, "kind": "ClusterRoleBinding", **_binding("ClusterRole", account, namespace)}
    await admin.create(CLUSTERROLEBINDINGS, binding)


def _binding(kind: str, account: str, namespace: str) -> dict[str, Any]:
    return {
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": f"{account}-granted"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
