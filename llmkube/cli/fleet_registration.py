"""An edge cluster's credential: `llmkube fleet register | rotate | unregister`.

An edge acts in the datacenter as a ServiceAccount of its own, which may read its FederatedCluster,
read and patch that object's status, and mint its own next token. Everything is owned by the
FederatedCluster. The account lives in one namespace, `llmkube-system` unless another one is
given; that one namespace is created where it is missing (the hub need not be installed first),
any other must exist. A site stays in the namespace it was registered in.

Like `metal_credentials`, its neighbour: interrupted anywhere and run again, the result is
complete, and options that are not given keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from llmkube.api.names import EDGE_ACCOUNT_PREFIX, SYSTEM_NAMESPACE, FieldManager
from llmkube.cli.credentials import Credentials, TokenOptions, issue
from llmkube.cli.errors import CliError, ExitCode
from llmkube.cli.ownership import (
    Change,
    Object,
    Owner,
    change_of,
    ensure,
    find,
    owned,
    refuse_if_taken,
    removals,
    remove,
    remove_owned,
)
from llmkube.kube.errors import AlreadyExists, Conflict, NotFound
from llmkube.kube.resources import (
    CLUSTERROLEBINDINGS,
    CLUSTERROLES,
    FEDERATEDCLUSTERS,
    NAMESPACES,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
    Resource,
)

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

COMPONENT = "edge"
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What the user asked for. None keeps what the site has; empty clears it."""

    name: str
    namespace: str | None = None
    """Where the account lives; None: where it is, at first `llmkube-system`."""
    display_name: str | None = None
    data_residency_tier: str | None = None
    heartbeat_interval: timedelta | None = None
    token: TokenOptions = field(default_factory=TokenOptions)

    @property
    def account(self) -> str:
        """Name of the ServiceAccount, the roles and the bindings."""
        return EDGE_ACCOUNT_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the objects made for a site."""

    resource: Resource
    name: str
    namespace: str | None


async def register_site(client: KubeClient, options: FleetOptions) -> Credentials:
    """Make, or complete, the FederatedCluster and its account, and issue a token.

    Raises NameTaken where a needed name is somebody else's, CliError, and the client's ApiErrors.
    """
    await find(client, FEDERATEDCLUSTERS, options.name)  # without the kind, nothing is made
    namespace = await _choose_namespace(client, options)
    changes = await _ensure_system_namespace(client, namespace)
    site, change = await _apply_site(client, options, namespace)
    changes += [change, *await _apply_account(client, site, options, namespace)]
    return await issue(client, site, options.account, namespace, tuple(changes))


async def rotate_site(client: KubeClient, options: FleetOptions) -> Credentials:
    """Re-create the account, so that every token it ever had is dead, and issue a new one.

    Raises CliError if there is no such site.
    """
    site = await find(client, FEDERATEDCLUSTERS, options.name)
    if site is None:
        raise _no_such_site(options.name)
    owner = Owner.of(FEDERATEDCLUSTERS, site)
    namespace = await _choose_namespace(client, options)
    await remove_owned(client, owner, SERVICEACCOUNTS, options.account, namespace)
    return await register_site(client, options)


async def unregister_site(client: KubeClient, name: str, namespace: str | None) -> list[Change]:
    """Delete the account, its rights and, last, the FederatedCluster.

    In this order the credential ends first, and an interrupted run is completed by the next one.
    Raises CliError if there is nothing to delete.
    """
    options = FleetOptions(name, namespace)
    site = await find(client, FEDERATEDCLUSTERS, name)
    owner = Owner(FEDERATEDCLUSTERS, name, site["metadata"]["uid"] if site else "")
    where = await _choose_namespace(client, options)
    changes = [
        await remove_owned(client, owner, part.resource, part.name, part.namespace)
        for part in _parts(options, where)
    ]
    if site is not None:
        await remove(client, FEDERATEDCLUSTERS, site)
        changes.append(Change(FEDERATEDCLUSTERS, name, "deleted"))
    done = [change for change in changes if change is not None]
    if not done:
        raise _no_such_site(name)
    return done


def _no_such_site(name: str) -> CliError:
    return CliError(
        f"there is no FederatedCluster {name}; see `llmkube fleet status`, or make it with "
        f"`llmkube fleet register {name}`",
        ExitCode.NOT_FOUND,
    )


def _parts(options: FleetOptions, namespace: str) -> list[_Part]:
    """All objects made for a site, the account first."""
    return [
        _Part(SERVICEACCOUNTS, options.account, namespace),
        _Part(ROLEBINDINGS, options.account, namespace),
        _Part(ROLES, options.account, namespace),
        _Part(CLUSTERROLEBINDINGS, options.account, None),
        _Part(CLUSTERROLES, options.account, None),
    ]


# The namespace ---------------------------------------------------------------------------------


async def _choose_namespace(client: KubeClient, options: FleetOptions) -> str:
    """Where the account is or will be. Raises CliError if it is elsewhere than asked for."""
    binding = await find(client, CLUSTERROLEBINDINGS, options.account)
    subjects = (binding or {}).get("subjects") or [{}]
    registered = subjects[0].get("namespace")
    if registered and options.namespace not in (None, registered):
        raise CliError(
            f"site {options.name} is registered in namespace {registered}; leave out "
            f"--namespace, or move it: `llmkube fleet unregister {options.name}`, then register "
            "it again",
            ExitCode.TAKEN,
        )
    return registered or options.namespace or SYSTEM_NAMESPACE


async def _ensure_system_namespace(client: KubeClient, namespace: str) -> list[Change]:
    if await find(client, NAMESPACES, namespace) is not None:
        return []
    if namespace != SYSTEM_NAMESPACE:
        raise CliError(
            f"there is no namespace {namespace}; make it with `kubectl create namespace "
            f"{namespace}`, or leave out --namespace to use {SYSTEM_NAMESPACE}",
            ExitCode.NOT_FOUND,
        )
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    try:
        await client.create(NAMESPACES, body, field_manager=FieldManager.CLI)
    except AlreadyExists:
        return []
    return [Change(NAMESPACES, namespace, "created")]


# The FederatedCluster --------------------------------------------------------------------------


async def _apply_site(
    client: KubeClient, options: FleetOptions, namespace: str
) -> tuple[Object, Change]:
    """Apply the FederatedCluster, computed from the state it is at; again where that has moved."""
    for attempt in range(_ATTEMPTS):
        before = await find(client, FEDERATEDCLUSTERS, options.name)
        if before is None:
            await _refuse_taken_names(client, options, namespace)
        else:
            Owner.of(FEDERATEDCLUSTERS, before)
        body = desired_site(before, options)
        try:
            after = await client.apply(FEDERATEDCLUSTERS, body, field_manager=FieldManager.CLI)
            after = await _remove_what_was_cleared(client, after, body)
        except (Conflict, NotFound):
            if before is None or attempt == _ATTEMPTS - 1:
                raise
            continue
        return after, change_of(FEDERATEDCLUSTERS, before, after)
    raise AssertionError("the last attempt returns or raises")


async def _refuse_taken_names(client: KubeClient, options: FleetOptions, namespace: str) -> None:
    """Before anything is made: half a registration helps nobody."""
    nobody = Owner(FEDERATEDCLUSTERS, options.name, uid="")
    for part in _parts(options, namespace):
        await refuse_if_taken(client, nobody, part.resource, part.name, part.namespace)


def desired_site(before: Mapping[str, Any] | None, options: FleetOptions) -> Object:
    """The FederatedCluster with our complete set of fields: what was given, else what it has."""
    spec_before = (before or {}).get("spec") or {}
    interval = options.heartbeat_interval
    given = {
        "displayName": options.display_name,
        "dataResidencyTier": options.data_residency_tier,
        "heartbeatIntervalSeconds": None if interval is None else int(interval.total_seconds()),
    }
    spec = {
        name: spec_before.get(name) if value is None else value for name, value in given.items()
    }
    metadata: Object = {"name": options.name}
    if annotations := options.token.annotations(before or {}):
        metadata["annotations"] = annotations
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {
        "apiVersion": FEDERATEDCLUSTERS.api_version,
        "kind": FEDERATEDCLUSTERS.kind,
        "metadata": metadata,
        "spec": {name: value for name, value in spec.items() if value},
    }


async def _remove_what_was_cleared(
    client: KubeClient, after: Object, wanted: Mapping[str, Any]
) -> Object:
    """Take out what was cleared but stays, because another manager wrote it last."""
    ours = ("displayName", "dataResidencyTier", "heartbeatIntervalSeconds")
    settable = {name: value for name, value in (after.get("spec") or {}).items() if name in ours}
    patch = removals(settable, wanted["spec"])
    if not patch:
        return after
    metadata = after["metadata"]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "spec": patch}
    return await client.merge_patch(
        FEDERATEDCLUSTERS, metadata["name"], None, body, field_manager=FieldManager.CLI
    )


# Its account -----------------------------------------------------------------------------------


async def _apply_account(
    client: KubeClient, site: Mapping[str, Any], options: FleetOptions, namespace: str
) -> list[Change]:
    owner = Owner.of(FEDERATEDCLUSTERS, site)
    name = options.account
    subjects = [{"kind": SERVICEACCOUNTS.kind, "name": name, "namespace": namespace}]

    def make(resource: Resource, **rest: Any) -> Object:
        where = namespace if resource.namespaced else None
        return owned(resource, name, where, owner, COMPONENT, **rest)

    def bind(role: Resource) -> Object:
        return {"apiGroup": role.group, "kind": role.kind, "name": name}

    bodies = {
        SERVICEACCOUNTS: make(SERVICEACCOUNTS, automountServiceAccountToken=False),
        CLUSTERROLES: make(CLUSTERROLES, rules=push_rules(options.name)),
        CLUSTERROLEBINDINGS: make(
            CLUSTERROLEBINDINGS, roleRef=bind(CLUSTERROLES), subjects=subjects
        ),
        ROLES: make(ROLES, rules=renewal_rules(name)),
        ROLEBINDINGS: make(ROLEBINDINGS, roleRef=bind(ROLES), subjects=subjects),
    }
    return [await ensure(client, owner, resource, body) for resource, body in bodies.items()]


def push_rules(site: str) -> list[Object]:
    """All that an edge may do to its FederatedCluster."""
    return [
        {
            "apiGroups": [FEDERATEDCLUSTERS.group],
            "resources": [FEDERATEDCLUSTERS.plural],
            "resourceNames": [site],
            "verbs": ["get"],
        },
        {
            "apiGroups": [FEDERATEDCLUSTERS.group],
            "resources": [f"{FEDERATEDCLUSTERS.plural}/status"],
            "resourceNames": [site],
            "verbs": ["get", "patch"],
        },
    ]


def renewal_rules(account: str) -> list[Object]:
    """The right to mint the account's own next token."""
    return [
        {
            "apiGroups": [SERVICEACCOUNTS.group],
            "resources": [f"{SERVICEACCOUNTS.plural}/token"],
            "resourceNames": [account],
            "verbs": ["create"],
        }
    ]
