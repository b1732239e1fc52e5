"""A Mac's credential: `llmkube metal token create | rotate | revoke | list`.

The Mac's agent acts as a ServiceAccount of its own, whose Role names every object it may touch:
read its MetalNode, renew its Lease, mint its own next token. Nothing else: no list, no watch, no
Secret. All of it is owned by the MetalNode.

`create_metal_token` is idempotent: interrupted anywhere and run again, the result is complete.
Options that are not given keep their values. `rotate` re-creates the account, which ends every
token it ever had; `revoke` deletes it. Neighbours: `ownership` (whose an object is) and
`credentials` (the kubeconfig); `llmkube.reconcilers.heartbeat` notices a missing account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from llmkube.api.names import (
    COMPONENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    METAL_ACCOUNT_PREFIX,
    FieldManager,
)
from llmkube.api.times import parse_time
from llmkube.cli.credentials import Credentials, TokenOptions, issue
from llmkube.cli.errors import CliError, ExitCode
from llmkube.cli.ownership import (
    Change,
    Object,
    Owner,
    change_of,
    ensure,
    ensure_created,
    find,
    owned,
    refuse_if_taken,
    removals,
    remove_owned,
)
from llmkube.cli.values import Toleration
from llmkube.kube.errors import Conflict, NotFound
from llmkube.kube.resources import (
    LEASES,
    METALNODES,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
)

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

COMPONENT = "metal-agent"
METAL_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY},{COMPONENT_LABEL}={COMPONENT}"
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class MetalTokenOptions:
    """What the user asked for. None keeps what the MetalNode has; empty clears it."""

    name: str
    namespace: str
    host_ip: str | None = None
    verifier_node_selector: Mapping[str, str] | None = None
    verifier_tolerations: tuple[Toleration, ...] | None = None
    token: TokenOptions = field(default_factory=TokenOptions)

    @property
    def account(self) -> str:
        """Name of the ServiceAccount, the Lease, the Role and the RoleBinding."""
        return METAL_ACCOUNT_PREFIX + self.name


async def create_metal_token(client: KubeClient, options: MetalTokenOptions) -> Credentials:
    """Make, or complete, the MetalNode and its account, and issue a token.

    Raises NameTaken where a needed name is somebody else's, CliError, and the client's ApiErrors.
    """
    node, change = await _apply_node(client, options)
    changes = (change, *await _apply_account(client, node, options))
    return await issue(client, node, options.account, options.namespace, changes)


async def rotate_metal_token(client: KubeClient, options: MetalTokenOptions) -> Credentials:
    """Re-create the account, so that every token it ever had is dead, and issue a new one.

    Raises CliError if there is no such MetalNode.
    """
    node = await _get_node(client, options.name, options.namespace)
    owner = Owner.of(METALNODES, node)
    _check_names(node, options)
    await remove_owned(client, owner, SERVICEACCOUNTS, options.account, options.namespace)
    return await create_metal_token(client, options)


async def revoke_metal_token(client: KubeClient, name: str, namespace: str) -> Change | None:
    """Delete the account; None if it was gone already.

    An account whose MetalNode is gone as well is deleted, too. Raises CliError if there is
    neither, NameTaken if the account is not one that llmkube made.
    """
    account = METAL_ACCOUNT_PREFIX + name
    node = await find(client, METALNODES, name, namespace)
    if node is not None:
        _refuse_other_account(node, account)
        owner = Owner(METALNODES, name, node["metadata"]["uid"])
        return await remove_owned(client, owner, SERVICEACCOUNTS, account, namespace)
    change = await remove_owned(client, _nobody(name), SERVICEACCOUNTS, account, namespace)
    if change is None:
        raise _no_such_node(name, namespace)
    return change


# The MetalNode ---------------------------------------------------------------------------------


async def _apply_node(client: KubeClient, options: MetalTokenOptions) -> tuple[Object, Change]:
    """Apply the MetalNode, computed from the state it is at; again where that has moved."""
    for attempt in range(_ATTEMPTS):
        before = await find(client, METALNODES, options.name, options.namespace)
        if before is None:
            await _refuse_taken_names(client, options)
        else:
            Owner.of(METALNODES, before)
            _check_names(before, options)
        body = desired_node(before, options)
        try:
            after = await client.apply(METALNODES, body, field_manager=FieldManager.CLI)
            after = await _remove_what_was_cleared(client, after, body)
        except (Conflict, NotFound):
            if before is None or attempt == _ATTEMPTS - 1:
                raise
            continue
        return after, change_of(METALNODES, before, after)
    raise AssertionError("the last attempt returns or raises")


def desired_node(before: Mapping[str, Any] | None, options: MetalTokenOptions) -> Object:
    """The MetalNode with our complete set of fields: what was given, else what it has."""
    spec_before = (before or {}).get("spec") or {}
    verifier_before = spec_before.get("verifier") or {}
    verifier = {
        "nodeSelector": _given(options.verifier_node_selector, verifier_before.get("nodeSelector")),
        "tolerations": _given(options.verifier_tolerations, verifier_before.get("tolerations")),
    }
    spec = {
        "leaseName": options.account,
        "serviceAccountName": options.account,
        "hostIP": _given(options.host_ip, spec_before.get("hostIP")),
        "verifier": {name: value for name, value in verifier.items() if value},
    }
    metadata: Object = {"name": options.name, "namespace": options.namespace}
    if annotations := options.token.annotations(before or {}):
        metadata["annotations"] = annotations
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {
        "apiVersion": METALNODES.api_version,
        "kind": METALNODES.kind,
        "metadata": metadata,
        "spec": {name: value for name, value in spec.items() if value},
    }


def _given(value: Any, before: Any) -> Any:
    """None is "not given"."""
    return before if value is None else value


async def _remove_what_was_cleared(
    client: KubeClient, after: Object, wanted: Mapping[str, Any]
) -> Object:
    """Take out what was cleared but stays, because another manager wrote it last."""
    patch = removals(_settable(after["spec"]), _settable(wanted["spec"]))
    if not patch:
        return after
    metadata = after["metadata"]
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "spec": patch}
    return await client.merge_patch(
        METALNODES, metadata["name"], metadata["namespace"], body, field_manager=FieldManager.CLI
    )


def _settable(spec: Mapping[str, Any]) -> Object:
    """The fields that options set and clear; a newer MetalNode may have more."""
    verifier = spec.get("verifier") or {}
    parts = {name: verifier[name] for name in ("nodeSelector", "tolerations") if name in verifier}
    return {name: spec[name] for name in ("hostIP",) if name in spec} | {"verifier": parts}


async def _refuse_taken_names(client: KubeClient, options: MetalTokenOptions) -> None:
    """Before the MetalNode is made: with it, the controller would read a stranger's Lease."""
    for resource in (LEASES, SERVICEACCOUNTS):
        await refuse_if_taken(
            client, _nobody(options.name), resource, options.account, options.namespace
        )


