"""/healthz and /readyz of the controller as a process: refusals, outages, a loop that is stuck."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from tests.support.controller import ControllerProcess, running_controller
from tests.support.faultproxy import LISTS, Drop, FaultProxy
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

HASTY = {"backoff_base": "100ms", "backoff_cap": "500ms", "longest_wait": "1s"}
RESOURCES = ("metalnodes", "leases", "serviceaccounts", "pods", "federatedclusters")
STUCK_ON_SIGUSR1 = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
from llmkube.cli.main import main
main()
"""


@pytest.fixture
async def proxy(shipped: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(shipped) as running:
        yield running


async def through(proxy: FaultProxy, cluster: ControlPlane, namespace: str, account: str) -> Path:
    return await cluster.service_account_kubeconfig(
        namespace, account, server=proxy.server, ca_pem=proxy.ca_pem
    )


async def both(controller: ControllerProcess) -> tuple[int, int]:
    live, _ = await controller.get("health", "/healthz")
    ready, _ = await controller.get("health", "/readyz")
    return live, ready


async def test_missing_rights_hold_back_controllers_but_neither_probe_not_even_in_an_outage(
    shipped: ControlPlane, proxy: FaultProxy, namespace: str
) -> None:
    nobody = await through(proxy, shipped, namespace, "default")
    async with running_controller(nobody, tuning={"reflector": HASTY}) as controller:
        assert await both(controller) == (200, 200)
        refused = {one["resource"] for one in controller.logged("reflector interrupted")}
        assert refused == set(RESOURCES)
        proxy.forget()
        with proxy.playing(Drop()):
            proxy.cut_connections()
            for resource in RESOURCES:
                await eventually(
                    lambda resource=resource: proxy.count(f"{LISTS}.*/{resource}") >= 3,
                    f"{resource} are tried in vain",
                )
            assert await both(controller) == (200, 200)
        assert controller.logged("controller started") == []


async def test_an_outage_fails_neither_probe_however_long(
    shipped: ControlPlane, proxy: FaultProxy
) -> None:
    account = await through(proxy, shipped, SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    limit = timedelta(seconds=4)
    tuning = {"reflector": HASTY, "life": {"no_attempt_limit": f"{limit.seconds}s"}}
    async with running_controller(account, "--leader-elect", tuning=tuning) as controller:
        proxy.forget()
        with proxy.playing(Drop()):
            proxy.cut_connections()

            async def outlasted() -> bool:
                assert await both(controller) == (200, 200)
                times = [request.at for request in proxy.requests]
                return len(times) > 1 and times[-1] - times[0] > 2 * limit.total_seconds()

            await eventually(outlasted, "the outage is longer than a reflector may rest")
        controller.process.check_alive()
        assert await both(controller) == (200, 200)


async def test_a_stuck_event_loop_fails_healthz(shipped: ControlPlane) -> None:
    async with running_controller(
        shipped.admin_kubeconfig,
        tuning={"life": {"loop_stall_limit": "1s"}},
        argv=(sys.executable, "-c", STUCK_ON_SIGUSR1, "controller"),
    ) as controller:
        assert await controller.get("health", "/healthz") == (200, "ok")
        controller.process.signal(signal.SIGUSR1)

        async def told() -> bool:
            status, text = await controller.get("health", "/healthz")
            return status == 500 and "[-]event-loop failed" in text

        await eventually(told, "/healthz fails, and says why")
        await controller.process.kill()
