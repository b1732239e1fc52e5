"""Status writes: server-side apply by one owner of its complete set of fields, and nothing else.

What the API server does made these rules (each was tried):

* an apply without the resourceVersion lands on a re-created namesake, so each carries the one that
  its values were computed from, and Conflict means: read live, decide again;
* an apply deletes those fields of its manager that it leaves out, so each carries all of them;
* it does *not* delete a field which another manager (kubectl, another program) wrote last, so a
  field that is to be absent and still comes back is removed by a merge patch;
* a write without a change wakes every watcher for nothing, so none is sent.

`shell` decides when to write; this module only knows how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any

import msgspec

from llmkube.api.cached import CachedCondition, CachedObject
from llmkube.api.names import FieldManager
from llmkube.kube.client import KubeClient, WrittenStatus
from llmkube.kube.events import ObjectRef
from llmkube.kube.resources import Resource

Fields = dict[str, Any]
_CONTAINERS = (dict, list)


@dataclass(frozen=True, slots=True)
class Ownership:
    """What one field manager owns in the status of one resource: whole top-level fields, and
    conditions by type."""

    resource: Resource
    manager: FieldManager
    fields: tuple[str, ...]
    conditions: tuple[str, ...] = ()

    def part(self, status: Mapping[str, Any]) -> Fields:
        """The owned part of a status, without absent and empty values."""
        owned: Fields = {
            name: value for name in self.fields if not _absent(value := status.get(name))
        }
        mine = [c for c in status.get("conditions") or () if c["type"] in self.conditions]
        if mine:
            owned["conditions"] = sorted(mine, key=lambda condition: str(condition["type"]))
        return owned


class Target(msgspec.Struct, frozen=True, gc=False):
    """The object whose status is written, as it was when the decision was made.

    `status` is its status in JSON form, as far as it is known here.
    """

    namespace: str
    name: str
    uid: str
    resource_version: str
    status: Mapping[str, Any]

    @classmethod
    def of(cls, obj: CachedObject, status: msgspec.Struct) -> Target:
        """The target for a cached (or freshly decoded) object and its status."""
        meta = obj.metadata
        return cls(meta.namespace, meta.name, meta.uid, meta.resource_version, plain(status))

    @property
    def key(self) -> str:
        return intern(f"{self.namespace}/{self.name}" if self.namespace else self.name)

    def ref(self, resource: Resource) -> ObjectRef:
        """What an Event about this object refers to."""
        return ObjectRef(resource, self.namespace, self.name, self.uid, self.resource_version)


def plain(status: msgspec.Struct) -> Fields:
    """A cached status in JSON form.

    Conditions are spelt out, because cached objects leave out what equals their defaults, and for
    a condition that is a value like any other (status Unknown, an empty message).
    """
    fields: Fields = msgspec.to_builtins(status)
    conditions: Sequence[CachedCondition] = getattr(status, "conditions", ())
    if conditions:
        fields["conditions"] = [_plain_condition(condition) for condition in conditions]
    return fields


def _plain_condition(condition: CachedCondition) -> Fields:
    values: Fields = {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
    }
    if condition.last_transition_time is not None:
        values["lastTransitionTime"] = condition.last_transition_time
    if condition.observed_generation is not None:
        values["observedGeneration"] = condition.observed_generation
    return values


class StatusWriter:
    """Writes one owner's part of the status of one resource."""

    def __init__(self, client: KubeClient, ownership: Ownership) -> None:
        self._client = client
        self.ownership = ownership

    def part(self, status: Mapping[str, Any]) -> Fields:
        """The owner's part of a status that rules decided on, in JSON form: what to `write`."""
        return self.ownership.part(_tidy(status))

    def differs(self, target: Target, wanted: Fields) -> bool:
        """Whether writing this `part` would change anything, as far as the target tells."""
        return self.ownership.part(target.status) != wanted

    async def write(self, target: Target, wanted: Fields) -> Target:
        """Apply the owner's complete `part`; return the target as it is afterwards.

        Raises ApiError: Conflict if the target has moved on, NotFound if it is gone.
        """
        own = self.ownership
        written = await self._client.apply_status(
            own.resource,
            {
                "apiVersion": own.resource.api_version,
                "kind": own.resource.kind,
                "metadata": _identity(target),
                "status": wanted,
            },
            field_manager=own.manager,
        )
        found = own.part(written.status)
        if found != wanted and (leftovers := _leftovers(found, wanted)):
            answer = await self._client.merge_patch(
                own.resource,
                target.name,
                target.namespace or None,
                {"metadata": {"resourceVersion": written.resource_version}, "status": leftovers},
                field_manager=own.manager,
                subresource="status",
            )
            written = WrittenStatus.of(answer)
        return Target(
            target.namespace, target.name, target.uid, written.resource_version, written.status
        )


def _identity(target: Target) -> Fields:
    identity = {"name": target.name, "resourceVersion": target.resource_version}
    return identity | ({"namespace": target.namespace} if target.namespace else {})


def _tidy(status: Mapping[str, Any]) -> Fields:
    """The JSON form of what rules built: enums as text, absent members left out."""
    tidy: Fields = _without_absent(msgspec.to_builtins(status))
    return tidy


def _without_absent(value: Any) -> Any:
    match value:
        case dict():
            return {
                name: _without_absent(member) if isinstance(member, _CONTAINERS) else member
                for name, member in value.items()
                if member is not None
            }
        case list():
            return [_without_absent(item) for item in value]
        case _:
            return value


def _absent(value: Any) -> bool:
    return value is None or value in ({}, [])


def _leftovers(found: Fields, wanted: Fields) -> Fields:
    """The merge patch that makes `found` equal to `wanted`: members to remove, lists to replace.

    Conditions are no leftovers: whoever owns one always has it.
    """
    patch: Fields = {}
    for name, value in found.items():
        if name == "conditions":
            continue
        if name not in wanted:
            patch[name] = None
        elif isinstance(value, dict):
            if nested := _leftovers(value, wanted[name]):
                patch[name] = nested
        elif value != wanted[name]:
            patch[name] = wanted[name]
    return patch
