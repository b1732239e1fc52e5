"""The heartbeat: renew the Lease every half minute, whatever happens.

A beat is one merge patch: the time, the holder, and the report if the Lease does not carry it yet.
(A merge patch, because a PUT or an apply on a missing Lease is answered with 403, and 403 must not
be mistaken for a revoked credential.) The MetalNode is read at the start, every ten minutes, and
whenever something hints that it is another one now: its UID is what the certificate names. No
failure ends the loop; each is told once, with what to do, and tried again at most 15 s later.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

from llmkube.agent.settings import HeartbeatSettings
from llmkube.agent.statedir import StateError
from llmkube.agent.target import Target, Wanted
from llmkube.api.names import REPORT_ANNOTATION, FieldManager
from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO, Clock
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import (
    ApiError,
    ConfigError,
    Forbidden,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from llmkube.kube.resources import LEASES, METALNODES
from llmkube.log import get_logger

_MAX_BACKOFF_EXPONENT: Final = 10

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """What the agent needs to know of its MetalNode."""

    target: Target
    uid: str
    lease: str


class RenderReport(Protocol):
    """Gives the report's text for a MetalNode UID. May raise StateError or OSError."""

    async def render(self, uid: str) -> str: ...


def lease_patch(
    now: datetime, holder: str, settings: HeartbeatSettings, report: str | None
) -> dict[str, Any]:
    """The merge patch of one beat. `report` None: the annotation stays as it is."""
    patch: dict[str, Any] = {
        "spec": {
            "renewTime": format_micro_time(now),
            "leaseDurationSeconds": int(settings.lease_duration.total_seconds()),
            "holderIdentity": holder,
        }
    }
    if report is not None:
        patch["metadata"] = {"annotations": {REPORT_ANNOTATION: report}}
    return patch


@dataclass(frozen=True, slots=True)
class Answer:
    """What the Lease shows in the answer to a beat."""

    carried: str | None
    """The report on it."""
    overwritten: bool
    """It should have carried our report, and did not."""
    disowned: bool
    """Its owner is another MetalNode than ours."""


def read_answer(lease: Mapping[str, Any], uid: str, expected: str | None) -> Answer:
    """Read a Lease as it is after a beat for the MetalNode `uid`.

    `expected` is the report that it carried before and that the beat left alone; None where the
    beat has just written it, or there was none.
    """
    metadata = lease.get("metadata") or {}
    carried = (metadata.get("annotations") or {}).get(REPORT_ANNOTATION)
    owners = {owner.get("uid") for owner in metadata.get("ownerReferences") or ()}
    return Answer(
        carried=carried,
        overwritten=expected is not None and carried != expected,
        disowned=bool(owners) and uid not in owners,
    )


def retry_pause(failures: int, error: Exception, settings: HeartbeatSettings) -> timedelta:
    """How long to wait after so many failures in a row, before jitter."""
    doubled = settings.first_retry * (1 << min(failures - 1, _MAX_BACKOFF_EXPONENT))
    asked = error.retry_after if isinstance(error, TooManyRequests) else None
    return min(max(doubled, asked or ZERO), settings.retry_cap)


