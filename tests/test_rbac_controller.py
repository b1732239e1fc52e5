"""The controller's shipped rights, to the verb; and the roles for people (SPEC 5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from llmkube.api.names import CONTROLLER_ACCOUNT, LEADER_LEASE, SYSTEM_NAMESPACE
from llmkube.kube.resources import CLUSTERROLEBINDINGS, CLUSTERROLES, ROLEBINDINGS, Resource
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

CONFIG = Path(__file__).resolve().parent.parent / "config"
REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
CONTROLLER = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{CONTROLLER_ACCOUNT}"
INFERENCE, FEDERATION = "inference.llmkube.dev", "federation.llmkube.dev"

ALL_THAT_IT_MAY = {
    (INFERENCE, "metalnodes"): {"get", "list", "watch"},
    (INFERENCE, "metalnodes/status"): {"get", "patch"},
    (FEDERATION, "federatedclusters"): {"get", "list", "watch", "set-phase"},
    (FEDERATION, "federatedclusters/status"): {"get", "patch"},
    ("coordination.k8s.io", "leases"): {"get", "list", "watch"},
    ("", "serviceaccounts"): {"get", "list", "watch"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("events.k8s.io", "events"): {"create", "patch"},
}


def documents(name: str) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all((CONFIG / "rbac" / name).read_text()) if d]


def test_the_cluster_role_is_that_list_and_nothing_else() -> None:
    role, binding = documents("controller_role.yaml")
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    assert found == ALL_THAT_IT_MAY
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": CONTROLLER_ACCOUNT, "namespace": SYSTEM_NAMESPACE}
    ]


def test_its_own_lease_and_no_other() -> None:
    role, _ = documents("leader_election_role.yaml")
    assert role["metadata"]["namespace"] == SYSTEM_NAMESPACE
    create, own = role["rules"]
    assert create["verbs"] == ["create"]
    assert own["resourceNames"] == [LEADER_LEASE]


def attributes(verb: str, group: str, resource: str, **more: str) -> dict[str, str]:
    name, _, subresource = resource.partition("/")
    return {"verb": verb, "group": group, "resource": name, "subresource": subresource, **more}


async def allowed(admin: KubeClient, user: str, asked: dict[str, str], groups: Any = ()) -> bool:
    spec = {"user": user, "groups": list(groups), "resourceAttributes": asked}
    body = {"apiVersion": REVIEWS.api_version, "kind": REVIEWS.kind, "metadata": {}, "spec": spec}
    return bool((await admin.create(REVIEWS, body))["status"]["allowed"])


OWN_LEASE = {"namespace": SYSTEM_NAMESPACE, "name": LEADER_LEASE}
MAY = [
    *(
        attributes(verb, group, resource, namespace="any")
        for (group, resource), verbs in ALL_THAT_IT_MAY.items()
        for verb in sorted(verbs)
    ),
    attributes("create", "coordination.k8s.io", "leases", namespace=SYSTEM_NAMESPACE),
    attributes("get", "coordination.k8s.io", "leases", **OWN_LEASE),
    attributes("update", "coordination.k8s.io", "leases", **OWN_LEASE),
]
MAY_NOT = [
    *(attributes(verb, "", "secrets") for verb in ("get", "list", "watch", "create")),
    *(attributes(verb, "", "configmaps") for verb in ("get", "list", "create", "patch")),
    *(attributes(verb, "", "pods") for verb in ("update", "patch", "deletecollection")),
    *(
        attributes("create", "", f"pods/{sub}")
        for sub in ("exec", "attach", "portforward", "proxy", "binding", "eviction")
    ),
    attributes("get", "", "pods/log"),
    attributes("patch", "", "pods/ephemeralcontainers"),
    attributes("patch", "", "pods/status"),
    attributes("create", "", "serviceaccounts"),
    attributes("delete", "", "serviceaccounts"),
    attributes("create", "", "serviceaccounts/token"),
    attributes("impersonate", "", "serviceaccounts"),
    attributes("impersonate", "", "users"),
    *(
        attributes(verb, INFERENCE, "metalnodes")
        for verb in ("create", "update", "patch", "delete")
    ),
    attributes("update", INFERENCE, "metalnodes/status"),
    *(
        attributes(verb, FEDERATION, "federatedclusters")
        for verb in ("create", "update", "patch", "delete")
    ),
    *(
        attributes(verb, "coordination.k8s.io", "leases", namespace="any")
        for verb in ("create", "update", "patch", "delete")
    ),
    attributes("update", "coordination.k8s.io", "leases", namespace=SYSTEM_NAMESPACE, name="other"),
    attributes("delete", "coordination.k8s.io", "leases", **OWN_LEASE),
    attributes("get", "", "nodes"),
    attributes("get", "", "nodes/proxy"),
    attributes("get", "", "namespaces"),
    attributes("create", "rbac.authorization.k8s.io", "rolebindings"),
    attributes("escalate", "rbac.authorization.k8s.io", "clusterroles"),
    attributes("update", "admissionregistration.k8s.io", "validatingadmissionpolicies"),
    attributes("create", "events.k8s.io", "events/status"),
    attributes("create", "apps", "deployments"),
    attributes("create", "batch", "jobs"),
]


def sentence(asked: dict[str, str]) -> str:
    resource = "/".join(filter(None, (asked["resource"], asked["subresource"])))
    where = "/".join(filter(None, (asked.get("namespace"), asked.get("name"))))
    return f"{asked['verb']} {resource} {where}".strip()


@pytest.mark.cluster
@pytest.mark.parametrize("asked", MAY, ids=sentence)
async def test_may(admin: KubeClient, shipped: ControlPlane, asked: dict[str, str]) -> None:
    assert await allowed(admin, CONTROLLER, asked)


@pytest.mark.cluster
@pytest.mark.parametrize("asked", MAY_NOT, ids=sentence)
async def test_may_not(admin: KubeClient, shipped: ControlPlane, asked: dict[str, str]) -> None:
    assert not await allowed(admin, CONTROLLER, asked)


# People -----------------------------------------------------------------------------------------
VIEW, CHANGE = ("get", "list", "watch"), ("create", "update", "patch", "delete")
PEOPLE = [
    # (ClusterRole, bound in the namespace or cluster-wide, resource, may, may not)
    ("view", True, (INFERENCE, "metalnodes"), VIEW, CHANGE),
    ("edit", True, (INFERENCE, "metalnodes"), VIEW + CHANGE, ()),
    ("admin", True, (INFERENCE, "metalnodes"), VIEW + CHANGE, ()),
    ("edit", True, (INFERENCE, "metalnodes/status"), ("get",), ("update", "patch")),
    ("view", False, (FEDERATION, "federatedclusters"), VIEW, (*CHANGE, "set-phase")),
    ("edit", False, (FEDERATION, "federatedclusters"), VIEW, (*CHANGE, "set-phase")),
    (
        "llmkube-federatedcluster-editor",
        False,
        (FEDERATION, "federatedclusters"),
        VIEW + CHANGE,
        ("set-phase",),
    ),
    (
        "llmkube-federatedcluster-viewer",
        False,
        (FEDERATION, "federatedclusters/status"),
        ("get",),
        ("update", "patch"),
    ),
    ("llmkube-metalnode-viewer", True, (INFERENCE, "metalnodes"), VIEW, CHANGE),
    ("llmkube-metalnode-editor", True, (INFERENCE, "metalnodes"), VIEW + CHANGE, ("approve",)),
    ("cluster-admin", False, (FEDERATION, "federatedclusters"), ("set-phase",), ()),
]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("role", "namespaced", "what", "may", "may_not"),
    [pytest.param(*row, id=f"{row[0]}: {row[2][1]}") for row in PEOPLE],
)
async def test_roles_for_people(
    admin: KubeClient,
    shipped: ControlPlane,
    unique: Callable[[str], str],
    role: str,
    namespaced: bool,
    what: tuple[str, str],
    may: tuple[str, ...],
    may_not: tuple[str, ...],
) -> None:
    user = unique("user")
    await bind(admin, user, role, "default" if namespaced else None)

    def asked(verb: str) -> dict[str, str]:
        return attributes(verb, *what) | ({"namespace": "default"} if namespaced else {})

    for verb in may:  # aggregation and the authorizer's cache take a moment
        await eventually(lambda v=verb: allowed(admin, user, asked(v)), f"{role} may {verb}")  # type: ignore[misc]
    for verb in may_not:
        assert not await allowed(admin, user, asked(verb)), verb


async def bind(admin: KubeClient, user: str, role: str, namespace: str | None) -> None:
    binding = {
        "apiVersion": CLUSTERROLES.api_version,
        "kind": "RoleBinding" if namespace else "ClusterRoleBinding",
        "metadata": {"name": user},
        "roleRef": {"apiGroup": CLUSTERROLES.group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": CLUSTERROLES.group, "kind": "User", "name": user}],
    }
    resource = ROLEBINDINGS if namespace else CLUSTERROLEBINDINGS
    await admin.create(resource, binding, namespace)
