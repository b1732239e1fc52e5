"""A real Prometheus scrapes the running controller, and the shipped alerts fire on real faults."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from devcluster.process import Process
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from tests.support.agentprocess import NAME, register_mac
from tests.support.controller import running_controller
from tests.support.ports import free_port
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs prometheus (Debian: apt-get install prometheus)",
    ),
]

RULES = Path(__file__).resolve().parent.parent / "config" / "prometheus" / "rules.yaml"
# The Lease's 120 seconds pass in 3.6: the agent here beats every second.
TUNING = {"heartbeat": {"least_timeout": "1s", "second": "30ms"}}
Labels = dict[str, str]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    async def _get(self, path: str, **parameters: str) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._url}/{path}", params=parameters) as answer,
        ):
            document = await answer.json()
        assert document["status"] == "success", document
        return document["data"]

    async def query(self, expression: str) -> list[tuple[Labels, str]]:
        result = (await self._get("query", query=expression))["result"]
        return [(series["metric"], series["value"][1]) for series in result]

    async def firing(self) -> dict[str, Labels]:
        """Each firing alert's labels, by its name."""
        return {
            alert["labels"]["alertname"]: alert["labels"]
            for alert in (await self._get("alerts"))["alerts"]
            if alert["state"] == "firing"
        }

    async def has_fired(self, alert: str) -> Labels:
        async def fired() -> Labels | None:
            return (await self.firing()).get(alert)

        labels = await eventually(fired, f"{alert} fires")
        assert labels is not None
        return labels


def in_seconds(rules: str) -> str:
    """The shipped rules, with minutes of patience made seconds."""
    return re.sub(r"^( *for: )\d+m$", r"\g<1>2s", rules, flags=re.MULTILINE)


@asynccontextmanager
async def running_prometheus(folder: Path, target: int) -> AsyncIterator[Prometheus]:
    port = free_port()
    rules, config = folder / "rules.yaml", folder / "prometheus.yaml"
    rules.write_text(in_seconds(RULES.read_text()))
    scrape = {
        "job_name": "whatever",
        "honor_labels": True,
        "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
    }
    intervals = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config.write_text(
        json.dumps({"global": intervals, "rule_files": [str(rules)], "scrape_configs": [scrape]})
    )
    process = Process.start(
        "prometheus",
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        log=folder / "prometheus.log",
    )
    running = Prometheus(port)

    async def answers() -> bool:
        process.check_alive()
        try:
            await running.query("vector(1)")
        except aiohttp.ClientError:
            return False
        return True

    try:
        await eventually(answers, "Prometheus answers")
        yield running
    finally:
        await process.stop()


async def test_alerts_fire_on_a_killed_agent_and_on_a_killed_controller(
    shipped: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    account = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    mac = await register_mac(shipped, admin, namespace, tmp_path)
    port = free_port()
    async with (
        mac.agent() as agent,
        running_controller(
            account,
            f"--namespace={namespace}",
            "--controllers=heartbeat",
            "--leader-elect",
            f"--metrics-bind-address=127.0.0.1:{port}",
            tuning=TUNING,
        ) as controller,
        running_prometheus(tmp_path, port) as prometheus,
    ):

        async def connected() -> bool:
            series = await prometheus.query("llmkube_metalnode_connected")
            return [value for _, value in series] == ["1"]

        await eventually(connected, "Prometheus sees the Mac connected")
        ((labels, _),) = await prometheus.query("llmkube_metalnode_connected")
        assert (labels["namespace"], labels["name"]) == (namespace, NAME)
        assert await prometheus.query('leader_election_master_status{name="llmkube-controller"}')

        async def all_is_well() -> bool:
            return await prometheus.firing() == {}

        await eventually(all_is_well, "nothing fires while all is well")

        await agent.stop(signal.SIGKILL)
        labels = await prometheus.has_fired("LLMKubeMetalNodeOffline")
        assert (labels["namespace"], labels["name"]) == (namespace, NAME)
        assert "LLMKubeControllerDown" not in await prometheus.firing()

        async with mac.agent():

            async def quiet() -> bool:
                return "LLMKubeMetalNodeOffline" not in await prometheus.firing()

            await eventually(quiet, "the Mac is back, and the alert with it gone")

        controller.process.signal(signal.SIGKILL)
        await prometheus.has_fired("LLMKubeControllerDown")
