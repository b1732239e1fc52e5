"""Macs in a real cluster: MetalNodes, Leases and reports as their owners write them.

`Fleet` plays the admin, the agents and (unless the heartbeat controller runs) the heartbeat
reconciler's condition, each under its own field manager. `verifying` runs the real controller in
this process under the shipped ServiceAccount, with durations that tests can wait for.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from devcluster.kubelet import Ended, Pod
from llmkube.api.names import REPORT_ANNOTATION, VERIFY_ANNOTATION, FieldManager
from llmkube.api.times import format_micro_time, format_time
from llmkube.clock import SystemClock
from llmkube.controller.options import ControllerName, Options
from llmkube.controller.run import run_until
from llmkube.controller.tuning import LifeSettings, QueueSettings, Tuning
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import LEASES, METALNODES, PODS, SERVICEACCOUNTS
from llmkube.rules.checks import CheckSettings
from llmkube.verifier.protocol import (
    CHECK_VARIABLE,
    AddressResult,
    CheckReport,
    CheckRequest,
    Outcome,
    decode_request,
    encode_report,
)
from tests.support.reports import report_for
from tests.support.wait import eventually

Object = dict[str, Any]
LOOPBACK = (ip_network("127.0.0.0/8"),)

FAST = CheckSettings(
    spacing=timedelta(seconds=3),
    timeout=timedelta(seconds=20),
    backoff=timedelta(seconds=2),
    backoff_cap=timedelta(seconds=8),
    reverify=timedelta(minutes=10),
    true_lasts=timedelta(minutes=30),
    trouble=timedelta(seconds=2),
    intake=timedelta(seconds=1),
)
"""Durations of checks that a test can wait for."""


@asynccontextmanager
async def verifying(
    kubeconfig: Path, *, checks: CheckSettings = FAST, **options: Any
) -> AsyncIterator[asyncio.Event]:
    """Run the controller (verification only, unless told otherwise) while the block runs.

    Yields the event that stops it.
    """
    defaults: dict[str, Any] = {
        "controllers": frozenset({ControllerName.VERIFICATION}),
        "allow_cidrs": LOOPBACK,
        "deny_cidrs": (ip_network("10.96.0.0/16"),),
        "tuning": Tuning(
            checks=checks,
            queue=QueueSettings(backoff_cap=timedelta(seconds=2)),
            life=LifeSettings(drain=timedelta(seconds=3)),
        ),
    }
    stop = asyncio.Event()
    running = asyncio.ensure_future(
        run_until(stop, Options(kubeconfig=kubeconfig, **(defaults | options)), SystemClock())
    )
    try:
        yield stop
    finally:
        stop.set()
        await running


@dataclass(frozen=True, slots=True)
class Mac:
    """One Mac: its MetalNode's name and UID, and what is done about it."""

    admin: KubeClient
    namespace: str
    name: str
    uid: str

    async def connect(self, *, connected: bool = True) -> None:
        """AgentConnected as the heartbeat reconciler would write it, turned now."""
        condition = {
            "type": "AgentConnected",
            "status": "True" if connected else "False",
            "reason": "HeartbeatReceived" if connected else "HeartbeatExpired",
            "message": "",
            "lastTransitionTime": format_time(datetime.now(UTC)),
            "observedGeneration": 1,
        }
        await self.admin.apply(
            METALNODES,
            {**self._head(), "status": {"conditions": [condition]}},
            field_manager=FieldManager.HEARTBEAT,
            subresource="status",
        )

    async def report(self, text: str | None) -> None:
        """The agent's next beat, with this report."""
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "annotations": {REPORT_ANNOTATION: text} if text is not None else {},
            },
            "spec": {
                "renewTime": format_micro_time(datetime.now(UTC)),
                "leaseDurationSeconds": 600,
                "holderIdentity": "test",
            },
        }
        await self.admin.apply(LEASES, body, field_manager=FieldManager.AGENT)

    async def edit(self, **spec: Any) -> None:
        """The admin changes the spec."""
        await self.admin.merge_patch(METALNODES, self.name, self.namespace, {"spec": spec})

    async def ask(self) -> None:
        """`llmkube metal verify`."""
        seen = (await self.verification()).get("lastStartTime", "")
        annotations = {"annotations": {VERIFY_ANNOTATION: seen}}
        await self.admin.merge_patch(
            METALNODES, self.name, self.namespace, {"metadata": annotations}
        )

    async def write_status(self, status: Object) -> None:
        """What the verification reconciler is to find written by itself."""
        await self.admin.apply(
            METALNODES,
            {**self._head(), "status": status},
            field_manager=FieldManager.VERIFICATION,
            subresource="status",
        )

    async def status(self) -> Object:
        found = await self.admin.get(METALNODES, self.name, self.namespace)
        return dict(found.get("status") or {})

    async def verification(self) -> Object:
        return dict((await self.status()).get("verification") or {})

    async def reachable(self) -> Object:
        conditions = (await self.status()).get("conditions", [])
        return next((dict(c) for c in conditions if c["type"] == "Reachable"), {})

    async def results(self) -> dict[str, str]:
        return {c["address"]: c["result"] for c in (await self.status()).get("candidates", [])}

    async def becomes(
        self, status: str, reason: str, *, within: timedelta = timedelta(seconds=60)
    ) -> Object:
        """Wait for the condition; return the whole status that shows it."""

        async def shown() -> Object:
            found = await self.status()
            conditions = found.get("conditions", [])
            now = [(c["status"], c["reason"]) for c in conditions if c["type"] == "Reachable"]
            assert now == [(status, reason)], f"{now}: {conditions}"
            return found

        return await eventually(shown, f"{self.name} is {status} {reason}", within=within)

    async def pods(self) -> list[Object]:
        """The pods that this MetalNode owns."""
        found = await self.admin.list(PODS, self.namespace)
        owners = [[o["uid"] for o in p["metadata"].get("ownerReferences", [])] for p in found]
        return [p for p, uids in zip(found, owners, strict=True) if self.uid in uids]

    async def without_pods(self) -> None:
        async def none() -> bool:
            return not await self.pods()

        await eventually(none, f"no pod of {self.name} is left")

    def _head(self) -> Object:
        return {
            "apiVersion": METALNODES.api_version,
            "kind": METALNODES.kind,
            "metadata": {"name": self.name, "namespace": self.namespace},
        }


