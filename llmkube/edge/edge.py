"""The edge's composition root: pusher, token renewal, health and metrics, in one task group.

An outage of the datacenter, of any length, is not a reason to stop or to be restarted: /healthz
fails only when the loop itself is stuck, /readyz says whether the datacenter hears from us.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from llmkube.clock import Clock
from llmkube.edge.credential import WorkingCopy
from llmkube.edge.local import LocalCluster
from llmkube.edge.metrics import EdgeMetrics
from llmkube.edge.pusher import Pusher, PushState
from llmkube.edge.settings import EdgeSettings
from llmkube.health import BindAddress, Checks, health_routes, metrics_routes, serving
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ConfigError
from llmkube.kube.renewal import TokenRenewer
from llmkube.log import get_logger
from llmkube.metrics import Metrics
from llmkube.stopping import Stopped, unless_stopped

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """What the flags say."""

    cluster_name: str
    datacenter_kubeconfig: Path
    kubeconfig: Path | None = None
    context: str | None = None
    state_dir: Path | None = None
    """Where the renewed credential lives, if not in `datacenter_kubeconfig` itself."""
    metrics_bind_address: BindAddress | None = None
    health_probe_bind_address: BindAddress | None = None
    settings: EdgeSettings = field(default_factory=EdgeSettings)


async def run_edge(options: EdgeOptions, clock: Clock) -> None:
    """Push until SIGTERM or SIGINT. Raises ConfigError if it cannot begin."""
    stop = asyncio.Event()
    with _signals(stop), suppress(Stopped):
        async with _open(options, clock, stop) as edge:
            await edge.run(stop)
    log.info("stopped", site=options.cluster_name)


@dataclass(slots=True)
class Edge:
    """The parts, ready to run."""

    pusher: Pusher
    renewer: TokenRenewer
    clock: Clock
    settings: EdgeSettings
    copy: WorkingCopy | None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until told to stop; a bug in a part ends all of it."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.pusher.run()),
                group.create_task(self.renewer.run()),
                group.create_task(self._look_around()),
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()

    async def _look_around(self) -> None:
        """Notice a rotated credential, and that the machine slept."""
        ahead = self._ahead()
        while True:
            await asyncio.sleep(self.settings.look_around.total_seconds())
            if self.copy is not None:
                await asyncio.to_thread(self._refresh, self.copy)
            if self._ahead() - ahead > self.settings.sleep_threshold:
                ahead = self._ahead()
                log.info("the machine slept")
                self.renewer.wake()

    def _ahead(self) -> timedelta:
        """How far the clock that runs through sleep is ahead of the one that does not."""
        return self.clock.boottime() - self.clock.monotonic()

    def _refresh(self, copy: WorkingCopy) -> None:
        try:
            copy.refresh()
        except ConfigError as error:
            log.warning("the credential cannot be read", why=str(error))


@asynccontextmanager
async def _open(options: EdgeOptions, clock: Clock, stop: asyncio.Event) -> AsyncIterator[Edge]:
    """Clients and endpoints. Raises ConfigError, and Stopped if that comes before they are open."""
    settings = options.settings
    copy = _working_copy(options)
    credential = options.datacenter_kubeconfig if copy is None else copy.path
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            KubeClient(
                await unless_stopped(stop, _datacenter(credential)),
                clock=clock,
                metrics=metrics,
                user_agent="edge",
                request_timeout=settings.push_timeout,
            )
        )
        local = await stack.enter_async_context(
            KubeClient(
                await unless_stopped(stop, _own_cluster(options)),
                clock=clock,
                metrics=metrics,
                user_agent="edge",
                request_timeout=settings.push_timeout,
            )
        )
        pusher = Pusher(
            hub, LocalCluster(local), options.cluster_name, clock, settings, EdgeMetrics(metrics)
        )
        await _serve(stack, options, pusher.state, clock, metrics)
        yield Edge(pusher, TokenRenewer(hub, clock, credential), clock, settings, copy)


async def _datacenter(credential: Path) -> Access:
    """Access with the credential that the datacenter issued. Raises ConfigError."""
    try:
        return await load_access(credential)
    except ConfigError as error:
        raise ConfigError(
            f"the datacenter: {error}; give the file that `llmkube fleet register` wrote as "
            "--datacenter-kubeconfig"
        ) from error


async def _own_cluster(options: EdgeOptions) -> Access:
    """Access to the cluster that is reported. Raises ConfigError."""
    try:
        return await load_access(options.kubeconfig, options.context)
    except ConfigError as error:
        raise ConfigError(
            f"this edge's own cluster: give --kubeconfig, besides --datacenter-kubeconfig ({error})"
        ) from error


def _working_copy(options: EdgeOptions) -> WorkingCopy | None:
    if options.state_dir is None:
        return None
    try:
        options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{options.state_dir}: {error.strerror}; choose another --state-dir"
        ) from (error)
    copy = WorkingCopy(options.datacenter_kubeconfig, options.state_dir)
    copy.refresh()
    return copy


async def _serve(
    stack: AsyncExitStack,
    options: EdgeOptions,
    state: PushState,
    clock: Clock,
    metrics: Metrics,
) -> None:
    live, ready = Checks(), Checks()
    live.add("push-loop", lambda: stuck(state, clock.monotonic(), options.settings))
    ready.add("datacenter", lambda: silent(state, clock.monotonic()))
    routes = metrics_routes(lambda: (generate_latest(metrics.registry), CONTENT_TYPE_LATEST))
    for address, served in (
        (options.metrics_bind_address, routes),
        (options.health_probe_bind_address, health_routes(live, ready)),
    ):
        try:
            await stack.enter_async_context(serving(address, served))
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror}") from error


def stuck(state: PushState, now: timedelta, settings: EdgeSettings) -> str | None:
    """Why the process should be restarted: the loop does not even try any more."""
    silence = now - state.last_attempt
    allowed = max(3 * min(state.interval, settings.look_again), settings.stuck)
    return f"no push was tried for {silence}" if silence > allowed else None


def silent(state: PushState, now: timedelta) -> str | None:
    """Why the datacenter may not call this site Connected."""
    if state.last_success is not None and now - state.last_success <= 3 * state.interval:
        return None
    return f"no push has arrived lately: {state.trouble or 'none was tried yet'}"


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
