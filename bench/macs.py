"""MetalNode heartbeats against a peer: start, beats with reports, silence, memory, lateness."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bench.load import Sheet, Watcher, at_rate, for_each, in_turn
from bench.report import Figure, percentile
from bench.subject import Running, Subject, chosen, ours, peers, running
from devcluster.controlplane import ControlPlane
from llmkube.api.names import REPORT_ANNOTATION, ConditionType, FieldManager
from llmkube.api.times import format_micro_time, format_time
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import LEASES, METALNODES, NAMESPACES, SERVICEACCOUNTS
from tests.support.wait import eventually

PART = "macs"
NAMESPACE = "bench-macs"
LEASE_SECONDS = 600  # the longest that counts: nobody expires while throughput is measured
BEAT_SECONDS = 30  # between an agent's heartbeats
POLL = timedelta(milliseconds=500)
PROBE_LEASE_SECONDS = 15  # the shortest that counts


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    macs: int = 2000
    rate: float = 200.0
    seconds: float = 60.0
    warm_up: float = 60.0
    """Seconds of heartbeats before those that count: the first minute has no status writes."""
    probes: int = 50


def subjects() -> list[Subject]:
    """Ours, and the optional peers of $LLMKUBE_BENCH_MACS_PEER."""
    return [ours("heartbeat"), *peers("LLMKUBE_BENCH_MACS_PEER")]


async def run(
    cluster: ControlPlane, client: KubeClient, plan: Plan, only: Sequence[str] = ()
) -> list[Figure]:
    """Measure every subject (or `only` those named) on the same objects."""
    fleet = Fleet(client, plan)
    await fleet.prepare()
    figures = await in_turn(
        PART,
        f"{plan.macs} Macs",
        chosen(subjects(), only),
        lambda subject, sheet: _measure(fleet, cluster, subject, sheet),
        fleet.clear_status,
    )
    await fleet.remove()
    return figures


async def _measure(fleet: Fleet, cluster: ControlPlane, subject: Subject, sheet: Sheet) -> None:
    n, at = fleet.plan.macs, f"at {fleet.plan.rate:.0f}/s"
    many = n > 5000
    client_seconds = await fleet.own_writes()
    await fleet.clear_status()
    await fleet.beat_all()
    async with fleet.watching() as watcher:
        began = time.perf_counter()
        async with running(subject, cluster.admin_kubeconfig) as process:
            await watcher.until(lambda: watcher.all(fleet.names, "True"), seconds=600)
            sheet.add("cold start", cold := time.perf_counter() - began, "s")
            sheet.add("the client's own writes of the same", client_seconds, "s")
            sheet.add("cold start ÷ the client's own writes", cold / client_seconds, "", 1.2)

            fresh, _, _ = await _beats(fleet, process, watcher, fleet.plan.warm_up)
            sheet.add(f"CPU per beat {at}, first minute", fresh, "µs", 100)
            per_beat, rss, writes = await _beats(fleet, process, watcher, fleet.plan.seconds)
            core = per_beat * fleet.plan.rate / 1e4
            sheet.add(f"CPU per beat {at}, with its status writes", per_beat, "µs", 100)
            sheet.add(f"share of a core {at}", core, "%", n / 2500 if many else None)
            sheet.add("resident memory", rss / 1e6, "MB", 150 if many else 115)
            sheet.add("status writes per Mac and minute", writes, "", 1)

            late = await fleet.expiry_lateness(watcher)
            median = percentile(late, 0.5)
            sheet.add("expiry → AgentConnected=False p50", median * 1e3, "ms", 15)
            sheet.add("expiry → AgentConnected=False max", max(late) * 1e3, "ms", 80)
            calm, harried = await fleet.reconnects(watcher)
            sheet.add("beat after silence → True p99", percentile(calm, 0.99) * 1e3, "ms")
            harried_p99 = percentile(harried, 0.99)
            sheet.add("the same beside hostile Macs p99", harried_p99 * 1e3, "ms")


async def _beats(
    fleet: Fleet, process: Running, watcher: Watcher, seconds: float
) -> tuple[float, int, float]:
    """(µs of CPU per beat, resident bytes, status writes per Mac and minute)."""
    rate = fleet.plan.rate
    before = process.usage()
    watcher.gaps.clear()
    beaten = await at_rate(fleet.names, fleet.beat, rate=rate, seconds=seconds)
    await asyncio.sleep(1)  # what is under way
    after = process.usage()
    # Not by their number: all Macs are written in the same seconds of each minute.
    writes = 60 / percentile(watcher.gaps, 0.5)
    return (after.cpu - before.cpu) / beaten * 1e6, after.rss, writes


class Fleet:
    """The bench's Macs, their reports and the bench's own client."""

    def __init__(self, client: KubeClient, plan: Plan) -> None:
        self.client = client
        self.plan = plan
        self.names = [f"mac-{number:05d}" for number in range(plan.macs)]
        self.probes = [f"probe-{number:03d}" for number in range(plan.probes)]
        self.hostile = [f"hostile-{number:02d}" for number in range(20)]
        self._lies = 0

    async def prepare(self) -> None:
        """Make the Macs."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await self.client.apply(NAMESPACES, body, field_manager="bench")
        await for_each(self.names, self._create)

    async def remove(self) -> None:
        """Delete everything, and return when it is gone: it would disturb what comes next."""
        await self.client.delete(NAMESPACES, NAMESPACE)
        only = f"metadata.name={NAMESPACE}"

        async def gone() -> bool:
            return not await self.client.list(NAMESPACES, field_selector=only)

        await eventually(gone, "the namespace is gone", within=timedelta(minutes=15), poll=POLL)

    async def own_writes(self) -> float:
        """Seconds that this client itself needs to write every status, until it sees them."""
        async with self.watching() as watcher:
            began = time.perf_counter()
            await for_each(self.names, self._write_status)
            await watcher.until(lambda: watcher.all(self.names, "True"), seconds=600)
            return time.perf_counter() - began

    async def _create(self, name: str, lease_seconds: int = LEASE_SECONDS) -> None:
        spec = {"leaseName": name, "serviceAccountName": name}
        node = await self._apply(METALNODES, name, spec=spec)
        await self._apply(SERVICEACCOUNTS, name)
        report = _report(node["metadata"]["uid"])
        await self._apply(
            LEASES,
            name,
            annotations={REPORT_ANNOTATION: report},
            spec={"holderIdentity": name, "leaseDurationSeconds": lease_seconds},
        )

    async def _apply(
        self, resource: Any, name: str, annotations: dict[str, str] | None = None, **parts: Any
    ) -> dict[str, Any]:
        metadata = {"name": name, "namespace": NAMESPACE, "annotations": annotations or {}}
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": metadata,
            **parts,
        }
        return await self.client.apply(resource, body, field_manager="bench")

    async def beat(self, name: str) -> datetime:
        """One heartbeat as an agent sends it; returns its stamp."""
        stamp = datetime.now(UTC)
        body = {"spec": {"renewTime": format_micro_time(stamp)}}
        await self.client.merge_patch(LEASES, name, NAMESPACE, body)
        return stamp

    async def beat_all(self) -> None:
        await for_each(self.names, self.beat)

    async def _write_status(self, name: str) -> None:
        now = format_time(datetime.now(UTC))
        condition = {
            "type": "AgentConnected",
            "status": "True",
            "reason": "HeartbeatReceived",
            "message": "The agent renews its Lease.",
            "lastTransitionTime": now,
            "observedGeneration": 1,
        }
        body = {
            "apiVersion": METALNODES.api_version,
            "kind": METALNODES.kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "status": {
                "conditions": [condition],
                "lastHeartbeatTime": now,
                "agentVersion": "v0.1.0",
                "capacity": {**_CAPACITY, "memory": "128Gi"},
            },
        }
        await self.client.apply(
            METALNODES, body, field_manager=FieldManager.HEARTBEAT, subresource="status"
        )

    async def clear_status(self) -> None:
        """As if no controller had ever run."""

        async def clear(name: str) -> None:
            body = {"status": None}
            await self.client.merge_patch(METALNODES, name, NAMESPACE, body, subresource="status")

        await for_each(self.names, clear)

    def watching(
        self, condition: str = ConditionType.AGENT_CONNECTED
    ) -> AbstractAsyncContextManager[Watcher]:
        """Watch the status of one of the conditions."""
        value = partial(_condition_status, condition)
        return Watcher(self.client, METALNODES, value, NAMESPACE).watching()

    async def expiry_lateness(self, watcher: Watcher) -> list[float]:
        """Seconds from the end of a Lease's duration until AgentConnected=False is seen."""
        probes = self.probes
        await for_each(probes, lambda name: self._create(name, PROBE_LEASE_SECONDS))
        await for_each(probes, self.beat)
        await watcher.until(lambda: watcher.all(probes, "True"), seconds=60)
        last: dict[str, datetime] = {}
        for name in probes:
            last[name] = await self.beat(name)
            await asyncio.sleep(0.05)
        await watcher.until(lambda: watcher.all(probes, "False"), seconds=120)
        due = timedelta(seconds=PROBE_LEASE_SECONDS)
        return [watcher.changed[name] - (last[name] + due).timestamp() for name in probes]

    async def reconnects(self, watcher: Watcher) -> tuple[list[float], list[float]]:
        """Seconds from the answer to a silent Mac's beat until True is seen: by themselves, and
        while other Macs beat with hostile reports. Removes the probes."""
        calm = await self._reconnect_all(watcher)
        await watcher.until(lambda: watcher.all(self.probes, "False"), seconds=120)
        await for_each(self.hostile, self._create)
        async with asyncio.TaskGroup() as tasks:
            attack = tasks.create_task(self._attack())
            harried = await self._reconnect_all(watcher)
            attack.cancel()
        for name in [*self.probes, *self.hostile]:
            for resource in (METALNODES, LEASES, SERVICEACCOUNTS):
                await self.client.delete(resource, name, NAMESPACE)
        return calm, harried

    async def _reconnect_all(self, watcher: Watcher) -> list[float]:
        seconds = []
        for name in self.probes:
            await self.beat(name)
            answered = time.time()
            await watcher.until(lambda: watcher.values.get(name) == "True", seconds=30)  # noqa: B023
            seconds.append(max(0.0, watcher.changed[name] - answered))
            await asyncio.sleep(0.02)
        return seconds

    async def _attack(self) -> None:
        """Hostile reports, a new one with every beat, 40 beats a second."""
        await at_rate(self.hostile, self._hostile_beat, rate=40, seconds=600)

    async def _hostile_beat(self, name: str) -> None:
        self._lies += 1
        body = {
            "metadata": {"annotations": {REPORT_ANNOTATION: _HOSTILE[self._lies % len(_HOSTILE)]}},
            "spec": {"renewTime": format_micro_time(datetime.now(UTC))},
        }
        await self.client.merge_patch(LEASES, name, NAMESPACE, body)


