"""The verbs of the Kubernetes API on plain dicts, for every program of LLMKube.

`KubeClient` is thin: it builds calls and decodes answers. Timeouts, credentials and errors are
`llmkube.kube.transport`'s, watch streams `llmkube.kube.watch`'s. Every method raises classes of
`llmkube.kube.errors` and nothing else, and none retries: that is the worker's decision.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Self
from urllib.parse import quote, urlencode

import msgspec

import llmkube
from llmkube.api.times import parse_time
from llmkube.clock import Clock
from llmkube.kube.credentials import Access
from llmkube.kube.errors import Forbidden, Gone, Unauthorized, Unavailable
from llmkube.kube.resources import SELFSUBJECTREVIEWS, SERVICEACCOUNTS, Resource
from llmkube.kube.transport import Call, Gate, LateListener, Transport
from llmkube.kube.watch import Pace, WatchStream, at_once
from llmkube.metrics import Metrics

PAGE = 500
"""Objects per page of a list: bounds the memory of both sides."""

APPLY = "application/apply-patch+yaml"  # every JSON document is YAML, and much faster to write
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Object = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class WrittenStatus:
    """What an object's status is after a write, and the object's version then."""

    resource_version: str
    status: Object

    @classmethod
    def of(cls, obj: Object) -> WrittenStatus:
        """Of a whole object, as an answer shows it."""
        return cls(obj["metadata"]["resourceVersion"], obj.get("status") or {})


class _VersionOnly(msgspec.Struct, gc=False, rename="camel"):
    resource_version: str


class _StatusAnswer(msgspec.Struct, gc=False):
    """Of an object that was written; most of the answer is managedFields."""

    metadata: _VersionOnly
    status: Object | None = None


_decode = msgspec.json.Decoder().decode
_decode_status = msgspec.json.Decoder(_StatusAnswer).decode


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A ServiceAccount token from the TokenRequest API, and when it really ends."""

    token: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom the API server takes us for."""

    username: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a collection: the selectors of lists and watches."""

    label_selector: str | None = None
    field_selector: str | None = None

    def query(self) -> dict[str, str]:
        pairs = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in pairs.items() if value}


