"""A Mac whose agent lies: it beats with its own, valid credential and reports what is not true."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmkube.api.names import METAL_ACCOUNT_PREFIX, REPORT_ANNOTATION
from llmkube.api.times import format_micro_time
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError
from llmkube.kube.resources import LEASES

BEAT = timedelta(seconds=2)

Lies = Mapping[str, Any]
"""Fields of a report. A victim's whole report claims its address, its key and its certificate."""


def stolen_address(port: int) -> Lies:
    """To be served, with the thief's own key, where the victim is."""
    return {"ingressPort": port}


async def keep_lying(kubeconfig: Path, thief: str, namespace: str, lies: Lies) -> None:
    """Beat with lies until cancelled: a thief who is silent is only a Mac that is offline."""
    while True:
        await asyncio.sleep(BEAT.total_seconds())
        with suppress(ApiError):
            await lie(kubeconfig, thief, namespace, lies)


async def lie(kubeconfig: Path, thief: str, namespace: str, lies: Lies) -> None:
    """One heartbeat of the thief with some fields of its last report replaced. Raises ApiError."""
    clock = SystemClock()
    async with KubeClient(await load_access(kubeconfig), clock=clock) as client:
        lease = METAL_ACCOUNT_PREFIX + thief
        found = await client.get(LEASES, lease, namespace)
        report = json.loads(found["metadata"]["annotations"][REPORT_ANNOTATION]) | dict(lies)
        body = {
            "metadata": {"annotations": {REPORT_ANNOTATION: json.dumps(report)}},
            "spec": {"renewTime": format_micro_time(clock.now().wall)},
        }
        await client.merge_patch(LEASES, lease, namespace, body)
