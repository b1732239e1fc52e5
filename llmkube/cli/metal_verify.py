"""`llmkube metal verify`: ask the controller for a check now, and wait for what it finds.

The request is an annotation that carries the lastStartTime it saw: while the two are equal the
check is due, and the next start answers it. No clocks are compared, and asking twice asks once.
Neighbour: `llmkube.rules.checks`, which decides when a check is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llmkube.api.names import VERIFY_ANNOTATION, ConditionType, FieldManager, ReachableReason
from llmkube.api.times import parse_time
from llmkube.cli.errors import CliError, ExitCode, one_line
from llmkube.cli.follow import Selection, follow
from llmkube.cli.metal_advice import explain_candidate
from llmkube.cli.metal_list import condition
from llmkube.cli.ownership import find
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import METALNODES

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Node = Mapping[str, Any]

_CANNOT_START = frozenset(
    {
        ReachableReason.INVALID_SPEC,
        ReachableReason.AGENT_DISCONNECTED,
        ReachableReason.NO_REPORT,
        ReachableReason.INVALID_REPORT,
        ReachableReason.NO_CANDIDATES,
        ReachableReason.NO_ALLOWED_ADDRESS,
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """A check that was asked for, and what the MetalNode looked like then."""

    name: str
    namespace: str
    uid: str
    last_start: str
    """`lastStartTime` as it was seen; "" if there was none."""
    failures: int
    obstacle: str | None
    """Why no check can start, for the admin; None if one can."""

    @property
    def message(self) -> str:
        asked = f"metalnode.inference.llmkube.dev/{self.name} check requested"
        return asked if self.obstacle is None else f"{asked}, but {self.obstacle}"


class Progress(StrEnum):
    """How far the check has come that answers a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    POD_FAILED = "pod failed"


async def request_check(client: KubeClient, name: str, namespace: str) -> Request:
    """Annotate the MetalNode. Raises CliError if there is none."""
    node = await find(client, METALNODES, name, namespace)
    if node is None:
        raise _gone(name, namespace)
    verification = _verification(node)
    request = Request(
        name=name,
        namespace=namespace,
        uid=node["metadata"]["uid"],
        last_start=verification.get("lastStartTime") or "",
        failures=verification.get("consecutiveFailures") or 0,
        obstacle=_obstacle(node),
    )
    body = {"metadata": {"annotations": {VERIFY_ANNOTATION: request.last_start}}}
    try:
        await client.merge_patch(METALNODES, name, namespace, body, field_manager=FieldManager.CLI)
    except NotFound:
        raise _gone(name, namespace) from None
    return request


def _gone(name: str, namespace: str) -> CliError:
    return CliError(
        f"there is no MetalNode {name} in namespace {namespace}; see `llmkube metal list -A`",
        ExitCode.NOT_FOUND,
    )


def _obstacle(node: Node) -> str | None:
    """What must change before any check can start."""
    connected = condition(node, ConditionType.AGENT_CONNECTED)
    reachable = condition(node, ConditionType.REACHABLE)
    meta = node["metadata"]
    see = f"see `llmkube metal describe {meta['name']} -n {meta['namespace']}`"
    if connected and connected["status"] != "True":
        return f"none starts while the agent is not connected ({connected['reason']}); {see}"
    if reachable and reachable["reason"] in _CANNOT_START:
        return f"none can start ({reachable['reason']}: {one_line(reachable['message'])}); {see}"
    return None


async def wait_for_check(client: KubeClient, request: Request, timeout: timedelta) -> str:
    """Wait for the answer to a request; returns what to print if the Mac was reached.

    Raises CliError with ExitCode.NEGATIVE if it was not, no check can start, or time is up.
    """
    if request.obstacle is not None:
        raise CliError(f"no check can run: {request.obstacle}", ExitCode.NEGATIVE)
    selection = Selection(METALNODES, request.namespace, request.name)
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            async for state in follow(client, selection):
                node = state.get(f"{request.namespace}/{request.name}")
                if node is None or node["metadata"]["uid"] != request.uid:
                    raise _gone(request.name, request.namespace)
                if (obstacle := _obstacle(node)) is not None:
                    raise CliError(f"the check was not made: {obstacle}", ExitCode.NEGATIVE)
                match progress(node, request):
                    case Progress.FINISHED:
                        return _result(node)
                    case Progress.POD_FAILED:
                        raise CliError(_message(node), ExitCode.NEGATIVE)
    except TimeoutError:
        pass
    raise CliError(
        f"no result after {timeout.total_seconds():g} s: the controller may be stopped or at its "
        f"limit of checks; see `llmkube metal describe {request.name} -n {request.namespace}`, "
        "or give a longer --timeout",
        ExitCode.NEGATIVE,
    )


def progress(node: Node, request: Request) -> Progress:
    """Judge the bookkeeping in the status: pure, and by what changed, not by clocks."""
    verification = _verification(node)
    started = verification.get("lastStartTime") or ""
    if started == request.last_start:
        return Progress.WAITING
    begin, end = parse_time(started), parse_time(verification.get("lastCheckTime"))
    if begin is not None and end is not None and end >= begin:
        return Progress.FINISHED
    if (verification.get("consecutiveFailures") or 0) > request.failures:
        return Progress.POD_FAILED
    return Progress.RUNNING


def _result(node: Node) -> str:
    """The outcome for each address. Raises CliError if none was reached."""
    status = node.get("status") or {}
    lines = [
        f"{candidate['address']}: {candidate['result']}, "
        f"{explain_candidate(candidate['result'], status.get('ingressPort'))}"
        for candidate in status.get("candidates") or ()
    ]
    if condition(node, ConditionType.REACHABLE).get("status") != "True":
        raise CliError("; ".join([_message(node), *lines]), ExitCode.NEGATIVE)
    return "\n".join([f"reachable at {status.get('hostIP')}", *lines])


def _message(node: Node) -> str:
    found = condition(node, ConditionType.REACHABLE)
    return f"not reachable ({found.get('reason')}): {one_line(found.get('message') or '')}"


def _verification(node: Node) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (node.get("status") or {}).get("verification") or {}
    return found