@dataclass(frozen=True, slots=True)
class Fleet:
    """The Macs of one namespace."""

    admin: KubeClient
    namespace: str

    async def add(
        self,
        name: str,
        *,
        report: Callable[[str], str] | None = report_for,
        account: bool = False,
        **spec: Any,
    ) -> Mac:
        """A connected Mac; `report` makes its report from the MetalNode's UID."""
        body: Object = {
            "apiVersion": METALNODES.api_version,
            "kind": METALNODES.kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"leaseName": name, "serviceAccountName": name, **spec},
        }
        made = await self.admin.create(METALNODES, body)
        mac = Mac(self.admin, self.namespace, name, made["metadata"]["uid"])
        if account:
            head = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
            await self.admin.create(SERVICEACCOUNTS, head, self.namespace)
        await mac.report(report(mac.uid) if report is not None else None)
        if not account:
            await mac.connect()
        return mac

    async def verifier_pods(self) -> list[Object]:
        selector = "app.kubernetes.io/component=verifier"
        return await self.admin.list(PODS, self.namespace, label_selector=selector)


def reporting(*addresses: str, port: int = 9443, **changes: Any) -> Callable[[str], str]:
    """A report of these addresses and that port, with the tests' shared key."""
    candidates = [{"address": address, "source": "lan"} for address in addresses]
    return lambda uid: report_for(uid, candidates=candidates, ingressPort=port, **changes)


def reporting_as(der: bytes, spki: bytes, *addresses: str, port: int) -> Callable[[str], str]:
    """A report of that certificate and pin."""
    return reporting(
        *addresses,
        port=port,
        ingressCertificate=b64encode(der).decode(),
        ingressSPKI=b64encode(spki).decode(),
    )


# Verifiers in this process: for tests about the controller, not about the dial-back ---------------
Answer = Callable[[CheckRequest], Mapping[str, Outcome]]


def asked(pod: Pod) -> CheckRequest:
    """What a verifier pod was asked."""
    env = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}
    return decode_request(env[CHECK_VARIABLE])


def answering(
    answer: Answer, *, takes: timedelta = timedelta(0)
) -> Callable[[Pod, asyncio.Event], Awaitable[Ended]]:
    """A kubelet runner that answers without dialling, after a while."""

    async def run(pod: Pod, stop: asyncio.Event) -> Ended:
        request = asked(pod)
        found = answer(request)
        results = tuple(AddressResult(a, found.get(a, Outcome.TIMEOUT)) for a in request.addresses)
        try:
            async with asyncio.timeout(takes.total_seconds() or 0.001):
                await stop.wait()
        except TimeoutError:
            pass
        return Ended(0, encode_report(CheckReport(request.input_hash, results)))

    return run


def all_reachable(request: CheckRequest) -> Mapping[str, Outcome]:
    return dict.fromkeys(request.addresses, Outcome.REACHABLE)


def messages(text: Callable[[CheckRequest], Any]) -> Callable[[Pod, asyncio.Event], Any]:
    """A kubelet runner whose pods succeed with any termination message."""

    async def run(pod: Pod, stop: asyncio.Event) -> Ended:
        made = text(asked(pod))
        return Ended(0, made if isinstance(made, str) else json.dumps(made))

    return run


def scaled(**changes: Any) -> CheckSettings:
    return replace(FAST, **changes)
