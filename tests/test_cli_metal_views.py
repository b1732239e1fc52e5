"""`metal list`, `metal describe` and `metal verify` as processes on the real API server.

The test plays the controller: it writes the status that the commands read.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.api.names import VERIFY_ANNOTATION
from llmkube.api.times import format_time
from llmkube.cli.metal_credentials import MetalTokenOptions, create_metal_token
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import EVENTS, LEASES, METALNODES
from tests.support.accounts import grant
from tests.support.command import run_llmkube
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

START, FINISH = "2026-11-30T19:01:00Z", "2026-11-30T19:01:20Z"


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": f"about {reason}",
        "lastTransitionTime": format_time(datetime.now(UTC)),
    }


async def set_status(admin: KubeClient, namespace: str, name: str, **status: Any) -> None:
    await admin.merge_patch(METALNODES, name, namespace, {"status": status}, subresource="status")


def connected(reachable: str = "True", reason: str = "Verified") -> list[dict[str, Any]]:
    return [
        condition("AgentConnected", "True", "HeartbeatReceived"),
        condition("Reachable", reachable, reason),
    ]


@pytest.fixture
async def mac(admin: KubeClient, namespace: str) -> str:
    """A MetalNode that is connected and reachable."""
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    await set_status(
        admin,
        namespace,
        "mac-1",
        conditions=connected(),
        hostIP="100.64.0.7",
        ingressPort=9443,
        agentVersion="v0.1.0",
        capacity={"chip": "Apple M5 Max", "gpuCores": 40, "memory": "128Gi"},
        candidates=[{"address": "100.64.0.7", "source": "tailnet", "result": "Reachable"}],
    )
    return "mac-1"


async def test_list_in_every_format(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    await create_metal_token(admin, MetalTokenOptions("mac-2", namespace))
    here = {"kubeconfig": control_plane.admin_kubeconfig}
    ran = await run_llmkube("metal", "list", "-n", namespace, **here)
    lines = [line.split("   ") for line in ran.out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == ["NAME", "CHIP", "MEMORY", "HOST-IP", "CONNECTED", "REACHABLE", "AGE"]
    assert cells[1][:6] == ["mac-1", "Apple M5 Max", "128Gi", "100.64.0.7", "True", "True"]
    assert cells[2][:6] == ["mac-2", *["<none>"] * 5]
    assert "\x1b" not in ran.out

    wide = await run_llmkube("metal", "list", "-A", "-o", "wide", **here)
    assert wide.out.splitlines()[0].split()[-5:] == [
        "AGENT-VERSION",
        "PORT",
        "GPU-CORES",
        "LAST-HEARTBEAT",
        "REASON",
    ]
    assert f"{namespace} " in wide.out
    as_json = json.loads(
        (await run_llmkube("metal", "list", "-n", namespace, "-o", "json", **here)).out
    )
    as_yaml = yaml.safe_load(
        (await run_llmkube("metal", "list", "-n", namespace, "-o", "yaml", **here)).out
    )
    assert as_json == as_yaml
    assert [item["metadata"]["name"] for item in as_json["items"]] == ["mac-1", "mac-2"]
    names = await run_llmkube("metal", "list", "-n", namespace, "-o", "name", **here)
    assert names.out.splitlines() == [
        "metalnode.inference.llmkube.dev/mac-1",
        "metalnode.inference.llmkube.dev/mac-2",
    ]


async def test_an_empty_list_says_how_to_begin(control_plane: ControlPlane, namespace: str) -> None:
    ran = await run_llmkube(
        "metal", "list", "-n", namespace, kubeconfig=control_plane.admin_kubeconfig
    )
    assert (ran.code, ran.out) == (0, "")
    assert "llmkube metal token create" in ran.err


async def test_describe_reads_everything_that_bears_on_the_mac(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    node = await admin.get(METALNODES, mac, namespace)
    now = format_time(datetime.now(UTC)).replace("Z", ".123456Z")
    spec = {"renewTime": now, "leaseDurationSeconds": 120}
    await admin.merge_patch(LEASES, "llmkube-metal-mac-1", namespace, {"spec": spec})
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "skew", "namespace": namespace},
        "eventTime": now,
        "reportingController": "llmkube.dev/heartbeat",
        "reportingInstance": "test",
        "action": "Judge",
        "reason": "ClockSkew",
        "type": "Warning",
        "note": "the Mac's clock is an hour slow",
        "regarding": {
            "apiVersion": METALNODES.api_version,
            "kind": "MetalNode",
            "name": mac,
            "namespace": namespace,
            "uid": node["metadata"]["uid"],
        },
    }
    await admin.create(EVENTS, event)
    await admin.create(
        EVENTS,
        {
            **event,
            "metadata": {"name": "other", "namespace": namespace},
            "note": "about another Mac",
            "regarding": {**event["regarding"], "name": "mac-2", "uid": "other"},
        },
    )
    ran = await run_llmkube(
        "metal", "describe", mac, "-n", namespace, kubeconfig=control_plane.admin_kubeconfig
    )
    assert ran.code == 0, ran.all
    assert now in ran.out
    assert "100.64.0.7:9443" in ran.out
    assert "an hour slow" in ran.out
    assert "about another Mac" not in ran.out
    assert "nothing: it is connected and reachable" in ran.out
    missing = await run_llmkube(
        "metal", "describe", "mac-9", "-n", namespace, kubeconfig=control_plane.admin_kubeconfig
    )
    assert (missing.code, missing.err.count("\n")) == (3, 1)


async def test_describe_names_what_the_user_may_not_read(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    rules = [{"apiGroups": [METALNODES.group], "resources": ["metalnodes"], "verbs": ["get"]}]
    await grant(admin, namespace, "default", rules)
    weak = await control_plane.service_account_kubeconfig(namespace, "default")
    ran = await run_llmkube("metal", "describe", mac, "-n", namespace, kubeconfig=weak)
    assert ran.code == 0, ran.all
    assert ran.out.count("you may not read") == 3


async def test_verify_asks_with_the_start_it_saw(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    here = {"kubeconfig": control_plane.admin_kubeconfig}
    verify = ("metal", "verify", mac, "-n", namespace)

    async def annotation() -> str | None:
        node = await admin.get(METALNODES, mac, namespace)
        found: str | None = node["metadata"].get("annotations", {}).get(VERIFY_ANNOTATION)
        return found

    assert (await run_llmkube(*verify, **here)).code == 0
    assert await annotation() == ""
    await set_status(admin, namespace, mac, verification={"lastStartTime": START})
    assert (await run_llmkube(*verify, **here)).code == 0
    assert await annotation() == START
    await create_metal_token(admin, MetalTokenOptions(mac, namespace))
    assert await annotation() == START, "creating a token does not take the request back"
    assert (await run_llmkube("metal", "verify", "mac-9", "-n", namespace, **here)).code == 3


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        pytest.param(
            {
                "conditions": connected(),
                "verification": {"lastStartTime": START, "lastCheckTime": FINISH},
            },
            0,
            "reachable at 100.64.0.7",
            id="reached",
        ),
        pytest.param(
            {
                "conditions": connected("False", "VerificationFailed"),
                "candidates": [{"address": "100.64.0.7", "result": "Refused"}],
                "verification": {
                    "lastStartTime": START,
                    "lastCheckTime": FINISH,
                    "consecutiveFailures": 1,
                },
            },
            7,
            "nothing listens at port 9443",
            id="not reached",
        ),
        pytest.param(
            {
                "conditions": connected("Unknown", "VerifierFailed"),
                "verification": {"lastStartTime": START, "consecutiveFailures": 1},
            },
            7,
            "VerifierFailed",
            id="the pod failed",
        ),
        pytest.param(
            {
                "conditions": [
                    condition("AgentConnected", "False", "HeartbeatExpired"),
                    condition("Reachable", "Unknown", "AgentDisconnected"),
                ]
            },
            7,
            "not connected (HeartbeatExpired)",
            id="the Mac went away",
        ),
    ],
)
async def test_verify_waits_for_the_answer(
    end: dict[str, Any],
    code: int,
    words: str,
    control_plane: ControlPlane,
    admin: KubeClient,
    namespace: str,
    mac: str,
) -> None:
    async with asyncio.TaskGroup() as group:
        command = group.create_task(
            run_llmkube(
                *("metal", "verify", mac, "-n", namespace, "--wait", "--timeout", "60s"),
                kubeconfig=control_plane.admin_kubeconfig,
            )
        )

        async def requested() -> bool:
            node = await admin.get(METALNODES, mac, namespace)
            return VERIFY_ANNOTATION in (node["metadata"].get("annotations") or {})

        await eventually(requested, "the request")
        if "verification" in end:
            await set_status(admin, namespace, mac, verification={"lastStartTime": START})
        await set_status(admin, namespace, mac, **end)
    ran = command.result()
    assert ran.code == code, ran.all
    assert words in ran.all
    assert ran.err.count("\n") == (1 if code else 0)


async def test_verify_does_not_wait_for_what_cannot_come(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    here = {"kubeconfig": control_plane.admin_kubeconfig}
    verify = ("metal", "verify", mac, "-n", namespace, "--wait", "--timeout")
    ran = await run_llmkube(*verify, "1s", **here)
    assert ran.code == 7
    assert "no result after 1 s" in ran.err
    await set_status(admin, namespace, mac, conditions=connected("False", "InvalidSpec"))
    began = asyncio.get_running_loop().time()
    ran = await run_llmkube(*verify, "10m", **here)
    assert ran.code == 7
    assert "InvalidSpec" in ran.err
    assert asyncio.get_running_loop().time() - began < timedelta(minutes=1).total_seconds()


async def test_verify_notices_that_the_mac_is_deleted(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, mac: str
) -> None:
    async with asyncio.TaskGroup() as group:
        command = group.create_task(
            run_llmkube(
                *("metal", "verify", mac, "-n", namespace, "--wait"),
                kubeconfig=control_plane.admin_kubeconfig,
            )
        )

        async def requested() -> bool:
            node = await admin.get(METALNODES, mac, namespace)
            return VERIFY_ANNOTATION in (node["metadata"].get("annotations") or {})

        await eventually(requested, "the request")
        await admin.delete(METALNODES, mac, namespace)
    assert command.result().code == 3
