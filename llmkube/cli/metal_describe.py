"""`llmkube metal describe`: one screen that says why a Mac is not reachable, and what to do.

`observe` reads everything that bears on it; `render` puts it on a screen; `metal_advice`, the
neighbour to read next, decides what to say. What the user may not read is named, not an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from llmkube.api.names import METALNODE_UID_LABEL, VERIFIER_SELECTOR, ConditionType
from llmkube.api.times import parse_time
from llmkube.cli.errors import CliError, ExitCode, one_line
from llmkube.cli.metal_advice import advise, explain_candidate, next_check
from llmkube.cli.metal_list import condition
from llmkube.cli.output import human_duration, paint, table
from llmkube.cli.ownership import find
from llmkube.kube.errors import Forbidden, NotFound
from llmkube.kube.resources import (
    EVENTS,
    LEASES,
    METALNODES,
    PODS,
    SERVICEACCOUNTS,
    Resource,
)

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Object = dict[str, Any]
_EVENTS_SHOWN = 8
_LABEL_WIDTH = 17


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that bears on one Mac, as it was read."""

    node: Object
    lease: Object | None
    account: Object | None
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    unreadable: frozenset[str] = frozenset()
    """Plurals of what the user may not read."""

    @property
    def status(self) -> Mapping[str, Any]:
        return self.node.get("status") or {}


async def observe(client: KubeClient, name: str, namespace: str) -> Picture:
    """Read the Mac and what belongs to it. Raises CliError if there is no such MetalNode."""
    node = await find(client, METALNODES, name, namespace)
    if node is None:
        raise CliError(
            f"there is no MetalNode {name} in namespace {namespace}; see `llmkube metal list -A`",
            ExitCode.NOT_FOUND,
        )
    spec, uid = node["spec"], node["metadata"]["uid"]
    unreadable: set[str] = set()

    async def allowed(resource: Resource, reading: Awaitable[Any]) -> Any:
        try:
            return await reading
        except NotFound:
            return None
        except Forbidden:
            unreadable.add(resource.plural)
            return None

    pods = f"{VERIFIER_SELECTOR},{METALNODE_UID_LABEL}={uid}"
    readings: dict[Resource, Awaitable[Any]] = {
        LEASES: client.get(LEASES, spec["leaseName"], namespace),
        SERVICEACCOUNTS: client.get(SERVICEACCOUNTS, spec["serviceAccountName"], namespace),
        PODS: client.list(PODS, namespace, label_selector=pods),
        EVENTS: client.list(EVENTS, namespace, field_selector=f"regarding.uid={uid}"),
    }
    async with asyncio.TaskGroup() as group:
        tasks = {r: group.create_task(allowed(r, reading)) for r, reading in readings.items()}
    return Picture(
        node,
        lease=tasks[LEASES].result(),
        account=tasks[SERVICEACCOUNTS].result(),
        pods=tuple(tasks[PODS].result() or ()),
        events=tuple(tasks[EVENTS].result() or ()),
        unreadable=frozenset(unreadable),
    )


# The screen ------------------------------------------------------------------------------------


def render(picture: Picture, now: datetime) -> str:
    """The screen."""
    sections = [
        _head(picture, now),
        _conditions(picture, now),
        _heartbeat(picture, now),
        _addresses(picture, now),
        _what_to_do(picture, now),
        _events(picture, now),
    ]
    return "\n\n".join(section for section in sections if section)


def _field(label: str, value: object) -> str:
    shown = "<none>" if value is None or value == "" else one_line(str(value))
    return f"{label + ':':<{_LABEL_WIDTH}}{shown}"


def _head(picture: Picture, now: datetime) -> str:
    metadata, status = picture.node["metadata"], picture.status
    lines = [
        _field("Name", metadata["name"]),
        _field("Namespace", metadata["namespace"]),
        _field("Created", _when(metadata.get("creationTimestamp"), now)),
        _field("Hardware", _hardware(status.get("capacity") or {})),
        _field("Agent version", status.get("agentVersion")),
        _field("Serves at", _endpoint(status)),
    ]
    return "\n".join(lines)


def _hardware(capacity: Mapping[str, Any]) -> str:
    cores = capacity.get("gpuCores")
    parts = [
        capacity.get("chip"),
        f"{cores} GPU cores" if cores else None,
        capacity.get("memory"),
        capacity.get("metalVersion"),
    ]
    return ", ".join(str(part) for part in parts if part)


def _endpoint(status: Mapping[str, Any]) -> str:
    """The address that consumers may use: only while both conditions are True."""
    host = status.get("hostIP")
    if not host:
        return "no verified address"
    return (
        f"[{host}]:{status.get('ingressPort')}"
        if ":" in host
        else (f"{host}:{status.get('ingressPort')}")
    )