class Heartbeat:
    """Beats for one MetalNode over one client."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        settings: HeartbeatSettings,
        wanted: Wanted,
        holder: str,
        reporter: RenderReport,
        on_beat: Callable[[Exception | None], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._settings = settings
        self._wanted = wanted
        self._holder = holder
        self._reporter = reporter
        self._on_beat = on_beat
        self._nudged = asyncio.Event()
        self._node: Node | None = None
        self._read_at = ZERO
        self._lease_report: str | None = None
        """The report that the Lease carried after our last beat."""
        self._trouble = ""
        self._report_trouble = ""
        self._failures = 0
        self._hurried = False
        """The last beat was answered by another one at once."""

    @property
    def failing(self) -> bool:
        """The last beat did not arrive."""
        return self._failures > 0

    def nudge(self) -> None:
        """Beat now."""
        self._nudged.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._nudged.clear()
            pause = await self._attempt()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._jittered(pause).total_seconds()):
                    await self._nudged.wait()

    async def _attempt(self) -> timedelta:
        """One beat; returns the pause after it."""
        try:
            again = await self._beat()
        except (ApiError, ConfigError) as error:
            self._failures += 1
            self._on_beat(error)
            self._tell(error)
            if isinstance(error, NotFound | Unauthorized | Forbidden):
                self._node = None  # perhaps it is another MetalNode now
            return retry_pause(self._failures, error, self._settings)
        self._on_beat(None)
        if self._trouble:
            log.info("beating again", after_failures=self._failures)
        self._failures, self._trouble = 0, ""
        self._hurried = again and not self._hurried  # once: it may not help
        return ZERO if self._hurried else self._settings.interval

    async def _beat(self) -> bool:
        """Renew the Lease. True: what came back asks for another beat at once."""
        node = await self._current_node()
        report = await self._render(node.uid)
        send = report if report != self._lease_report else None
        lease = await self._client.merge_patch(
            LEASES,
            node.lease,
            node.target.namespace,
            lease_patch(self._clock.now().wall, self._holder, self._settings, send),
            field_manager=FieldManager.AGENT,
        )
        expected = report if send is None else None
        return self._learn(node, read_answer(lease, node.uid, expected))

    def _learn(self, node: Node, answer: Answer) -> bool:
        """Take in what the answer to a beat shows. True: beat again at once."""
        self._lease_report = answer.carried
        if answer.overwritten:
            log.warning(
                "somebody else changed the report on our Lease",
                lease=node.lease,
                do="if another machine uses the same credential, give it its own with `llmkube "
                f"metal token create OTHER-NAME -n {node.target.namespace}`",
            )
        if answer.disowned:
            if not self._hurried:
                log.info("the Lease belongs to another MetalNode now", lease=node.lease)
            self._node = None
        return answer.overwritten or answer.disowned

    async def _current_node(self) -> Node:
        now = self._clock.monotonic()
        target = self._wanted.target(self._client.access)
        known = self._node
        fresh = now - self._read_at < self._settings.reread_interval
        if known is not None and known.target == target and fresh:
            return known
        found = await self._client.get(METALNODES, target.name, target.namespace)
        node = Node(target, str(found["metadata"]["uid"]), str(found["spec"]["leaseName"]))
        if node != known:
            log.info("this machine is MetalNode", metalnode=str(target), uid=node.uid)
            self._lease_report = None
        self._node, self._read_at = node, now
        return node

    async def _render(self, uid: str) -> str | None:
        """The report, or None: a full disk costs the report, never the beat."""
        try:
            report = await self._reporter.render(uid)
        except (StateError, OSError) as error:
            if str(error) != self._report_trouble:
                log.error("the report is not renewed", why=str(error))
            self._report_trouble = str(error)
            return None
        self._report_trouble = ""
        return report

    def _jittered(self, pause: timedelta) -> timedelta:
        spread = self._settings.jitter
        return pause * random.uniform(1 - spread, 1 + spread)  # noqa: S311 (no secret)

    def _tell(self, error: Exception) -> None:
        """Once per kind of trouble, not once per attempt."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            do = advise(error, self._wanted.describe(self._client.access))
            log.warning("no heartbeat", why=str(error), do=do)
        self._trouble = trouble


def advise(error: Exception, named: str, platform: str = sys.platform) -> str:
    """What to do about it; `named` is how the command line names this MetalNode."""
    match error:
        case Unavailable() if platform == "darwin" and "No route to host" in str(error):
            return (
                "check the network; where the API server is on the local network, allow this "
                "program in System Settings > Privacy & Security > Local Network"
            )
        case Unavailable():
            return (
                "check the network, the server's URL in the kubeconfig, and proxies (HTTPS_PROXY, "
                "NO_PROXY)"
            )
        case Unauthorized():
            return (
                f"the token has expired or was revoked: run `llmkube metal token create {named}` "
                "where you administer the cluster, and put the new file in place of this one"
            )
        case NotFound():
            return (
                f"the MetalNode or its Lease is gone: run `llmkube metal token create {named}`, "
                "and put the new file in place of this one. If there is no such MetalNode at this "
                "server at all, compare the server's URL in the kubeconfig, too"
            )
        case Forbidden():
            return "the credential belongs to another MetalNode, or its Role was changed"
        case ConfigError():
            return "correct the kubeconfig; it is read again"
        case _:
            return "nothing: it is tried again"
