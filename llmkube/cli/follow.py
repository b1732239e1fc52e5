"""Follow objects as they change, through every end of a stream.

`follow` yields the whole state after each change: a command that waits or redraws needs no more.
It lists, watches from there, and lists again whenever the stream ends, breaks or has expired; an
API server that is away is waited for. Neighbour: `llmkube.informers`, the controller's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from llmkube.kube.errors import Gone, TooManyRequests, Unavailable
from llmkube.kube.resources import Resource

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Object = dict[str, Any]
State = dict[str, Object]
"""Objects by "namespace/name"."""

_FIRST_DELAY = timedelta(seconds=0.5)
_LONGEST_DELAY = timedelta(seconds=15)


@dataclass(frozen=True, slots=True)
class Selection:
    """What to follow."""

    resource: Resource
    namespace: str | None = None
    name: str | None = None

    @property
    def field_selector(self) -> str | None:
        return f"metadata.name={self.name}" if self.name else None


class Expired(Exception):
    """The stream said that its position is gone, or something that is no event: list again."""


async def follow(client: KubeClient, selection: Selection) -> AsyncIterator[State]:
    """The state now, and again after each change, for ever.

    Raises ApiError where waiting is no use (missing rights, a missing kind, a refused request),
    and when the very first list fails.
    """
    delay, begun = _FIRST_DELAY, False
    while True:
        try:
            async for state in _until_stream_ends(client, selection):
                delay, begun = _FIRST_DELAY, True
                yield state
        except (Unavailable, TooManyRequests, Gone, Expired):
            if not begun:
                raise
            await asyncio.sleep(delay.total_seconds())
            delay = min(delay * 2, _LONGEST_DELAY)
        else:
            await asyncio.sleep(_FIRST_DELAY.total_seconds())


async def _until_stream_ends(client: KubeClient, selection: Selection) -> AsyncIterator[State]:
    page = msgspec.json.decode(
        await client.list_page(
            selection.resource,
            selection.namespace,
            field_selector=selection.field_selector,
            limit=0,
        )
    )
    state = {_key(item): item for item in page.get("items") or ()}
    yield dict(state)
    async with client.watch(
        selection.resource,
        selection.namespace,
        field_selector=selection.field_selector,
        resource_version=page["metadata"]["resourceVersion"],
    ) as stream:
        rest = b""
        while data := await stream.read():
            *lines, rest = (rest + data).split(b"\n")
            changes = [_take(state, line) for line in lines]
            if any(changes):
                yield dict(state)


def _take(state: State, line: bytes) -> bool:
    """Take one event into the state; True if that changed it. Raises Expired."""
    if not line.strip():
        return False
    try:
        event: Mapping[str, Any] = msgspec.json.decode(line)
        kind, found = event["type"], event["object"]
        match kind:
            case "ADDED" | "MODIFIED":
                state[_key(found)] = found
            case "DELETED":
                state.pop(_key(found), None)
            case "BOOKMARK":
                return False
            case _:
                raise Expired
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise Expired from error
    return True


def _key(found: Mapping[str, Any]) -> str:
    metadata = found["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"
