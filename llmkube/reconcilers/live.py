"""Live reads: one object from the API server, in the shape that the caches keep."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from llmkube.api.cached import CachedMeta, CachedObject
from llmkube.informers.guard import parse_version
from llmkube.informers.informer import Informer
from llmkube.informers.worker import TerminalError
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import Resource

K = TypeVar("K", bound=CachedObject)


async def read_live(client: KubeClient, resource: Resource, kind: type[K], key: str) -> K | None:
    """The object `key` ("namespace/name", or "name" of a cluster-scoped one), None if there is
    none. For CachedMeta only metadata is fetched. Raises ApiError; TerminalError if the object
    has not the shape of its kind.
    """
    namespace, _, name = key.rpartition("/")
    try:
        found = await client.get(
            resource, name, namespace or None, metadata_only=kind is CachedMeta
        )
    except NotFound:
        return None
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise TerminalError(
            f"{resource.kind} {key} has not the shape of its kind ({error}): correct or delete it"
        ) from error


def overtaken(informer: Informer[K], found: K) -> bool:
    """Whether the watch has meanwhile shown at least as much of that object as a live read found.

    An answer can be on its way for longer than an event. Then the cache is to be believed, even if
    it lacks the object: what was found is deleted by now.
    """
    version = parse_version(found.metadata.resource_version)
    if not version:
        return False
    cached = informer.store.get(found.key)
    if cached is not None and parse_version(cached.metadata.resource_version) >= version:
        return True
    return informer.passed(found.key, version)