def _conditions(picture: Picture, now: datetime) -> str:
    lines = []
    for label, kind in (
        ("Connected", ConditionType.AGENT_CONNECTED),
        ("Reachable", ConditionType.REACHABLE),
    ):
        found = condition(picture.node, kind)
        if not found:
            lines.append(_field(label, "not judged yet"))
            continue
        since = _when(found.get("lastTransitionTime"), now)
        state = paint(found["status"])
        lines.append(f"{label + ':':<{_LABEL_WIDTH}}{state}  {found['reason']}, since {since}")
        lines.append(" " * _LABEL_WIDTH + one_line(found.get("message") or ""))
    return "\n".join(lines)


def _heartbeat(picture: Picture, now: datetime) -> str:
    spec = picture.node["spec"]
    lines = [
        _field("Lease", f"{spec['leaseName']}: {_beat(picture, now)}"),
        _field("Account", f"{spec['serviceAccountName']}: {_account(picture, now)}"),
    ]
    return "\n".join(lines)


def _beat(picture: Picture, now: datetime) -> str:
    if "leases" in picture.unreadable:
        return "you may not read Leases"
    if picture.lease is None:
        return "missing"
    renewed = (picture.lease.get("spec") or {}).get("renewTime")
    return f"last heartbeat {_when(renewed, now)}" if renewed else "no heartbeat yet"


def _account(picture: Picture, now: datetime) -> str:
    if "serviceaccounts" in picture.unreadable:
        return "you may not read ServiceAccounts"
    if picture.account is None:
        return "missing: revoked"
    return f"active, made {_when(picture.account['metadata'].get('creationTimestamp'), now)}"


def _addresses(picture: Picture, now: datetime) -> str:
    status = picture.status
    candidates = status.get("candidates") or ()
    if not candidates:
        return _field("Addresses", "none reported")
    rows = [
        [
            candidate["address"],
            candidate.get("source"),
            candidate["result"],
            _ago(candidate.get("checkedAt"), now),
            explain_candidate(candidate["result"], status.get("ingressPort")),
        ]
        for candidate in candidates
    ]
    lines = [
        f"Addresses, in order of preference, at port {status.get('ingressPort', '<none>')}:",
        _indent(table(("ADDRESS", "SOURCE", "RESULT", "CHECKED", "MEANING"), rows)),
        _field("Key", f"sha256/{status['ingressSPKI']}" if status.get("ingressSPKI") else None),
        _field("Checks", _checks(picture, now)),
    ]
    return "\n".join(lines)


def _checks(picture: Picture, now: datetime) -> str:
    verification = picture.status.get("verification") or {}
    parts = [f"last finished {_when(verification.get('lastCheckTime'), now)}"]
    if failures := verification.get("consecutiveFailures"):
        parts.append(f"{failures} in a row without a verified address")
    parts += [
        f"verifier pod {pod['metadata']['name']} is {(pod.get('status') or {}).get('phase')}"
        for pod in picture.pods
    ]
    if (due := next_check(picture.node)) is not None and not picture.pods:
        until = due - now
        parts.append(
            f"next in about {human_duration(until)}" if until > timedelta(0) else "next is due"
        )
    return "; ".join(parts)


def _what_to_do(picture: Picture, now: datetime) -> str:
    steps = advise(
        picture.node,
        picture.lease,
        now,
        lease_known="leases" not in picture.unreadable,
    )
    if not steps:
        return _field("What to do", "nothing: it is connected and reachable")
    return "\n".join(["What to do:", *(f"  - {one_line(step)}" for step in steps)])


def _events(picture: Picture, now: datetime) -> str:
    if "events" in picture.unreadable:
        return _field("Events", "you may not read Events")
    if not picture.events:
        return _field("Events", "none in the last hour")
    newest = sorted(picture.events, key=_event_time)[-_EVENTS_SHOWN:]
    rows = [
        [_ago(_event_time(e), now), e.get("type"), e.get("reason"), e.get("note")] for e in newest
    ]
    return "Events:\n" + _indent(table(("AGE", "TYPE", "REASON", "MESSAGE"), rows))


def _event_time(event: Mapping[str, Any]) -> str:
    """When an Event, or the last of its series, happened; as text, which sorts alike."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"]["creationTimestamp"]
    )


def _when(stamp: str | None, now: datetime) -> str:
    """An exact instant, and how long ago it is."""
    instant = parse_time(stamp)
    if instant is None or stamp is None:
        return "never"
    if instant > now:
        return f"{stamp} (in the future of this machine's clock)"
    return f"{stamp} ({human_duration(now - instant)} ago)"


def _ago(stamp: str | None, now: datetime) -> str:
    instant = parse_time(stamp)
    return "never" if instant is None else human_duration(now - instant)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
