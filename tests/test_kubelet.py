"""The kubelet stand-in does to pods what a kubelet does, faults included."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from devcluster.kubelet import Fault, FaultKind, Kubelet, Node
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import PODS
from tests.conftest import unique_name
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster

WRITE_MESSAGE = (
    "import os; open(os.environ['LLMKUBE_TERMINATION_LOG'], 'w').write(os.environ['WORD'] * 3)"
)
SLEEP = "import time; time.sleep(600)"


async def test_a_pod_runs_and_its_message_comes_back(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    name = await _create(admin, namespace, WRITE_MESSAGE, env=[{"name": "WORD", "value": "ha"}])
    pod = await _ended(admin, namespace, name)
    assert pod["status"]["phase"] == "Succeeded"
    assert _terminated(pod) == {"exitCode": 0, "reason": "Completed", "message": "hahaha"}
    assert pod["spec"]["nodeName"] == "standin"


async def test_a_long_message_is_cut_where_a_kubelet_cuts_it(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    env = [{"name": "WORD", "value": "x" * 3000}]
    name = await _create(admin, namespace, WRITE_MESSAGE, env=env)
    assert len(_terminated(await _ended(admin, namespace, name))["message"]) == 4096


async def test_a_failing_command_fails_the_pod(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    name = await _create(admin, namespace, "raise SystemExit(3)")
    pod = await _ended(admin, namespace, name)
    assert pod["status"]["phase"] == "Failed"
    assert _terminated(pod)["exitCode"] == 3


async def test_a_command_that_does_not_exist_fails_only_its_own_pod(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    name = await _create(admin, namespace, "", command=["no-such-program"])
    assert _terminated(await _ended(admin, namespace, name))["reason"] == "StartError"
    other = await _create(admin, namespace, "")
    assert (await _ended(admin, namespace, other))["status"]["phase"] == "Succeeded"


async def test_a_refused_pod_stays_pending_and_says_why(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    async with Kubelet.start(control_plane.admin_kubeconfig, refuses=lambda _pod: "not here"):
        name = await _create(admin, namespace, "")

        async def shows() -> bool:
            return "not here" in str((await admin.get(PODS, name, namespace))["status"])

        await eventually(shows, "the refusal is in the status")


async def test_the_active_deadline_ends_a_pod(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    name = await _create(admin, namespace, SLEEP, activeDeadlineSeconds=1)
    pod = await _ended(admin, namespace, name)
    assert pod["status"]["reason"] == "DeadlineExceeded"


async def test_deletion_stops_the_process_and_removes_the_pod(
    admin: KubeClient, kubelet: Kubelet, namespace: str
) -> None:
    name = await _create(admin, namespace, SLEEP, terminationGracePeriodSeconds=1)
    await eventually(lambda: _phase_is(admin, namespace, name, "Running"), "the pod runs")
    await admin.delete(PODS, name, namespace)
    await eventually(lambda: _is_gone(admin, namespace, name), "the pod is gone")


@pytest.mark.parametrize(
    ("fault", "phase", "words"),
    [
        pytest.param(
            Fault(FaultKind.UNSCHEDULABLE), "Pending", "Unschedulable", id="unschedulable"
        ),
        pytest.param(
            Fault(FaultKind.IMAGE_PULL_BACK_OFF), "Pending", "ImagePullBackOff", id="unpullable"
        ),
        pytest.param(Fault(FaultKind.EVICTED), "Failed", "Evicted", id="evicted"),
        pytest.param(Fault(FaultKind.OOM_KILLED), "Failed", "OOMKilled", id="out of memory"),
        pytest.param(Fault(FaultKind.MESSAGE, "garble"), "Succeeded", "garble", id="a lie"),
    ],
)
async def test_faults(
    admin: KubeClient, kubelet: Kubelet, namespace: str, fault: Fault, phase: str, words: str
) -> None:
    kubelet.play(fault, namespace=namespace)
    name = await _create(admin, namespace, SLEEP)

    async def shows() -> bool:
        status = (await admin.get(PODS, name, namespace))["status"]
        return status["phase"] == phase and words in str(status)

    await eventually(shows, f"{phase} with {words}")


async def test_node_selectors_and_taints_are_honoured(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    taint = {"key": "edge", "value": "yes", "effect": "NoSchedule"}
    nodes = (
        Node("tainted", {"zone": "a"}, (taint,)),
        Node("plain", {"zone": "b"}),
    )
    async with Kubelet.start(control_plane.admin_kubeconfig, nodes=nodes):
        tolerated = await _create(
            admin,
            namespace,
            "",
            nodeSelector={"zone": "a"},
            tolerations=[{"key": "edge", "operator": "Exists"}],
        )
        refused = await _create(admin, namespace, "", nodeSelector={"zone": "a"})
        pod = await _ended(admin, namespace, tolerated)
        assert pod["spec"]["nodeName"] == "tainted"
        pending = await admin.get(PODS, refused, namespace)
        assert "nodeName" not in pending["spec"]


async def _create(admin: KubeClient, namespace: str, script: str, **spec: Any) -> str:
    name = unique_name("pod")
    container = {
        "name": "main",
        "image": "none",
        "command": spec.pop("command", ["python", "-c", script]),
        "env": spec.pop("env", []),
    }
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }
    await admin.create(PODS, body, namespace)
    return name


async def _ended(admin: KubeClient, namespace: str, name: str) -> dict[str, Any]:
    async def ended() -> dict[str, Any] | None:
        pod = await admin.get(PODS, name, namespace)
        return pod if pod["status"]["phase"] in ("Succeeded", "Failed") else None

    pod = await eventually(ended, "the pod has ended", within=timedelta(seconds=60))
    assert pod is not None
    return pod


def _terminated(pod: dict[str, Any]) -> dict[str, Any]:
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return {key: state[key] for key in ("exitCode", "reason", "message") if key in state}


async def _phase_is(admin: KubeClient, namespace: str, name: str, phase: str) -> bool:
    return bool((await admin.get(PODS, name, namespace))["status"]["phase"] == phase)


async def _is_gone(admin: KubeClient, namespace: str, name: str) -> bool:
    try:
        await admin.get(PODS, name, namespace)
    except NotFound:
        return True
    return False
