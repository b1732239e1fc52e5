"""The controller as a process: it starts, is ready, reconciles, and stops as asked."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE, FieldManager
from llmkube.api.times import format_micro_time
from llmkube.controller.options import ControllerName
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import FEDERATEDCLUSTERS
from tests.conftest import unique_name
from tests.support.controller import running_controller
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster


async def test_with_the_shipped_rights_it_reconciles_and_stops_cleanly_on_sigterm(
    shipped: ControlPlane, admin: KubeClient
) -> None:
    site = await _site(admin)
    account = await shipped.service_account_kubeconfig(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    async with running_controller(account, "--leader-elect") as controller:
        await eventually(lambda: _phase(admin, site), "the phase is written")
        assert await controller.get("health", "/healthz") == (200, "ok")
        _, exposition = await controller.get("metrics", "/metrics")
        assert 'controller_runtime_reconcile_total{controller="federatedcluster"' in exposition
        controller.process.signal(signal.SIGTERM)
        assert await controller.process.wait() == 0
        assert controller.logged("stopped")
        assert controller.logged("reflector interrupted") == [], "it may read all that it wants"
        started = {one["controller"] for one in controller.logged("controller started")}
        assert started == set(ControllerName)


async def test_a_missing_crd_holds_back_only_its_own_controllers(admin: KubeClient) -> None:
    async with ControlPlane.start() as cluster:
        crd = "config/crd/bases/federation.llmkube.dev_federatedclusters.yaml"
        await cluster.kubectl("apply", "--server-side", "-f", crd)
        async with running_controller(cluster.admin_kubeconfig) as controller:
            await eventually(
                lambda: (
                    [one["controller"] for one in controller.logged("controller started")]
                    == ["federatedcluster"]
                ),
                "the controller of the kind that exists has started",
            )
            interrupted = controller.logged("reflector interrupted")
            assert {one["resource"] for one in interrupted} == {"metalnodes"}
            assert (await controller.get("health", "/healthz"))[0] == 200


async def test_a_bad_flag_says_what_to_write(crds: ControlPlane) -> None:
    with pytest.raises(Exception, match=r"write it like 10\.96\.0\.0/16"):
        async with running_controller(crds.admin_kubeconfig, "--deny-cidr=10.0.0.300/8"):
            pass


async def _site(admin: KubeClient) -> str:
    name = unique_name("site")
    base: dict[str, Any] = {
        "apiVersion": FEDERATEDCLUSTERS.api_version,
        "kind": FEDERATEDCLUSTERS.kind,
        "metadata": {"name": name},
    }
    await admin.apply(FEDERATEDCLUSTERS, {**base, "spec": {}}, field_manager="test")
    stamp = format_micro_time(datetime.now(UTC) - timedelta(seconds=1))
    await admin.apply(
        FEDERATEDCLUSTERS,
        {**base, "status": {"lastHeartbeatTime": stamp}},
        field_manager=FieldManager.EDGE,
        subresource="status",
    )
    return name


async def _phase(admin: KubeClient, name: str) -> str | None:
    found = await admin.get(FEDERATEDCLUSTERS, name)
    phase = found.get("status", {}).get("phase")
    return str(phase) if phase else None