class KubeClient:
    """The API server, as one identity; an async context manager.

    `write_gate` is called before every mutating request is sent (again before a repetition) and
    may raise `NotLeader`. `user_agent` names the component: "llmkube/<version> (<component>)".
    Construction raises ConfigError.
    """

    def __init__(
        self,
        access: Access,
        *,
        clock: Clock,
        metrics: Metrics | None = None,
        user_agent: str = "cli",
        request_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self._transport = Transport(
            access,
            clock=clock,
            metrics=metrics.rest(access.server) if metrics is not None else None,
            user_agent=f"llmkube/{llmkube.__version__} ({user_agent})",
            request_timeout=request_timeout,
        )
        self.write_gate: Gate | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._transport.close()

    @property
    def access(self) -> Access:
        """The access in force: server, namespace, authorities."""
        return self._transport.access

    def ungated(self) -> KubeClient:
        """A client on the same connections that no write gate stops: for the leader's own Lease
        and for reviews, which must also work for those who may not write."""
        twin = object.__new__(KubeClient)
        twin._transport = self._transport
        twin.write_gate = None
        return twin

    def add_late_listener(self, listener: LateListener) -> None:
        """Call `listener` whenever the API server took long over what should be quick, or gave no
        answer: it hangs, for whoever else asks it, too."""
        self._transport.late_listeners.append(listener)

    # Reading -----------------------------------------------------------------------------------

    async def get(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        metadata_only: bool = False,
    ) -> Object:
        """One object."""
        target = _target(resource, namespace, name)
        accept = METADATA if metadata_only else "application/json"
        return self._read(await self._transport.request(Call("GET", target, accept=accept)))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        metadata_only: bool = False,
    ) -> list[Object]:
        """All objects, at the newest state, fetched in pages."""
        selection = Selection(label_selector, field_selector)
        items: list[Object] = []
        limit, token = PAGE, ""
        while True:
            try:
                page = self._read(
                    await self._list(resource, namespace, selection, limit, token, metadata_only)
                )
            except Gone:
                if not token:
                    raise
                items, limit, token = [], 0, ""  # compacted between two pages: all at once
                continue
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return items

    async def _list(
        self,
        resource: Resource,
        namespace: str | None,
        selection: Selection,
        limit: int,
        token: str,
        metadata_only: bool,
    ) -> bytes:
        return await self.list_page(
            resource,
            namespace,
            label_selector=selection.label_selector,
            field_selector=selection.field_selector,
            limit=limit,
            continue_token=token,
            metadata_only=metadata_only,
        )

    async def list_page(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        limit: int = PAGE,
        continue_token: str | None = None,
        resource_version: str | None = None,
        resource_version_match: str | None = None,
        metadata_only: bool = False,
    ) -> bytes:
        """One page of a list, undecoded. `limit` 0: everything. Raises Gone if the
        continue token or the resourceVersion has been compacted away."""
        query = Selection(label_selector, field_selector).query()
        if limit:
            query["limit"] = str(limit)
        if continue_token:
            query["continue"] = continue_token
        if resource_version is not None:
            query["resourceVersion"] = resource_version
        if resource_version_match:
            query["resourceVersionMatch"] = resource_version_match
        accept = METADATA_LIST if metadata_only else "application/json"
        target = _target(resource, namespace, query=query)
        return await self._transport.request(Call("GET", target, accept=accept, compressed=True))

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        resource_version: str | None = None,
        send_initial_events: bool = False,
        metadata_only: bool = False,
        server_timeout: timedelta = timedelta(minutes=7),
        inactivity_timeout: timedelta = timedelta(seconds=70),
        pace: Pace = at_once,
    ) -> AsyncIterator[WatchStream]:
        """Watch a collection, bookmarks included; the connection is cut when the block ends.

        Entering raises ApiError if the watch is refused. An expired resourceVersion is not
        refused: the stream then begins with an ERROR event of code 410.
        """
        query = Selection(label_selector, field_selector).query()
        query |= {"watch": "true", "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(max(1, round(server_timeout.total_seconds())))
        if resource_version is not None:
            query["resourceVersion"] = resource_version
        if send_initial_events:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        accept = METADATA if metadata_only else "application/json"
        call = Call("GET", _target(resource, namespace, query=query), accept=accept)
        async with self._transport.stream(call) as connection:
            stream = WatchStream(connection, inactivity_timeout=inactivity_timeout, pace=pace)
            try:
                yield stream
            finally:
                stream.close()

    async def server_version(self) -> str:
        """The API server's version, for example "v1.36.3"."""
        found = self._read(await self._transport.request(Call("GET", "/version")))
        return str(found.get("gitVersion", ""))

    # Writing -----------------------------------------------------------------------------------

    async def create(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        field_manager: str | None = None,
    ) -> Object:
        """Create an object. Raises AlreadyExists. Never repeated by the transport."""
        namespace = namespace or _metadata(body).get("namespace")
        query = {"fieldManager": field_manager} if field_manager else None
        target = _target(resource, namespace, query=query)
        return await self._write(Call("POST", target, _encode(body), idempotent=False))

    async def apply(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        *,
        field_manager: str,
        subresource: str | None = None,
        force: bool = True,
    ) -> Object:
        """Server-side apply. Name and namespace come from the body's metadata, which should also
        carry the resourceVersion it was computed from (then raises Conflict)."""
        target = _apply_target(resource, body, field_manager, subresource, force=force)
        return await self._write(Call("PATCH", target, _encode(body), APPLY))

    async def apply_status(
        self, resource: Resource, body: Mapping[str, Any], *, field_manager: str
    ) -> WrittenStatus:
        """Server-side apply of a status, with force, for those who make many of them: it is sent
        at once, but the answer may be read a little later, together with others, and only what a
        writer has to know of it is read at all. See `apply`."""
        target = _apply_target(resource, body, field_manager, "status", force=True)
        call = Call("PATCH", target, _encode(body), APPLY, patient=True)
        return self._read_status(await self._send(call))

    async def merge_patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any],
        *,
        field_manager: str | None = None,
        subresource: str | None = None,
    ) -> Object:
        """JSON merge patch (RFC 7396): None removes a field."""
        query = {"fieldManager": field_manager} if field_manager else None
        target = _target(resource, namespace, name, subresource, query=query)
        return await self._write(Call("PATCH", target, _encode(body), MERGE_PATCH))

    async def json_patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Sequence[Mapping[str, Any]],
        *,
        field_manager: str | None = None,
        subresource: str | None = None,
    ) -> Object:
        """JSON patch (RFC 6902). Raises Invalid when a `test` fails."""
        query = {"fieldManager": field_manager} if field_manager else None
        target = _target(resource, namespace, name, subresource, query=query)
        call = Call("PATCH", target, _encode(body), JSON_PATCH, idempotent=False)
        return await self._write(call)

    async def update(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
        field_manager: str | None = None,
    ) -> Object:
        """Replace an object; with a resourceVersion in its metadata raises Conflict if it moved."""
        metadata = _metadata(body)
        query = {"fieldManager": field_manager} if field_manager else None
        target = _target(
            resource, metadata.get("namespace"), metadata["name"], subresource, query=query
        )
        return await self._write(Call("PUT", target, _encode(body)))

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        propagation: str | None = None,
    ) -> None:
        """Delete an object. `uid` and `resource_version` are preconditions (raises Conflict)."""
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if chosen := {key: value for key, value in preconditions.items() if value}:
            options["preconditions"] = chosen
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation:
            options["propagationPolicy"] = propagation
        await self._write(Call("DELETE", _target(resource, namespace, name), _encode(options)))

    async def request_token(
        self, account: str, namespace: str, *, ttl: timedelta, audiences: Sequence[str] = ()
    ) -> IssuedToken:
        """A token of a ServiceAccount. The server may shorten (or lengthen) its life."""
        spec: Object = {"expirationSeconds": int(ttl.total_seconds())}
        if audiences:
            spec["audiences"] = list(audiences)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        target = _target(SERVICEACCOUNTS, namespace, account, "token")
        answer = await self._write(Call("POST", target, _encode(body), idempotent=False))
        status = answer.get("status") or {}
        token, expires_at = status.get("token"), parse_time(status.get("expirationTimestamp"))
        if not token or expires_at is None:
            raise Unavailable("the API server answered a TokenRequest without a token")
        return IssuedToken(token, expires_at)

    # Who we are --------------------------------------------------------------------------------

    async def whoami(self) -> Identity:
        """Whom the API server takes us for. Raises Unauthorized if it does not know us: anonymous
        requests otherwise fail much later and look like missing rights."""
        body = _encode({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
        call = Call("POST", _target(SELFSUBJECTREVIEWS), body)  # it changes nothing
        try:
            answer = self._read(await self._transport.request(call))
        except Forbidden as error:
            if "system:anonymous" not in error.message:
                raise
            raise self._anonymous() from error
        info = answer.get("status", {}).get("userInfo", {})
        identity = Identity(str(info.get("username", "")), tuple(info.get("groups") or ()))
        if identity.username in ("", "system:anonymous"):
            raise self._anonymous()
        return identity

    def _anonymous(self) -> Unauthorized:
        return Unauthorized(
            f"{self.access.server} takes us for an anonymous user: {self.access.origin} holds no "
            "credential that this server accepts; check its user entry",
            status=401,
        )

    # -------------------------------------------------------------------------------------------

    async def _write(self, call: Call) -> Object:
        return self._read(await self._send(call))

    async def _send(self, call: Call) -> bytes:
        """What changes anything goes this way. Returns the body of the answer."""
        return await self._transport.request(call, self.write_gate)

    def _read_status(self, body: bytes) -> WrittenStatus:
        try:
            answer = _decode_status(body)
        except _UNREADABLE as error:
            raise self._unreadable() from error
        return WrittenStatus(answer.metadata.resource_version, answer.status or {})

    def _read(self, body: bytes) -> Object:
        try:
            answer = _decode(body)
        except _UNREADABLE as error:
            raise self._unreadable() from error
        if not isinstance(answer, dict):
            raise Unavailable(f"{self.access.server} does not answer with an object")
        return answer

    def _unreadable(self) -> Unavailable:
        return Unavailable(f"{self.access.server} does not answer in JSON: is it an API server?")


def _apply_target(
    resource: Resource,
    body: Mapping[str, Any],
    field_manager: str,
    subresource: str | None,
    *,
    force: bool,
) -> str:
    metadata = _metadata(body)
    query = {"fieldManager": field_manager, "force": "true" if force else "false"}
    return _target(resource, metadata.get("namespace"), metadata["name"], subresource, query=query)


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata: Mapping[str, Any] = body["metadata"]
    return metadata


def _target(
    resource: Resource,
    namespace: str | None = None,
    name: str | None = None,
    subresource: str | None = None,
    *,
    query: Mapping[str, str] | None = None,
) -> str:
    """Path and query. Names are quoted: those of RBAC objects may contain colons, and more."""
    path = resource.path(
        _quoted(namespace) if namespace else None, _quoted(name) if name else None, subresource
    )
    return f"{path}?{_urlencoded(tuple(query.items()))}" if query else path


def _quoted(name: str) -> str:
    plain = name.isascii() and name.replace("-", "").replace(".", "").isalnum()
    return name if plain else quote(name, safe=":")


@lru_cache(maxsize=256)
def _urlencoded(query: tuple[tuple[str, str], ...]) -> str:
    """Nearly every write has the query of one before it."""
    return urlencode(query)
