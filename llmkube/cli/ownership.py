"""Objects that llmkube makes for a MetalNode or a FederatedCluster, and whose they are.

Everything made for an owner carries an ownerReference with the owner's UID, so that deleting the
owner deletes it, and so that llmkube knows again what it made: an object of the right name with
another owner belongs to somebody else and is never touched. What an *earlier* owner of the same
name left behind (garbage collection takes a moment, and orphaning deletes nothing) is removed
first: adopting its account would keep its old tokens alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llmkube.api.names import COMPONENT_LABEL, MANAGED_BY, MANAGED_BY_LABEL, FieldManager
from llmkube.cli.errors import CliError, NameTaken, is_missing_kind
from llmkube.kube.errors import AlreadyExists, NotFound
from llmkube.kube.resources import Resource

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The MetalNode or FederatedCluster that other objects are made for."""

    resource: Resource
    name: str
    uid: str

    @classmethod
    def of(cls, resource: Resource, found: Mapping[str, Any]) -> Owner:
        """The owner that was read. Raises CliError if it is on its way out."""
        metadata = found["metadata"]
        if metadata.get("deletionTimestamp"):
            raise CliError(
                f"{describe(resource, metadata['name'])} is being deleted; wait until it is gone, "
                "then run the command again"
            )
        return cls(resource, metadata["name"], metadata["uid"])

    def reference(self) -> Object:
        """Without blockOwnerDeletion, which needs an extra right on some clusters."""
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.resource.kind,
            "name": self.name,
            "uid": self.uid,
        }


