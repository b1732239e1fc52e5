"""What happened, not only what is: every version of some objects, as the API server tells it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from llmkube.kube.client import KubeClient
from llmkube.kube.resources import Resource
from tests.support.background import background

Object = dict[str, Any]


class Recording:
    """The events so far, in order: (ADDED, MODIFIED or DELETED, object)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Object]] = []

    def added(self) -> list[Object]:
        """Objects as they were created."""
        return [obj for kind, obj in self.events if kind == "ADDED"]

    def values(self, *path: str) -> list[Any]:
        """The distinct values that a field took, in order."""
        seen: list[Any] = []
        for _, obj in self.events:
            value: Any = obj
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None and value not in seen:
                seen.append(value)
        return seen

    def alive(self) -> set[str]:
        """UIDs of those that exist now."""
        last = {obj["metadata"]["uid"]: kind for kind, obj in self.events}
        return {uid for uid, kind in last.items() if kind != "DELETED"}

    def most_at_once(self) -> int:
        """How many of the objects existed at the same time, at most."""
        alive: set[str] = set()
        most = 0
        for kind, obj in self.events:
            if kind == "DELETED":
                alive.discard(obj["metadata"]["uid"])
            else:
                alive.add(obj["metadata"]["uid"])
            most = max(most, len(alive))
        return most


@asynccontextmanager
async def recording(
    client: KubeClient, resource: Resource, namespace: str, **selectors: str
) -> AsyncIterator[Recording]:
    """Record everything that happens to these objects while the block runs."""
    page = json.loads(await client.list_page(resource, namespace, **selectors))  # type: ignore[arg-type]
    found = Recording()

    async def watch() -> None:
        version = page["metadata"]["resourceVersion"]
        rest = b""
        async with client.watch(
            resource,
            namespace,
            resource_version=version,
            **selectors,  # type: ignore[arg-type]
        ) as stream:
            while chunk := await stream.read():
                *lines, rest = (rest + chunk).split(b"\n")
                for event in map(json.loads, lines):
                    if event["type"] != "BOOKMARK":
                        found.events.append((event["type"], event["object"]))

    async with background(watch()):
        yield found
