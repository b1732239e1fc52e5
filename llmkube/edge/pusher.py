"""The push: one server-side apply of everything the edge knows, at once and then on time.

Each push carries the edge's complete set of status fields and a stamp with microseconds, so that
two pushes never look alike. It carries no resourceVersion, on purpose: it is no conclusion from
the datacenter's state but a fact about this site, right for whatever object has its name, and the
datacenter's own write of `phase` must not make it fail. (The credential belongs to one object by
UID; a namesake without a registration of its own refuses it.)

No failure ends the loop; each is told once, with what to do, and tried again soon, for as long as
it takes. Neighbours: `parts` (what is reported) and `edge` (who starts this).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import llmkube
from llmkube.api.names import FieldManager
from llmkube.api.times import format_micro_time
from llmkube.clock import ZERO, Clock
from llmkube.edge.local import LocalCluster, Readings
from llmkube.edge.parts import (
    Capacity,
    Failed,
    Fresh,
    Inference,
    Omitted,
    Reading,
    read_capacity,
    read_inference,
    settle,
)
from llmkube.edge.settings import EdgeSettings
from llmkube.kube.errors import (
    ApiError,
    ConfigError,
    Forbidden,
    Invalid,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from llmkube.kube.resources import FEDERATEDCLUSTERS
from llmkube.log import get_logger

if TYPE_CHECKING:
    from datetime import datetime

    from llmkube.edge.metrics import EdgeMetrics
    from llmkube.kube.client import KubeClient

OBSERVED_VERSION = f"v{llmkube.__version__}"
OUR_FIELDS = ("lastHeartbeatTime", "observedVersion", "capacity", "inference")
_MAX_DOUBLINGS = 10

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """What a push says, but for its stamp. None: that part is left out."""

    capacity: Capacity | None = None
    inference: Inference | None = None


def build_status(report: Report, now: datetime) -> dict[str, Any]:
    """The edge's complete set of fields. Never `phase`: that is the datacenter's."""
    parts = {
        "capacity": report.capacity and report.capacity.as_status(),
        "inference": report.inference and report.inference.as_status(),
    }
    return {
        "lastHeartbeatTime": format_micro_time(now),
        "observedVersion": OBSERVED_VERSION,
    } | {name: part for name, part in parts.items() if part is not None}


def left_behind(sent: Mapping[str, Any], answered: Mapping[str, Any]) -> list[str]:
    """Fields of ours that we left out and that are still there: another manager, kubectl for
    example, wrote them last."""
    return [name for name in OUR_FIELDS if name in answered and name not in sent]


def read_interval(site: Mapping[str, Any], settings: EdgeSettings) -> timedelta:
    """`spec.heartbeatIntervalSeconds`, or the default where it is unset or makes no sense."""
    seconds = (site.get("spec") or {}).get("heartbeatIntervalSeconds")
    if isinstance(seconds, int) and 0 < seconds <= 2**31:
        return timedelta(seconds=seconds)
    return settings.default_interval


def retry_pause(
    failures: int, error: Exception, interval: timedelta, settings: EdgeSettings
) -> timedelta:
    """How long to wait after so many failures in a row, before jitter."""
    doubled = settings.first_retry * (1 << min(failures - 1, _MAX_DOUBLINGS))
    asked = error.retry_after if isinstance(error, TooManyRequests) else None
    return min(max(doubled, asked or ZERO), settings.retry_cap, interval)


@dataclass(slots=True)
class PushState:
    """What /healthz, /readyz and the metrics read. Instants are monotonic readings."""

    interval: timedelta
    last_attempt: timedelta
    last_success: timedelta | None = None
    trouble: str = ""
    """Why the last push failed, and what to do; "" if it did not."""


@dataclass(slots=True)
class Pusher:
    """Pushes for one site, until cancelled."""

    hub: KubeClient
    local: LocalCluster
    site: str
    clock: Clock
    settings: EdgeSettings
    metrics: EdgeMetrics
    state: PushState = field(init=False)
    _last_good: Report = field(default_factory=Report)
    _seeded: bool = False
    _failures: int = 0
    _sources: dict[str, Reading[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now = self.clock.monotonic()
        self.state = PushState(self.settings.default_interval, last_attempt=now)

    async def run(self) -> None:
        """Push at once, and then on time."""
        while True:
            started = self.clock.monotonic()
            pause = await self.attempt()
            if self._failures:  # the datacenter is given what it asked for, or more
                await self._rest(self.clock.monotonic(), pause * (1 + self._share()))
            else:
                await self._rest(started, self._in_time(pause))

    async def attempt(self) -> timedelta:
        """Push once; returns when to do so again, before jitter: counted from the beginning of
        this push, or from its end if it failed."""
        self.state.last_attempt = self.clock.monotonic()
        try:
            await self._seed()
            await self._push(await self._collect())
        except (ApiError, ConfigError) as error:
            return self._failed(error)
        self._succeeded()
        return self.state.interval

    # The report --------------------------------------------------------------------------------

    async def _seed(self) -> None:
        """After a start, the last good values are those that the datacenter has."""
        if self._seeded:
            return
        try:
            found = await self.hub.get(FEDERATEDCLUSTERS, self.site)
        except (Forbidden, NotFound):
            found = {}  # the push itself will say it better
        status = found.get("status") or {}
        self._last_good = Report(read_capacity(status), read_inference(status))
        self._seeded = True

    async def _collect(self) -> Report:
        """What to report now; also the last good values of the next time."""
        within = min(self.settings.collect_timeout, self.state.interval / 2)
        readings = await self.local.read(within)
        self._tell_sources(readings)
        self._last_good = Report(
            settle(readings.capacity, self._last_good.capacity),
            settle(readings.inference, self._last_good.inference),
        )
        return self._last_good

    async def _push(self, report: Report) -> None:
        """Apply the status. Raises ApiError."""
        started = self.clock.now()
        status = build_status(report, started.wall)
        body = {
            "apiVersion": FEDERATEDCLUSTERS.api_version,
            "kind": FEDERATEDCLUSTERS.kind,
            "metadata": {"name": self.site},
            "status": status,
        }
        answer = await self.hub.apply(
            FEDERATEDCLUSTERS, body, field_manager=FieldManager.EDGE, subresource="status"
        )
        self.state.interval = read_interval(answer, self.settings)
        self.metrics.pushed(started.wall, self.clock.monotonic() - started.mono)
        if leftover := left_behind(status, answer.get("status") or {}):
            await self._remove(leftover)

    async def _remove(self, names: list[str]) -> None:
        await self.hub.merge_patch(
            FEDERATEDCLUSTERS,
            self.site,
            None,
            {"status": dict.fromkeys(names)},
            field_manager=FieldManager.EDGE,
            subresource="status",
        )

    # The rhythm --------------------------------------------------------------------------------

    async def _rest(self, since: timedelta, pause: timedelta) -> None:
        """Wait until `pause` after `since`; a long one is cut into looks at the object, whose
        interval may be shorter by now."""
        while (left := since + pause - self.clock.monotonic()) > ZERO:
            look = self.settings.look_again
            await asyncio.sleep(min(left, look).total_seconds())
            if left > look and await self._interval_is_shorter():
                pause = self._in_time(self.state.interval)

    async def _interval_is_shorter(self) -> bool:
        before = self.state.interval
        self.state.last_attempt = self.clock.monotonic()
        try:
            found = await self.hub.get(FEDERATEDCLUSTERS, self.site)
        except (ApiError, ConfigError):
            return False  # the next push will tell
        self.state.interval = read_interval(found, self.settings)
        return self.state.interval < before

    def _in_time(self, pause: timedelta) -> timedelta:
        return pause * (1 - self._share())

    def _share(self) -> float:
        return random.uniform(0, self.settings.jitter)  # noqa: S311 (no secret)

    # Telling -----------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> timedelta:
        self._failures += 1
        self.metrics.failed(error)
        trouble = f"{error}; {advice(error, self.site)}"
        if trouble != self.state.trouble:  # once per kind of trouble, not once per attempt
            log.warning("no push", site=self.site, why=str(error), do=advice(error, self.site))
        self.state.trouble = trouble
        return retry_pause(self._failures, error, self.state.interval, self.settings)

    def _succeeded(self) -> None:
        if self._failures:
            log.info("pushing again", site=self.site, after_failures=self._failures)
        elif self.state.last_success is None:
            log.info("pushing", site=self.site, interval=str(self.state.interval))
        self._failures, self.state.trouble = 0, ""
        self.state.last_success = self.clock.monotonic()

    def _tell_sources(self, readings: Readings) -> None:
        """Say once what cannot be read and what to do, and that it can be read again."""
        for source, reading in readings.sources.items():
            self.metrics.source(source, up=isinstance(reading, Fresh))
            before, self._sources[source] = self._sources.get(source), reading
            if before is not None and _alike(before, reading):
                continue
            match reading:
                case Fresh():
                    log.info("a source is read", source=source)
                case Omitted(why, forbidden=True):
                    log.warning("a source is left out", source=source, why=why, do=_ALLOW)
                case Omitted(why):
                    log.info("a source is left out", source=source, why=why)
                case Failed(why):
                    log.warning("a source repeats its last good value", source=source, why=why)


_ALLOW = "allow the edge to list it: config/edge/rbac.yaml"


def _alike(one: Reading[Any], other: Reading[Any]) -> bool:
    """True if there is nothing new to tell."""
    return type(one) is type(other) and (isinstance(one, Fresh) or one == other)


def advice(error: Exception, site: str) -> str:
    """What the admin should do about a failed push."""
    match error:
        case Unavailable():
            return (
                "check the network, the server's URL in the datacenter's kubeconfig, and proxies "
                "(HTTPS_PROXY, NO_PROXY); it is tried again"
            )
        case Unauthorized():
            return (
                f"the token has expired or was revoked: run `llmkube fleet rotate {site}` in the "
                "datacenter, and put the new file in place of this one"
            )
        case NotFound():
            return f"run `llmkube fleet register {site}` in the datacenter"
        case Forbidden():
            return (
                "the credential is another site's, or its rights were changed: run `llmkube "
                f"fleet register {site}` in the datacenter"
            )
        case Invalid():
            return "update llmkube here or its CRDs in the datacenter: they do not fit"
        case ConfigError():
            return "correct the kubeconfig; it is read again"
        case _:
            return "nothing: it is tried again"