def _nobody(name: str) -> Owner:
    """No MetalNode: whatever an earlier one of this name left counts as left over."""
    return Owner(METALNODES, name, uid="")


def _check_names(node: Mapping[str, Any], options: MetalTokenOptions) -> None:
    """llmkube caps the tokens of accounts it named itself, and of no others."""
    _refuse_other_account(node, options.account)
    lease = node["spec"].get("leaseName")
    if lease != options.account:
        raise CliError(
            f"MetalNode {options.name} names the Lease {lease}, which llmkube did not make; "
            f"set spec.leaseName to {options.account} with `kubectl -n {options.namespace} edit "
            f"metalnode {options.name}` first",
            ExitCode.TAKEN,
        )


def _refuse_other_account(node: Mapping[str, Any], account: str) -> None:
    name, namespace = node["metadata"]["name"], node["metadata"]["namespace"]
    actual = node["spec"].get("serviceAccountName")
    if actual != account:
        raise CliError(
            f"MetalNode {name} names the ServiceAccount {actual}, which llmkube did not make; "
            f"manage that account's tokens with kubectl, or set spec.serviceAccountName to "
            f"{account} with `kubectl -n {namespace} edit metalnode {name}` first",
            ExitCode.TAKEN,
        )


async def _get_node(client: KubeClient, name: str, namespace: str) -> Object:
    node = await find(client, METALNODES, name, namespace)
    if node is None:
        raise _no_such_node(name, namespace)
    return node


