"""Reads the edge's own cluster: nodes, Models and InferenceServices, all at once, in bounded time.

What goes wrong here never stops a heartbeat: it becomes a `parts.Reading`. Objects are decoded
page by page into the few fields that are counted, so that a large cluster costs little memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from llmkube.edge.parts import (
    Capacity,
    Counted,
    Failed,
    Fresh,
    Inference,
    Node,
    Omitted,
    Reading,
    Service,
    count_inference,
    count_nodes,
)
from llmkube.kube.client import PAGE
from llmkube.kube.errors import ApiError, ConfigError, Forbidden, Gone, NotFound
from llmkube.kube.resources import INFERENCESERVICES, MODELS, NODES, Resource

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")


class _PageMeta(msgspec.Struct, frozen=True, gc=False):
    # Named `continue` in JSON, which is no name in Python.
    next: str = msgspec.field(default="", name="continue")


@dataclass(frozen=True, slots=True)
class Readings:
    """One look at the local cluster, and how each source did."""

    capacity: Reading[Capacity]
    inference: Reading[Inference]
    sources: dict[str, Reading[Any]]
    """By plural, for metrics and the log."""


class LocalCluster:
    """The cluster that the edge runs in."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read(self, within: timedelta) -> Readings:
        """Look at everything. Never raises an ApiError; what is not there in time has failed."""
        async with asyncio.TaskGroup() as group:
            nodes = group.create_task(_attempt(self._nodes(), within))
            models = group.create_task(_attempt(self._models(), within))
            services = group.create_task(_attempt(self._services(), within))
        return Readings(
            nodes.result(),
            combine(models.result(), services.result()),
            {
                "nodes": nodes.result(),
                "models": models.result(),
                "inferenceservices": services.result(),
            },
        )

    async def _nodes(self) -> Capacity:
        return count_nodes([node async for node in self._all(NODES, Node)])

    async def _models(self) -> int:
        count = 0
        async for _ in self._all(MODELS, Counted, metadata_only=True):
            count += 1
        return count

    async def _services(self) -> list[Service]:
        return [service async for service in self._all(INFERENCESERVICES, Service)]

    async def _all(
        self, resource: Resource, kind: type[T], *, metadata_only: bool = False
    ) -> AsyncIterator[T]:
        """Every object, page by page. Raises Gone if the list expires on the way."""
        decode = _page_decoder(kind)
        token = ""
        while True:
            page: Any = decode(
                await self._client.list_page(
                    resource, limit=PAGE, continue_token=token, metadata_only=metadata_only
                )
            )
            for item in page.items or ():
                yield item
            token = page.metadata.next
            if not token:
                return


@cache
def _page_decoder(kind: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    items: Any = list[kind] | None  # type: ignore[valid-type]
    fields: list[tuple[str, Any, Any]] = [
        ("metadata", _PageMeta, _PageMeta()),
        ("items", items, None),
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Page", fields)).decode


def combine(models: Reading[int], services: Reading[list[Service]]) -> Reading[Inference]:
    """`inference` has all of its fields or none: it is as good as the worse of its sources."""
    match models, services:
        case (Omitted() as omitted, _) | (_, Omitted() as omitted):
            return omitted
        case (Failed() as failed, _) | (_, Failed() as failed):
            return failed
        case Fresh(count), Fresh(found):
            return Fresh(count_inference(count, found))
    raise AssertionError("every pair of readings is one of these")


async def _attempt(reading: Awaitable[V], within: timedelta) -> Reading[V]:
    try:
        async with asyncio.timeout(within.total_seconds()):
            return Fresh(await reading)
    except NotFound:
        return Omitted("this cluster does not have this kind")
    except Forbidden as error:
        return Omitted(str(error), forbidden=True)
    except Gone:
        return Failed("the list expired before it was read to its end")
    except RecursionError:  # msgspec's answer to what is no Kubernetes object any more
        return Failed("an object is nested too deeply to be read")
    except (ApiError, ConfigError, msgspec.MsgspecError) as error:
        return Failed(str(error))
    except TimeoutError:
        return Failed(f"no answer within {within.total_seconds():g} s")
