"""The whole road with what users run: token create, agent, controller, verifier, metal verify."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devcluster.kubelet import Kubelet
from llmkube.controller.options import ControllerName
from tests.support.agentprocess import NAME, llmkube, register_mac
from tests.support.fleet import Mac, scaled, verifying
from tests.support.ports import free_port
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

BOTH = frozenset({ControllerName.HEARTBEAT, ControllerName.VERIFICATION})
GENEROUS = timedelta(minutes=2)


async def test_the_whole_road(
    shipped: ControlPlane, kubelet: Kubelet, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    account = await wait_until_pods_are_allowed(shipped)
    registered = await register_mac(shipped, admin, namespace, tmp_path)
    mac = Mac(admin, namespace, NAME, await registered.uid())
    port = free_port()
    options = ("--host-ip", "127.0.0.9", "--host-ip", "127.0.0.1", "--ingress-bind", "127.0.0.1")
    where = ("-n", namespace, "--kubeconfig", shipped.admin_kubeconfig)
    async with verifying(
        account, controllers=BOTH, namespaces=(namespace,), checks=scaled(spacing=_seconds(2))
    ):
        await mac.becomes("Unknown", "AgentDisconnected", within=GENEROUS)
        async with registered.agent(*options, port=port) as agent:
            status = await mac.becomes("True", "Verified", within=GENEROUS)
            assert status["hostIP"] == "127.0.0.1", "the first that answers, in order"
            assert [c["address"] for c in status["candidates"]][:2] == ["127.0.0.9", "127.0.0.1"]
            assert status["candidates"][0]["result"] == "Refused"
            assert status["ingressPort"] == port
            first = status["ingressSPKI"]
            assert first == b64encode(agent.pin()).decode()
            await agent.stop()

        # The port is closed, and the last heartbeat is still fresh.
        await llmkube("metal", "verify", NAME, *where, check=False)
        status = await mac.becomes("False", "VerificationFailed", within=GENEROUS)
        assert "hostIP" not in status
        assert "Refused" in (await mac.reachable())["message"]

        shutil.rmtree(agent.state)
        async with registered.agent(*options, port=port) as agent:
            status = await mac.becomes("True", "Verified", within=GENEROUS)
            assert status["ingressSPKI"] == b64encode(agent.pin()).decode() != first
            events = await shipped.kubectl("get", "events", "-n", namespace, "-o", "json")
            reasons = [event["reason"] for event in json.loads(events.stdout)["items"]]
            assert "IngressKeyChanged" in reasons

            await mac.edit(hostIP="not-an-ip")
            status = await mac.becomes("False", "InvalidSpec", within=GENEROUS)
            assert "hostIP" not in status
            await mac.edit(hostIP=None)
            await mac.becomes("True", "Verified", within=GENEROUS)

            await llmkube("metal", "token", "revoke", NAME, *where)
            status = await mac.becomes("Unknown", "AgentDisconnected", within=GENEROUS)
            assert "hostIP" not in status
        await eventually(lambda: _no_pods(mac), "no pod is left")


async def _no_pods(mac: Mac) -> bool:
    return not await mac.pods()


def _seconds(number: int) -> timedelta:
    return timedelta(seconds=number)