def _no_such_node(name: str, namespace: str) -> CliError:
    return CliError(
        f"there is no MetalNode {name} in namespace {namespace}; see `llmkube metal list -A`, or "
        f"make it with `llmkube metal token create {name} -n {namespace}`",
        ExitCode.NOT_FOUND,
    )


# Its account -----------------------------------------------------------------------------------


async def _apply_account(
    client: KubeClient, node: Mapping[str, Any], options: MetalTokenOptions
) -> list[Change]:
    owner = Owner.of(METALNODES, node)
    name, namespace = options.account, options.namespace

    def make(resource: Any, **rest: Any) -> Object:
        return owned(resource, name, namespace, owner, COMPONENT, **rest)

    account = make(SERVICEACCOUNTS, automountServiceAccountToken=False)
    lease = make(LEASES, spec={})
    role = make(ROLES, rules=agent_rules(options.name, name))
    binding = make(
        ROLEBINDINGS,
        roleRef={"apiGroup": ROLES.group, "kind": ROLES.kind, "name": name},
        subjects=[{"kind": SERVICEACCOUNTS.kind, "name": name, "namespace": namespace}],
    )
    return [
        await ensure(client, owner, SERVICEACCOUNTS, account),
        await ensure_created(client, owner, LEASES, lease),
        await ensure(client, owner, ROLES, role),
        await ensure(client, owner, ROLEBINDINGS, binding),
    ]


def agent_rules(node: str, account: str) -> list[Object]:
    """All that a Mac's agent may do, each object by its name."""
    return [
        {
            "apiGroups": [METALNODES.group],
            "resources": [METALNODES.plural],
            "resourceNames": [node],
            "verbs": ["get"],
        },
        {
            "apiGroups": [LEASES.group],
            "resources": [LEASES.plural],
            "resourceNames": [account],
            "verbs": ["get", "update", "patch"],
        },
        {
            "apiGroups": [SERVICEACCOUNTS.group],
            "resources": ["serviceaccounts/token"],
            "resourceNames": [account],
            "verbs": ["create"],
        },
    ]


# Listing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetalAccount:
    """One line of `metal token list`."""

    namespace: str
    node: str
    account: str
    state: str
    created_at: datetime | None
    last_heartbeat: datetime | None


async def list_metal_accounts(client: KubeClient, namespace: str | None) -> list[MetalAccount]:
    """The accounts of all MetalNodes, and accounts whose MetalNode is gone; None: everywhere."""
    async with asyncio.TaskGroup() as group:
        nodes = group.create_task(client.list(METALNODES, namespace))
        accounts = group.create_task(client.list(SERVICEACCOUNTS, namespace, metadata_only=True))
        leases = group.create_task(client.list(LEASES, namespace, label_selector=METAL_SELECTOR))
    return join_accounts(nodes.result(), accounts.result(), leases.result())


def join_accounts(
    nodes: list[Object], accounts: list[Object], leases: list[Object]
) -> list[MetalAccount]:
    """Bring together what belongs together, by namespace and name."""
    account_of = {_key(account): account for account in accounts}
    renewed = {_key(lease): (lease.get("spec") or {}).get("renewTime") for lease in leases}
    rows = []
    for node in nodes:
        namespace, name = _key(node)
        account = (namespace, node["spec"]["serviceAccountName"])
        beat = renewed.get((namespace, node["spec"]["leaseName"]))
        rows.append(_row(account, name, account_of.pop(account, None), beat))
    for key, orphan in account_of.items():
        if _is_ours(orphan):
            rows.append(_row(key, "", orphan, renewed.get(key)))
    return sorted(rows, key=lambda row: (row.namespace, row.node, row.account))


def _row(
    key: tuple[str, str], node: str, account: Object | None, renewed: str | None
) -> MetalAccount:
    created = parse_time(account["metadata"]["creationTimestamp"]) if account else None
    state = "Active" if account and node else "Revoked" if node else "MetalNode gone"
    return MetalAccount(key[0], node, key[1], state, created, parse_time(renewed))


def _key(found: Mapping[str, Any]) -> tuple[str, str]:
    return found["metadata"].get("namespace", ""), found["metadata"]["name"]


def _is_ours(found: Mapping[str, Any]) -> bool:
    labels = found["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGED_BY and labels.get(COMPONENT_LABEL) == COMPONENT
