"""The generated CRDs say what the published API reference says, field by field."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmkube.api.crdgen import DEFINITIONS, FEDERATEDCLUSTER, METALNODE, Definition
from llmkube.api.crdgen import custom_resource_definition as crd
from llmkube.api.generate import generated_files
from llmkube.kube.resources import FEDERATEDCLUSTERS, METALNODES, Resource

ROOT = Path(__file__).resolve().parent.parent
REFERENCE: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    (ROOT / "tests/data/crd_reference.yaml").read_text()
)
CONSTRAINTS = ("format", "enum", "pattern", "minimum", "minLength", "maxLength", "maxItems")


def version(definition: Definition) -> dict[str, Any]:
    (only,) = crd(definition)["spec"]["versions"]
    return dict(only)


def fields(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema's fields, depth first in the order of the reference."""
    for name, child in schema.get("properties", {}).items():
        item = child.get("items")
        field = {"field": name, "type": f"[]{item['type']}" if item else child["type"]}
        if name in schema.get("required", ()):
            field["required"] = True
        for key in ("description", *CONSTRAINTS):
            if key in child:
                field[key] = child[key]
        yield field
        yield from fields(item or child)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda d: d.kind)
def test_every_field_is_as_the_reference_says(definition: Definition) -> None:
    schema = version(definition)["schema"]["openAPIV3Schema"]
    generated = list(fields(schema))
    expected = REFERENCE[definition.kind]
    assert [f["field"] for f in generated] == [f["field"] for f in expected]
    for one, other in zip(generated, expected, strict=True):
        assert one == other


def test_conditions_are_merged_by_type() -> None:
    schema = version(METALNODE)["schema"]["openAPIV3Schema"]
    conditions = schema["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


@pytest.mark.parametrize(
    ("definition", "resource", "short_names"),
    [
        pytest.param(METALNODE, METALNODES, ["mn"], id="MetalNode"),
        pytest.param(
            FEDERATEDCLUSTER, FEDERATEDCLUSTERS, ["fc", "fedcluster"], id="FederatedCluster"
        ),
    ],
)
def test_names(definition: Definition, resource: Resource, short_names: list[str]) -> None:
    spec = crd(definition)["spec"]
    assert spec["group"] == resource.group
    assert spec["names"]["plural"] == resource.plural
    assert spec["names"]["kind"] == resource.kind
    assert spec["names"]["shortNames"] == short_names
    assert spec["names"]["categories"] == ["llmkube"]
    assert spec["scope"] == ("Namespaced" if resource.namespaced else "Cluster")
    assert version(definition)["name"] == resource.version
    assert version(definition)["subresources"] == {"status": {}}


@pytest.mark.parametrize(
    ("definition", "narrow", "wide"),
    [
        pytest.param(
            METALNODE,
            ["Chip", "Memory", "Host-IP", "Connected", "Reachable", "Age"],
            ["Agent version", "Port", "GPU cores", "Last heartbeat", "Reachable reason"],
            id="MetalNode",
        ),
        pytest.param(
            FEDERATEDCLUSTER,
            ["Tier", "Phase", "Last Heartbeat", "GPUs"],
            ["Nodes", "Ready services", "Version", "Display name"],
            id="FederatedCluster",
        ),
    ],
)
def test_columns(definition: Definition, narrow: list[str], wide: list[str]) -> None:
    columns = version(definition)["additionalPrinterColumns"]
    assert [c["name"] for c in columns if not c.get("priority")] == narrow
    assert [c["name"] for c in columns if c.get("priority") == 1] == wide


def test_the_committed_files_are_the_generated_ones() -> None:
    for path, text in generated_files(ROOT):
        assert (ROOT / path).read_text() == text, f"{path}: run `make generate`"


def test_generation_does_not_depend_on_hash_order(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-m", "llmkube.api.generate", str(tmp_path / seed)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
        )
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / seed).rglob("*.yaml")} for seed in ("1", "2")
    )
    assert first == second
    assert first