_HOSTILE = (
    "x" * 200_000,
    json.dumps({"version": 1, "candidates": [{"address": "10.0.0.1", "source": "lan"}] * 4_000}),
    "[" * 16_000,
    '{"version": NaN}',
    '{"version": 9223372036854775808}',
    '{"version": 1, "version": 1}',
    '{"version": 1, "agentVersion": "\\u0000\\u001b[31m\\ud800"}',
    '{"version": 1, "ingressSPKI": "!!!!"}',
    '{"version": 1, "ingressPort": true}',
    "null",
)
"""What no parser likes: too large, too many, too deep, no numbers, twice, control characters."""

_CAPACITY = {
    "chip": "Apple M5 Max",
    "gpuCores": 40,
    "memoryBytes": 137438953472,
    "metalVersion": "Metal 4",
}


def _report(uid: str) -> str:
    """A valid report of about 1.6 KB, as an agent on a Mac with a few interfaces sends it."""
    key = ec.generate_private_key(ec.SECP256R1())
    spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    candidates = [{"address": f"10.{number}.2.3", "source": "lan"} for number in range(12)]
    document = {
        "version": 1,
        "agentVersion": "v0.1.0",
        "ingressPort": 9443,
        "ingressSPKI": base64.b64encode(hashlib.sha256(spki).digest()).decode(),
        "ingressCertificate": base64.b64encode(_certificate(key, uid)).decode(),
        "candidates": [{"address": "100.101.2.3", "source": "tailnet"}, *candidates],
        "capacity": _CAPACITY,
    }
    return json.dumps(document, separators=(",", ":"))


def _certificate(key: ec.EllipticCurvePrivateKey, uid: str) -> bytes:
    name = x509.Name([])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"urn:uuid:{uid}")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(names, critical=True)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def _condition_status(kind: str, status: dict[str, Any]) -> str | None:
    conditions = status.get("conditions") or ()
    return next((one["status"] for one in conditions if one["type"] == kind), None)
