"""The life of the controller process: start, lead or follow, drain, stop.

Everything runs in one task group. Informers, events and servers run in leaders and followers alike;
reconcilers only while leading. A stop (SIGTERM, SIGINT) first ends leadership, which lets the
reconciles in hand finish and releases the Lease, and then the rest; a second signal ends the
process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from llmkube import __version__
from llmkube.api.names import CONTROLLER_ACCOUNT
from llmkube.clock import Clock, SystemClock
from llmkube.controller.options import ControllerName, Options
from llmkube.controller.parts import Controller, Parts
from llmkube.health import (
    Checks,
    LoopPulse,
    health_routes,
    metrics_routes,
    serving,
    serving_apart,
)
from llmkube.informers.informer import Informer
from llmkube.informers.memory import freeze_after_sync
from llmkube.informers.worker import run_workers
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError, Unauthorized
from llmkube.kube.events import EventRecorder
from llmkube.leader import LeaderElector
from llmkube.log import get_logger
from llmkube.metrics import Metrics
from llmkube.reconcilers.collectors import render_metrics
from llmkube.stopping import Stopped, unless_stopped

_log = get_logger(__name__)


def run(options: Options) -> None:
    """Run until a signal asks to stop. Raises ConfigError, OSError (an address in use)."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_until_signal(options, SystemClock()))


def _loop_factory() -> Any:
    """uvloop where it is installed: a fifth less CPU per watch event over TLS."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def run_until_signal(options: Options, clock: Clock) -> None:
    """Run in the present event loop until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_or_exit, stop)
    try:
        await run_until(stop, options, clock)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _stop_or_exit(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)  # asked twice: at once, without waiting for anything
    stop.set()


async def run_until(stop: asyncio.Event, options: Options, clock: Clock) -> None:
    """Run until `stop` is set. Raises ConfigError, OSError (an address in use)."""
    try:
        access = await unless_stopped(stop, load_access(options.kubeconfig, options.context))
    except Stopped:
        _log.info("stopped before it began")
        return
    metrics = Metrics()
    client = KubeClient(
        access,
        clock=clock,
        metrics=metrics,
        user_agent="controller",
        request_timeout=options.tuning.life.request_timeout,
    )
    async with client:
        await Process(options, clock, client, metrics).run(stop)


class Process:
    """The running controller: its parts and what keeps them going."""

    def __init__(
        self, options: Options, clock: Clock, client: KubeClient, metrics: Metrics
    ) -> None:
        self._options = options
        self._clock = clock
        self._client = client
        self._metrics = metrics
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self._recorder = EventRecorder(client, clock, CONTROLLER_ACCOUNT, self.identity)
        self._parts = Parts(options, client, self._recorder, metrics, clock)
        self._pulse = LoopPulse(clock, options.tuning.life.loop_stall_limit)

    async def run(self, stop: asyncio.Event) -> None:
        """Everything, until `stop` is set."""
        async with self._serving():
            self._greet()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(part, name=name) for name, part in self._background()
                ]
                leading = tasks.create_task(self._lead_or_follow(), name="leadership")
                await stop.wait()
                _log.info("stopping: letting the reconciles in hand finish")
                leading.cancel()
                await asyncio.wait({leading})
                for task in background:
                    task.cancel()
        _log.info("stopped")

    def _background(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """What runs in leaders and followers alike."""
        informers = self._parts.informers.values()
        filling = self._options.tuning.life.filling_limit
        return [
            *((f"informer-{one.resource.plural}", one.run()) for one in informers),
            ("pulse", self._pulse.beat()),
            ("events", self._recorder.run()),
            ("freeze", freeze_after_sync([one.wait_synced for one in informers], limit=filling)),
            ("whoami", self._check_identity()),
        ]

    # Leading ------------------------------------------------------------------------------------

    async def _lead_or_follow(self) -> None:
        if not self._options.leader_elect:
            await self._work()
            return
        elector = LeaderElector(
            self._client.ungated(),
            self._clock,
            namespace=self._options.leader_elect_namespace,
            name=self._options.leader_elect_name,
            identity=self.identity,
            settings=self._options.tuning.leader,
            metrics=self._metrics.leader(self._options.leader_elect_name),
        )
        self._client.write_gate = elector.check_can_write
        await elector.run(self._work)

    async def _work(self) -> None:
        """All controllers, each as soon as its own caches are there."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for controller in self._parts.controllers:
                    tasks.create_task(self._control(controller), name=controller.name)
        finally:
            await self._tell_the_rest()

    async def _tell_the_rest(self) -> None:
        """The last Events of this term, while the write gate may still be open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.tuning.life.last_events.total_seconds()):
                await self._recorder.flush()

    async def _control(self, controller: Controller) -> None:
        for informer in controller.informers:
            await informer.wait_synced()
        tuning = self._options.tuning
        controller.queue.resume()  # with the next line in one step: no change falls between
        controller.enqueue_all()
        _log.info("controller started", controller=controller.name)
        try:
            await run_workers(
                controller.queue,
                controller.reconcile,
                concurrency=tuning.queue.workers,
                log=_log,
                metrics=controller.metrics,
                drain=tuning.life.drain,
                run_limit=tuning.queue.run_limit,
            )
        finally:
            controller.queue.pause()

    # Being asked --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        options = self._options
        live, ready = self._checks()
        health = health_routes(live, ready)
        async with (
            serving(options.metrics_bind_address, metrics_routes(self._render)) as metrics_port,
            serving_apart(options.health_probe_bind_address, health) as health_port,
        ):
            _log.info("listening", metrics_port=metrics_port, health_port=health_port)
            yield

    def _checks(self) -> tuple[Checks, Checks]:
        live, ready = Checks(), Checks()
        live.add("event-loop", self._pulse.complaint)
        limit = self._options.tuning.life.no_attempt_limit
        for name, informer in self._parts.informers.items():
            live.add(f"reflector-{name}", partial(informer.view.complaint, limit))
            ready.add(f"cache-{name}", partial(_unready, informer))
        return live, ready

    def _render(self) -> tuple[bytes, str]:
        return render_metrics(self._metrics.registry, self._parts.collectors)

    # Starting -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        options = self._options
        _log.info(
            "llmkube controller",
            version=__version__,
            server=self._client.access.server,
            controllers=sorted(options.controllers),
            namespaces=sorted(options.namespaces) or "all",
            identity=self.identity,
        )
        if ControllerName.VERIFICATION in options.controllers and not options.deny_cidrs:
            _log.warning(
                "no --deny-cidr is given: a Mac could have the dial-back probe this cluster's own"
                " addresses; name the service and the pod range"
            )

    async def _check_identity(self) -> None:
        """An anonymous client looks like missing rights much later: say it at once."""
        try:
            identity = await self._client.whoami()
        except Unauthorized as error:
            _log.error("the API server does not know us", why=error.message)
        except ApiError as error:
            _log.warning("could not ask the API server who we are", why=error.message)
        else:
            _log.info("authenticated", username=identity.username)


def _unready(informer: Informer[Any]) -> str | None:
    """Why not ready yet. What an admin has to mend (a missing CRD, missing rights) is logged and
    counted, and holds back its own controllers only."""
    return None if informer.refused else informer.sync_error
