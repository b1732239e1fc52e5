"""ConfigMaps: the simplest objects there are, for tests of the client."""

from __future__ import annotations

from typing import Any


def a_map(namespace: str, name: str = "one", **data: str) -> dict[str, Any]:
    """A ConfigMap to be created or applied."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }
