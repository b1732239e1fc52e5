"""The agent's composition root: its parts, started and stopped in one task group.

The parts do not depend on each other's health. The ingress serves while the API server is away,
beats go on while the port is taken, and whatever fails is started again in place. Next:
`llmkube.agent.heartbeat` and `llmkube.agent.ingress`, the two that matter.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import llmkube
from llmkube.agent.discovery import CandidateFinder
from llmkube.agent.gate import make_gate
from llmkube.agent.heartbeat import Heartbeat
from llmkube.agent.httprules import Upstream
from llmkube.agent.identity import Identity, open_identity
from llmkube.agent.ingress import Ingress
from llmkube.agent.metrics import AgentMetrics
from llmkube.agent.relay import Relay
from llmkube.agent.reporter import Reporter
from llmkube.agent.settings import AgentSettings
from llmkube.agent.sleep import SleepWatch
from llmkube.agent.statedir import StateDir, StateError
from llmkube.agent.target import Wanted
from llmkube.clock import Clock
from llmkube.health import BindAddress, serving
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ApiError, ConfigError
from llmkube.kube.filesignature import file_signature
from llmkube.kube.renewal import TokenRenewer
from llmkube.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What the flags say."""

    kubeconfig: Path
    state_dir: Path
    upstream: Upstream
    ingress_port: int = 9443
    ingress_bind: tuple[IPv4Address | IPv6Address, ...] = ()
    host_ips: tuple[IPv4Address | IPv6Address, ...] = ()
    relay_token_file: Path | None = None
    insecure_no_auth: bool = False
    metrics_bind: BindAddress | None = None
    wanted: Wanted = field(default_factory=Wanted)
    settings: AgentSettings = field(default_factory=AgentSettings)


class Agent:
    """One machine's agent. Construction raises StateError; `state` must stay open."""

    def __init__(self, options: AgentOptions, state: StateDir, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._identity: Identity = open_identity(state)
        gate = make_gate(options.relay_token_file, insecure=options.insecure_no_auth)
        settings = options.settings
        self._metrics = AgentMetrics(clock)
        relay = Relay(options.upstream, gate, settings.ingress, clock)
        relay.on_answered = self._metrics.answered
        self._ingress = Ingress(options.ingress_port, options.ingress_bind, relay, settings.ingress)
        self._metrics.watch_connections(lambda: self._ingress.connections)
        self._reporter = Reporter(
            state,
            self._identity,
            self._ingress,
            options.ingress_port,
            CandidateFinder(options.host_ips, options.ingress_bind),
            clock,
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End cleanly: running requests get a while, new ones find the port closed."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until `stop`. Raises ConfigError or StateError if it cannot even begin."""
        access = await load_access(self._options.kubeconfig)
        target = self._options.wanted.target(access)
        self._reporter.serve_last()
        log.info("agent starts", version=llmkube.__version__, metalnode=str(target))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._keep("ingress", self._ingress.run))
            others = [
                group.create_task(self._keep("heartbeat", lambda: self._stay_connected(access))),
                group.create_task(self._keep("hardware", self._reporter.run)),
                group.create_task(self._keep("metrics", self._serve_metrics)),
            ]
            await self._stopping.wait()
            log.info("agent stops")
            for task in others:
                task.cancel()
            self._ingress.drain()
            await self._grace(serving)
        log.info("agent stopped")

    async def _grace(self, serving: asyncio.Task[None]) -> None:
        bound = self._options.settings.ingress.drain_timeout + timedelta(seconds=2)
        await asyncio.wait([serving], timeout=bound.total_seconds())
        serving.cancel()

    async def _serve_metrics(self) -> None:
        if self._options.metrics_bind is not None:
            async with serving(self._options.metrics_bind, self._metrics.routes()):
                await self._stopping.wait()

    async def _stay_connected(self, access: Access) -> None:
        """One client from one sleep to the next: after it, old connections may be dead ends."""
        heartbeat = self._options.settings.heartbeat
        with suppress(TimeoutError):  # a report without hardware would take it from the status
            async with asyncio.timeout(self._options.settings.hardware_patience.total_seconds()):
                await self._reporter.looked.wait()
        while True:
            async with KubeClient(
                access,
                clock=self._clock,
                user_agent="agent",
                request_timeout=heartbeat.attempt_timeout,
            ) as client:
                await self._until_wake(client)
                access = client.access

    async def _until_wake(self, client: KubeClient) -> None:
        """Beat at once and renew the token at once, then in their rhythm, until it slept."""
        beats = Heartbeat(
            client,
            self._clock,
            self._options.settings.heartbeat,
            self._options.wanted,
            self._identity.holder,
            self._reporter,
            self._metrics.beat,
        )
        renewer = TokenRenewer(client, self._clock, self._options.kubeconfig)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(beats.run()), group.create_task(renewer.run())]
            await self._watch(beats)
            for task in tasks:
                task.cancel()

    async def _watch(self, beats: Heartbeat) -> None:
        """Return when the machine has slept; meanwhile, let a replaced credential count at once
        where the old one fails (the client itself sees to it within a minute)."""
        settings = self._options.settings.heartbeat
        watch = SleepWatch(settings.sleep_threshold)
        watch.look(self._clock)
        credential = file_signature(self._options.kubeconfig)
        while True:
            await asyncio.sleep(settings.tick.total_seconds())
            if slept := watch.look(self._clock):
                log.info("the machine slept", length=str(slept))
                return
            if (latest := file_signature(self._options.kubeconfig)) != credential:
                credential = latest
                if beats.failing:
                    beats.nudge()

    async def _keep(self, part: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a part, again whenever it fails; what fails costs this part only."""
        while True:
            try:
                return await run()
            except Exception as error:
                _tell(part, error)
            await asyncio.sleep(self._options.settings.part_retry.total_seconds())


def _tell(part: str, error: Exception) -> None:
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError | ApiError | ConfigError | StateError):
        log.error("a part of the agent failed and is started again", part=part, why=str(cause))
    else:
        log.error("a part of the agent failed and is started again", part=part, exc_info=cause)


def require_kubeconfig(options: AgentOptions) -> None:
    """Raises ConfigError if the credential is not there."""
    if not options.kubeconfig.expanduser().exists():
        raise ConfigError(
            f"there is no kubeconfig at {options.kubeconfig}: give --kubeconfig FILE, or copy the "
            "file that `llmkube metal token create` wrote to that place"
        )


async def run_agent(options: AgentOptions, clock: Clock) -> None:
    """Run the agent until SIGTERM or SIGINT; a second one does not wait for running requests.

    Raises ConfigError or StateError if it cannot begin.
    """
    require_kubeconfig(options)  # before a key is made for nothing
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    with StateDir.open(options.state_dir) as state:
        agent = Agent(options, state, clock)
        signalled = False

        def on_signal() -> None:
            nonlocal signalled
            if signalled and task is not None:
                task.cancel()
            signalled = True
            agent.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            await agent.run()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
