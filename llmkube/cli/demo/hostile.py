"""A Mac whose agent lies: it beats with its own, valid credential and reports what is not true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmkube.api.names import METAL_ACCOUNT_PREFIX, REPORT_ANNOTATION
from llmkube.api.times import format_micro_time
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.resources import LEASES


async def steal_address(kubeconfig: Path, thief: str, namespace: str, *, victim_port: int) -> None:
    """Claim, with the thief's own key, to be served where the victim is."""
    await _report(kubeconfig, thief, namespace, {"ingressPort": victim_port})


async def steal_identity(
    kubeconfig: Path, thief: str, namespace: str, *, victim_report: dict[str, Any]
) -> None:
    """Claim to be the victim altogether: its address, its key, its certificate."""
    await _report(kubeconfig, thief, namespace, victim_report)


async def _report(kubeconfig: Path, thief: str, namespace: str, lies: dict[str, Any]) -> None:
    """One heartbeat of the thief with some fields of its last report replaced."""
    clock = SystemClock()
    async with KubeClient(await load_access(kubeconfig), clock=clock) as client:
        lease = METAL_ACCOUNT_PREFIX + thief
        found = await client.get(LEASES, lease, namespace)
        report = json.loads(found["metadata"]["annotations"][REPORT_ANNOTATION]) | lies
        body = {
            "metadata": {"annotations": {REPORT_ANNOTATION: json.dumps(report)}},
            "spec": {"renewTime": format_micro_time(clock.now().wall)},
        }
        await client.merge_patch(LEASES, lease, namespace, body)