class Claim(StrEnum):
    """Whose an object is."""

    ABSENT = "absent"
    OURS = "ours"
    LEFTOVER = "leftover"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to one object, as kubectl says it."""

    resource: Resource
    name: str
    verb: str

    def __str__(self) -> str:
        return f"{describe(self.resource, self.name)} {self.verb}"


def describe(resource: Resource, name: str) -> str:
    """`kind.group/name`, as kubectl prints it."""
    group = f".{resource.group}" if resource.group else ""
    return f"{resource.kind.lower()}{group}/{name}"


def claim(found: Mapping[str, Any] | None, owner: Owner) -> Claim:
    """Decide by the ownerReferences whose the object is."""
    if found is None:
        return Claim.ABSENT
    metadata = found["metadata"]
    references = metadata.get("ownerReferences") or ()
    if any(reference["uid"] == owner.uid for reference in references):
        return Claim.OURS
    if all(_is_namesake(reference, owner) for reference in references) and _made_by_us(metadata):
        return Claim.LEFTOVER
    return Claim.FOREIGN


def _made_by_us(metadata: Mapping[str, Any]) -> bool:
    """Our label, and our field manager: an orphaned object has no owner left to know it by."""
    managers = {entry.get("manager") for entry in metadata.get("managedFields") or ()}
    labels = metadata.get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGED_BY and FieldManager.CLI in managers


def _is_namesake(reference: Mapping[str, Any], owner: Owner) -> bool:
    group = str(reference["apiVersion"]).partition("/")[0]
    return (group, reference["kind"], reference["name"]) == (
        owner.resource.group,
        owner.resource.kind,
        owner.name,
    )


def owned(
    resource: Resource, name: str, namespace: str | None, owner: Owner, component: str, **rest: Any
) -> Object:
    """An object for the owner, ready to apply."""
    metadata: Object = {
        "name": name,
        "labels": {MANAGED_BY_LABEL: MANAGED_BY, COMPONENT_LABEL: component},
        "ownerReferences": [owner.reference()],
    }
    if namespace is not None:
        metadata["namespace"] = namespace
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": metadata,
        **rest,
    }


async def find(
    client: KubeClient, resource: Resource, name: str, namespace: str | None = None
) -> Object | None:
    """The object, or None."""
    try:
        return await client.get(resource, name, namespace)
    except NotFound as error:
        if is_missing_kind(error):
            raise
        return None


async def ensure(client: KubeClient, owner: Owner, resource: Resource, body: Object) -> Change:
    """Make the object what it should be, by server-side apply. Raises NameTaken."""
    name, namespace = body["metadata"]["name"], body["metadata"].get("namespace")
    found = await _claimable(client, owner, resource, name, namespace)
    if found is not None and _role_reference_differs(found, body):
        await remove(client, resource, found)  # roleRef cannot be changed
        found = None
    applied = await client.apply(resource, body, field_manager=FieldManager.CLI)
    return change_of(resource, found, applied)


async def ensure_created(
    client: KubeClient, owner: Owner, resource: Resource, body: Object
) -> Change:
    """Make the object unless it is ours already, and leave it alone if it is. Raises NameTaken.

    For the Lease: its content is the agent's. A create, unlike an apply, cannot land on an
    object that somebody else makes at this moment.
    """
    name, namespace = body["metadata"]["name"], body["metadata"].get("namespace")
    if await _claimable(client, owner, resource, name, namespace) is not None:
        return Change(resource, name, "unchanged")
    try:
        await client.create(resource, body, namespace, field_manager=FieldManager.CLI)
    except AlreadyExists:
        if await _claimable(client, owner, resource, name, namespace) is None:
            raise
        return Change(resource, name, "unchanged")
    return Change(resource, name, "created")


async def refuse_if_taken(
    client: KubeClient, owner: Owner, resource: Resource, name: str, namespace: str | None
) -> None:
    """Raise NameTaken if the object exists and is neither the owner's nor a namesake's leftover."""
    if claim(await find(client, resource, name, namespace), owner) is Claim.FOREIGN:
        raise NameTaken(_taken(owner, resource, name, namespace))


async def _claimable(
    client: KubeClient, owner: Owner, resource: Resource, name: str, namespace: str | None
) -> Object | None:
    """What is there of ours; None if the name is free. Raises NameTaken, and CliError if it
    cannot be freed."""
    found = await find(client, resource, name, namespace)
    match claim(found, owner):
        case Claim.FOREIGN:
            raise NameTaken(_taken(owner, resource, name, namespace))
        case Claim.LEFTOVER if found is not None:
            await remove(client, resource, found)
            if held_by := found["metadata"].get("finalizers"):
                raise CliError(_held(resource, name, namespace, held_by))
            return None
    return found


def _held(resource: Resource, name: str, namespace: str | None, by: Sequence[str]) -> str:
    """A Mac may put a finalizer on its Lease, and with it outlive its MetalNode."""
    where = f" -n {namespace}" if namespace else ""
    plural = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    patch = """--type=merge -p '{"metadata":{"finalizers":null}}'"""
    return (
        f"{describe(resource, name)} is left by an earlier owner of this name and is deleted, but "
        f"finalizers hold it: {', '.join(by)}. If nobody you know put them there, run "
        f"`kubectl{where} patch {plural} {name} {patch}`, then run the command again"
    )


def _taken(owner: Owner, resource: Resource, name: str, namespace: str | None) -> str:
    where = f" -n {namespace}" if namespace else ""
    plural = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    return (
        f"{describe(resource, name)} exists, and llmkube did not make it for this "
        f"{owner.resource.kind}; it was left as it is. Choose another name, or look at it with "
        f"`kubectl get{where} {plural} {name} -o yaml` and delete it if nothing needs it"
    )


async def remove(client: KubeClient, resource: Resource, found: Mapping[str, Any]) -> None:
    """Delete exactly the object that was read; gone already is well, too."""
    metadata = found["metadata"]
    try:
        await client.delete(
            resource, metadata["name"], metadata.get("namespace"), uid=metadata["uid"]
        )
    except NotFound:
        return


async def remove_owned(
    client: KubeClient, owner: Owner, resource: Resource, name: str, namespace: str | None
) -> Change | None:
    """Delete the object if it is the owner's, or left by an earlier one; None: it is not there.

    Raises NameTaken if it is somebody else's.
    """
    found = await find(client, resource, name, namespace)
    match claim(found, owner):
        case Claim.FOREIGN:
            raise NameTaken(_taken(owner, resource, name, namespace))
        case Claim.OURS | Claim.LEFTOVER if found is not None:
            await remove(client, resource, found)
            return Change(resource, name, "deleted")
    return None


def _role_reference_differs(found: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    return "roleRef" in body and found.get("roleRef") != body["roleRef"]


def change_of(
    resource: Resource, before: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> Change:
    """What an apply did, judged by the resourceVersions before and after it."""
    name = after["metadata"]["name"]
    if before is None:
        return Change(resource, name, "created")
    same = before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    return Change(resource, name, "unchanged" if same else "configured")


def removals(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> Object:
    """The merge patch that removes from `actual` every mapping key that `wanted` lacks; {} if none.

    Needed after an apply: leaving a field out does not remove it where another manager, kubectl
    for example, wrote it last.
    """
    patch: Object = {}
    for key, value in actual.items():
        if key not in wanted:
            patch[key] = None
        elif (
            isinstance(value, dict)
            and isinstance(wanted[key], dict)
            and (nested := removals(value, wanted[key]))
        ):
            patch[key] = nested
    return patch
