"""What the proofs ask of the cluster, through the real kubectl as a user would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from devcluster.controlplane import ControlPlane

PATIENCE = timedelta(minutes=3)
"""How long to wait for what takes seconds on an idle machine."""

SYSTEM = "llmkube-system"
CONTROLLER = "app.kubernetes.io/component=controller"

Value = TypeVar("Value")


class Kube:
    """kubectl with JSON in and out."""

    def __init__(self, cluster: ControlPlane) -> None:
        self.cluster = cluster
        self.kubectl = cluster.kubectl

    async def get(self, *what: str) -> dict[str, Any]:
        """`kubectl get … -o json`. Raises ProcessFailed where it is not found."""
        shown = await self.kubectl("get", *what, "-o", "json")
        return dict(json.loads(shown.stdout))

    async def items(self, *what: str) -> list[dict[str, Any]]:
        return list((await self.get(*what))["items"])

    async def apply(self, document: dict[str, Any]) -> None:
        await self.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    async def exists(self, *what: str) -> bool:
        done = await self.kubectl("get", *what, "--ignore-not-found", "-o", "name", check=False)
        return bool(done.stdout.strip())

    async def wait(self, what: str, condition: str, namespace: str) -> None:
        """`kubectl wait --for=…`, with what the object looks like if it is in vain."""
        done = await self.kubectl(
            "wait", what, f"--for={condition}", f"--namespace={namespace}",
            f"--timeout={PATIENCE.total_seconds():.0f}s", check=False,
        )  # fmt: skip
        if done.returncode:
            shown = await self.diagnosis(what, namespace)
            raise AssertionError(f"{what} never had {condition}\n{done.stderr}{shown}")

    async def diagnosis(self, what: str, namespace: str) -> str:
        """What one would look at next: the object, its neighbours, the controller's last words."""
        words = []
        for question in (
            ("describe", what, "-n", namespace),
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "events", "-n", namespace),
            ("logs", "-n", SYSTEM, "-l", CONTROLLER, "--tail=40", "--prefix"),
        ):
            answer = await self.kubectl(*question, check=False)
            words.append(f"$ kubectl {' '.join(question)}\n{answer.stdout}{answer.stderr}")
        return "\n".join(words)

    async def wait_reachable(self, name: str, status: str, reason: str, namespace: str) -> None:
        """Wait until the MetalNode's condition Reachable has this status and reason."""
        path = "jsonpath={.status.conditions[?(@.type=='Reachable')]"
        await self.wait(f"metalnode/{name}", f"{path}.reason}}={reason}", namespace)
        await self.wait(f"metalnode/{name}", f"{path}.status}}={status}", namespace)


def condition(obj: dict[str, Any], kind: str) -> dict[str, Any]:
    """The condition of that type. Raises StopIteration if there is none."""
    return next(one for one in obj["status"]["conditions"] if one["type"] == kind)


async def eventually(probe: Callable[[], Awaitable[Value | None]]) -> Value:
    """The first true value of `probe`. Raises TimeoutError after PATIENCE."""
    async with asyncio.timeout(PATIENCE.total_seconds()):
        while True:
            if value := await probe():
                return value
            await asyncio.sleep(0.25)
