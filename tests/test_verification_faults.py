"""What a verifier pod can suffer on the real API server: told truly, never held against a Mac."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from devcluster.kubelet import Ended, Fault, FaultKind, Kubelet, Runner
from llmkube.api.names import METALNODE_UID_LABEL
from llmkube.controller.options import DEFAULT_VERIFIER_IMAGE
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import PODS, Resource
from llmkube.verifier.protocol import (
    AddressResult,
    CheckReport,
    CheckRequest,
    Outcome,
    encode_report,
)
from tests.support.fleet import (
    FAST,
    Fleet,
    all_reachable,
    answering,
    messages,
    reporting,
    scaled,
    verifying,
)
from tests.support.ports import free_port
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

ADDRESS = "127.0.0.1"
RESOURCE_QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
WEBHOOKS = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
)
SOON = scaled(
    timeout=timedelta(seconds=4),
    connect_timeout=timedelta(seconds=1),
    handshake_timeout=timedelta(seconds=1),
)
"""What can give no answer is tried again soon."""


@pytest.fixture
async def controller(shipped: ControlPlane) -> Path:
    return await wait_until_pods_are_allowed(shipped)


@pytest.fixture
def fleet(admin: KubeClient, namespace: str) -> Fleet:
    return Fleet(admin, namespace)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            Fault(FaultKind.UNSCHEDULABLE, "0/3 nodes are available: 3 Insufficient memory."),
            "3 Insufficient memory",
            id="unschedulable",
        ),
        pytest.param(
            Fault(FaultKind.IMAGE_PULL_BACK_OFF), "Back-off pulling image", id="unpullable"
        ),
        pytest.param(Fault(FaultKind.EVICTED), "The node was low on memory", id="evicted"),
        pytest.param(Fault(FaultKind.OOM_KILLED), "OOMKilled", id="out of memory"),
        pytest.param(Fault(FaultKind.SILENCE), "none came within 6 s", id="silence"),
        pytest.param(Fault(FaultKind.MESSAGE, "Segmentation fault"), "believed", id="garbled"),
        pytest.param(Fault(FaultKind.MESSAGE, "x" * 4096), "believed", id="oversized"),
        pytest.param(Fault(FaultKind.MESSAGE, ""), "is empty", id="nothing said"),
    ],
)
async def test_a_fault_of_the_pod_says_nothing_about_the_mac(
    controller: Path, shipped: ControlPlane, fleet: Fleet, fault: Fault, words: str
) -> None:
    """First to a Mac that was never verified, then to a verified one; the backoff grows."""
    checks = replace(SOON, timeout=timedelta(seconds=6))
    new = await fleet.add("new", report=reporting(ADDRESS))
    known = await fleet.add("known", report=reporting(ADDRESS))
    runner = answering(all_reachable)
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=runner) as kubelet,
        verifying(controller, checks=checks),
    ):
        kubelet.play(fault, namespace=fleet.namespace, owner="new")
        status = await new.becomes("Unknown", "VerifierFailed")
        condition = next(c for c in status["conditions"] if c["type"] == "Reachable")
        assert words in condition["message"]
        assert "says nothing about the Mac" in condition["message"]
        assert [c["result"] for c in status["candidates"]] == ["Pending"]
        assert status["verification"]["consecutiveFailures"] >= 1
        assert "lastCheckTime" not in status["verification"]

        before = await known.becomes("True", "Verified")
        kubelet.play(fault, namespace=fleet.namespace, owner="known")
        await known.ask()
        await eventually(lambda: _told(known, words), f"the fault is told with {words!r}")
        after = await known.status()
        assert (await known.reachable())["status"] == "True"
        assert after["candidates"] == before["candidates"]
        assert after["hostIP"] == before["hostIP"]
        for untouched in ("lastCheckTime", "inputHash"):
            assert after["verification"][untouched] == before["verification"][untouched]

        async def failed_twice() -> bool:
            return (await new.verification()).get("consecutiveFailures", 0) >= 2

        await eventually(failed_twice, "it is tried again")
        await new.edit(hostIP="nonsense")  # the end of the tries
        await new.becomes("False", "InvalidSpec")
        await new.without_pods()


async def _told(mac: Any, words: str) -> bool:
    return words in (await mac.reachable()).get("message", "")


async def test_a_quota_refuses_the_pod_in_the_api_servers_words(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    await admin.create(RESOURCE_QUOTAS, quota, fleet.namespace)

    async def counted() -> bool:
        found = await admin.get(RESOURCE_QUOTAS, "none", fleet.namespace)
        return "pods" in found.get("status", {}).get("hard", {})

    await eventually(counted, "the quota is in force")
    mac = await fleet.add("studio", report=reporting(ADDRESS))
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        verifying(controller, checks=SOON),
    ):
        await mac.becomes("Unknown", "VerifierFailed")
        assert "exceeded quota: none" in (await mac.reachable())["message"]
        book = await mac.verification()
        assert book["consecutiveFailures"] == 1
        assert "podUID" not in book
        await admin.delete(RESOURCE_QUOTAS, "none", fleet.namespace)
        await mac.becomes("True", "Verified")


async def test_a_webhook_that_is_down_refuses_the_pod_in_the_api_servers_words(
    controller: Path,
    shipped: ControlPlane,
    fleet: Fleet,
    admin: KubeClient,
    unique: Callable[[str], str],
) -> None:
    """With failurePolicy Fail the API server answers 500, and nothing else would say why."""
    name = unique("webhook")
    webhook = {
        "apiVersion": WEBHOOKS.api_version,
        "kind": WEBHOOKS.kind,
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "away.llmkube.example",
                "clientConfig": {"url": f"https://127.0.0.1:{free_port()}/"},
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                    }
                ],
                "namespaceSelector": {
                    "matchLabels": {"kubernetes.io/metadata.name": fleet.namespace}
                },
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 1,
            }
        ],
    }
    await admin.create(WEBHOOKS, webhook)
    try:
        mac = await fleet.add("studio", report=reporting(ADDRESS))
        async with (
            Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
            verifying(controller, checks=SOON),
        ):
            await mac.becomes("Unknown", "VerifierFailed")
            assert "away.llmkube.example" in (await mac.reachable())["message"]
            assert (await mac.verification())["consecutiveFailures"] >= 1
            await admin.delete(WEBHOOKS, name)
            await mac.becomes("True", "Verified")
    finally:
        with suppress(NotFound):
            await admin.delete(WEBHOOKS, name)


async def test_admission_refuses_the_pod_in_the_policys_words(
    controller: Path, shipped: ControlPlane, fleet: Fleet
) -> None:
    mac = await fleet.add("studio", report=reporting(ADDRESS))
    async with verifying(controller, verifier_image="registry.example/another:v1"):
        await mac.becomes("Unknown", "VerifierFailed")
        message = (await mac.reachable())["message"]
        assert DEFAULT_VERIFIER_IMAGE in message
        assert "--verifier-image" in message
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        verifying(controller),
    ):
        await mac.becomes("True", "Verified")


def honest(request: CheckRequest) -> dict[str, Any]:
    results = tuple(AddressResult(a, Outcome.REACHABLE) for a in request.addresses)
    return dict(json.loads(encode_report(CheckReport(request.input_hash, results))))


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda r: {**honest(r), "inputHash": "0" * 64}, id="another hash"),
        pytest.param(
            lambda r: honest(replace(r, addresses=("192.0.2.1", *r.addresses))),
            id="an address nobody asked about",
        ),
        pytest.param(lambda r: honest(replace(r, addresses=())), id="no address"),
        pytest.param(
            lambda r: {
                **honest(r),
                "results": [{"address": ADDRESS, "result": "Pending", "detail": ""}],
            },
            id="an outcome that only the controller gives",
        ),
        pytest.param(lambda r: {**honest(r), "podUID": "x"}, id="an unknown field"),
        pytest.param(lambda r: json.dumps(honest(r)) * 2, id="two reports"),
    ],
)
async def test_a_lying_termination_message_is_never_believed(
    controller: Path,
    shipped: ControlPlane,
    fleet: Fleet,
    lie: Callable[[CheckRequest], Any],
) -> None:
    mac = await fleet.add("studio", report=reporting(ADDRESS))
    runner: Runner = messages(lie)
    async with Kubelet.start(shipped.admin_kubeconfig, runner=runner), verifying(controller):
        status = await mac.becomes("Unknown", "VerifierFailed")
        assert [c["result"] for c in status["candidates"]] == ["Pending"]
        assert "hostIP" not in status


async def test_a_forged_pod_is_deleted_unread(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    """It has the labels, the owner and even the question of the true pod, and a fine answer."""
    mac = await fleet.add("studio", report=reporting(ADDRESS))
    async with Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)) as kubelet:
        end = kubelet.play(Fault(FaultKind.SILENCE), namespace=fleet.namespace)
        async with verifying(controller, checks=FAST):
            await eventually(lambda: _named(mac), "a check runs")
            true = next(iter(await mac.pods()))
            end()
            # More than one run sweeps away.
            for n, owners in enumerate((true["metadata"]["ownerReferences"], []) * 13):
                forged = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"forged-{n}",
                        "labels": true["metadata"]["labels"],
                        "annotations": true["metadata"]["annotations"],
                        "ownerReferences": owners,
                    },
                    "spec": {
                        key: true["spec"][key]
                        for key in ("containers", "restartPolicy", "activeDeadlineSeconds")
                    },
                }
                forged["spec"]["automountServiceAccountToken"] = False
                await admin.create(PODS, forged, fleet.namespace)
            assert true["metadata"]["labels"][METALNODE_UID_LABEL] == mac.uid

            async def only_the_true_one() -> bool:
                return [p["metadata"]["uid"] for p in await fleet.verifier_pods()] == [
                    true["metadata"]["uid"]
                ]

            await eventually(only_the_true_one, "the forged pods are gone")
            status = await mac.status()
            assert status["verification"]["podUID"] == true["metadata"]["uid"]
            assert [c["result"] for c in status["candidates"]] == ["Pending"]


async def _named(mac: Any) -> bool:
    return "podUID" in await mac.verification()


async def test_foreign_pods_with_our_label_use_up_no_slot(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    for n in range(3):
        foreign = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"foreign-{n}",
                "labels": {
                    "app.kubernetes.io/managed-by": "llmkube",
                    "app.kubernetes.io/component": "verifier",
                },
            },
            "spec": {"containers": [{"name": "c", "image": "x"}]},
        }
        await admin.create(PODS, foreign, fleet.namespace)
    mac = await fleet.add("studio", report=reporting(ADDRESS))

    async def run(pod: Any, stop: Any) -> Any:
        if not pod["metadata"].get("ownerReferences"):
            await stop.wait()
            return Ended(0, "")
        return await answering(all_reachable)(pod, stop)

    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=run),
        verifying(controller, checks=scaled(max_concurrent=1)),
    ):
        await mac.becomes("True", "Verified")
        assert len(await fleet.verifier_pods()) >= 3, "they are nobody's business"


async def test_a_placement_that_no_pod_can_have_is_told_in_the_api_servers_words(
    controller: Path, shipped: ControlPlane, fleet: Fleet
) -> None:
    mac = await fleet.add(
        "studio", report=reporting(ADDRESS), verifier={"nodeSelector": {"not a label": "x"}}
    )
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        verifying(controller),
    ):
        await mac.becomes("Unknown", "VerifierFailed")
        assert "not a label" in (await mac.reachable())["message"]
        await mac.edit(verifier=None)
        await mac.becomes("True", "Verified")


async def test_pods_that_cannot_go_away_use_up_no_slot(
    controller: Path, shipped: ControlPlane, fleet: Fleet, admin: KubeClient
) -> None:
    """Whoever may edit pods may put finalizers on them."""

    async def hold(pod: Any, finalizers: list[str]) -> None:
        body = {"metadata": {"finalizers": finalizers}}
        await admin.merge_patch(PODS, pod["metadata"]["name"], fleet.namespace, body)

    held = asyncio.Event()

    async def run(pod: Any, stop: Any) -> Any:
        await held.wait()
        return await answering(all_reachable)(pod, stop)

    first = await fleet.add("first", report=reporting(ADDRESS))
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=run),
        verifying(controller, checks=scaled(max_concurrent=1)),
    ):
        await eventually(lambda: _named(first), "a check runs")
        pod = next(iter(await first.pods()))
        await hold(pod, ["llmkube.example/hold"])
        held.set()
        try:
            await first.becomes("True", "Verified")
            second = await fleet.add("second", report=reporting(ADDRESS))
            await second.becomes("True", "Verified")
            assert [p["metadata"]["uid"] for p in await first.pods()] == [pod["metadata"]["uid"]]
        finally:
            await hold(pod, [])
