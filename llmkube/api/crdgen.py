"""CustomResourceDefinitions from the pydantic types: one source for schema, code and documents.

Pydantic emits JSON Schema; the API server wants a *structural* schema: no `$ref`, no `anyOf` for
"or null", no titles. Everything else (types, formats, patterns, limits, enums, required lists,
descriptions, list-map keys) is passed on word for word. What a schema cannot say (names, scope,
columns) is in the tables below. Neighbour: `generate`, which writes the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmkube.api.federatedcluster import FederatedCluster
from llmkube.api.meta import ApiModel
from llmkube.api.metalnode import MetalNode
from llmkube.api.names import ConditionType

Json = dict[str, Any]

_PASSED_ON = (
    "description",
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "minLength",
    "maxLength",
    "maxItems",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; the wide ones show with `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    description: str = ""
    wide: bool = False

    def to_json(self) -> Json:
        column: Json = {"name": self.name, "type": self.type, "jsonPath": self.path}
        if self.description:
            column["description"] = self.description
        if self.wide:
            column["priority"] = 1
        return column


@dataclass(frozen=True, slots=True)
class Definition:
    """A kind: its type, and what its schema cannot say."""

    model: type[ApiModel]
    plural: str
    short_names: tuple[str, ...]
    namespaced: bool
    columns: tuple[Column, ...]

    @property
    def kind(self) -> str:
        return str(self.model.model_fields["kind"].default)

    @property
    def group(self) -> str:
        return self._api_version[0]

    @property
    def version(self) -> str:
        return self._api_version[1]

    @property
    def _api_version(self) -> tuple[str, str]:
        group, _, version = str(self.model.model_fields["api_version"].default).partition("/")
        return group, version


def _condition(kind: ConditionType, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind.value}")].{field}'


METALNODE = Definition(
    model=MetalNode,
    plural="metalnodes",
    short_names=("mn",),
    namespaced=True,
    columns=(
        Column("Chip", ".status.capacity.chip"),
        Column("Memory", ".status.capacity.memory"),
        Column("Host-IP", ".status.hostIP", description="The first address that was verified"),
        Column("Connected", _condition(ConditionType.AGENT_CONNECTED, "status")),
        Column("Reachable", _condition(ConditionType.REACHABLE, "status")),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Agent version", ".status.agentVersion", wide=True),
        Column("Port", ".status.ingressPort", "integer", wide=True),
        Column("GPU cores", ".status.capacity.gpuCores", "integer", wide=True),
        Column("Last heartbeat", ".status.lastHeartbeatTime", "date", wide=True),
        Column("Reachable reason", _condition(ConditionType.REACHABLE, "reason"), wide=True),
    ),
)

FEDERATEDCLUSTER = Definition(
    model=FederatedCluster,
    plural="federatedclusters",
    short_names=("fc", "fedcluster"),
    namespaced=False,
    columns=(
        Column("Tier", ".spec.dataResidencyTier"),
        Column("Phase", ".status.phase"),
        Column("Last Heartbeat", ".status.lastHeartbeatTime", "date"),
        Column("GPUs", ".status.capacity.gpusTotal", "integer"),
        Column("Nodes", ".status.capacity.nodes", "integer", wide=True),
        Column("Ready services", ".status.inference.servicesReady", "integer", wide=True),
        Column("Version", ".status.observedVersion", wide=True),
        Column("Display name", ".spec.displayName", wide=True),
    ),
)

DEFINITIONS = (METALNODE, FEDERATEDCLUSTER)


def custom_resource_definition(definition: Definition) -> Json:
    """The apiextensions.k8s.io/v1 object for a kind."""
    kind = definition.kind
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{definition.plural}.{definition.group}",
            "labels": {"app.kubernetes.io/name": "llmkube"},
        },
        "spec": {
            "group": definition.group,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": definition.plural,
                "singular": kind.lower(),
                "shortNames": list(definition.short_names),
                "categories": ["llmkube"],
            },
            "scope": "Namespaced" if definition.namespaced else "Cluster",
            "versions": [
                {
                    "name": definition.version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [c.to_json() for c in definition.columns],
                    "schema": {"openAPIV3Schema": object_schema(definition.model)},
                }
            ],
        },
    }


def object_schema(model: type[ApiModel]) -> Json:
    """The structural schema of a whole object. Metadata is the API server's own business."""
    raw = model.model_json_schema(by_alias=True)
    schema = _structural(raw, raw.get("$defs", {}))
    schema["properties"] |= {
        "apiVersion": _plain_string(schema["properties"]["apiVersion"]),
        "kind": _plain_string(schema["properties"]["kind"]),
        "metadata": {"type": "object"},
    }
    schema["required"] = [name for name in schema.get("required", ()) if name != "metadata"]
    if not schema["required"]:
        del schema["required"]
    return schema


def _structural(node: Json, definitions: Json) -> Json:
    node = _resolve(node, definitions)
    schema: Json = {key: node[key] for key in _PASSED_ON if key in node}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    if "properties" in node:
        schema["properties"] = {
            name: _structural(child, definitions)
            for name, child in sorted(node["properties"].items())
        }
    if node.get("required"):
        schema["required"] = sorted(node["required"])
    if "items" in node:
        schema["items"] = _part(node["items"], definitions)
    if isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _part(node["additionalProperties"], definitions)
    return schema


def _part(node: Json, definitions: Json) -> Json:
    """An item's schema. The class's docstring is for programmers and stays out of it."""
    schema = _structural(node, definitions)
    schema.pop("description", None)
    return schema


def _resolve(node: Json, definitions: Json) -> Json:
    """Follow `$ref` and `anyOf: [X, null]`; what is said at the field wins over what X says."""
    alternatives = [a for a in node.get("anyOf", ()) if a.get("type") != "null"]
    if len(alternatives) > 1:
        raise ValueError(f"a structural schema has no alternatives: {node}")
    target = alternatives[0] if alternatives else node
    if "$ref" in target:
        target = _resolve(definitions[target["$ref"].rpartition("/")[2]], definitions)
        target = {key: value for key, value in target.items() if key != "description"}
    return target | {k: v for k, v in node.items() if k not in ("anyOf", "$ref")}


def _plain_string(node: Json) -> Json:
    return {"description": node["description"], "type": "string"}
