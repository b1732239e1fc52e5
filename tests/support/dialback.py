"""One Mac, its MetalNode and its verifier pods, without a network: decisions applied to values.

`Bench` plays API server, scheduler and kubelet for the pure rules: it applies each decision to the
MetalNode as the API server would, makes the pods that starts ask for, and lets a test say what
becomes of them. Time is a FakeClock. The tests against the real API server are elsewhere.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from llmkube.api.cached import (
    CachedCondition,
    CachedMetalNode,
    decode_metalnode,
    decode_pod,
)
from llmkube.api.names import VERIFY_ANNOTATION
from llmkube.api.times import format_time
from llmkube.rules.check_progress import Refusal
from llmkube.rules.checks import Bookkeeping, CheckSettings
from llmkube.rules.verification import Memory, Seen, VerificationDecision, decide, start
from llmkube.rules.verifier_answer import NoAnswer
from llmkube.rules.verifier_pod import PodSettings, render_pod
from llmkube.verifier.policy import AddressPolicy, parse_network
from llmkube.verifier.protocol import (
    AddressResult,
    CheckReport,
    CheckRequest,
    Outcome,
    decode_request,
    encode_report,
)
from tests.support.clock import FakeClock
from tests.support.reports import UID, make_certificate, pin_text, report_for

TAILNET, LAN = "100.101.2.3", "192.168.1.20"
"""The addresses of the report that `report_for` makes, in order of preference."""
POLICY = AddressPolicy(deny=[parse_network("10.96.0.0/12")])
IMAGE = PodSettings(image="registry.example/llmkube-verifier:v1")
NONE: Mapping[str, Any] = {}


def second(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def node_of(
    *,
    status: Mapping[str, Any] = NONE,
    spec: Mapping[str, Any] = NONE,
    metadata: Mapping[str, Any] = NONE,
) -> CachedMetalNode:
    """A MetalNode as the cache has it."""
    meta = {"name": "m1", "namespace": "macs", "uid": UID, "resourceVersion": "1", "generation": 1}
    document = {
        "metadata": {**meta, **metadata},
        "spec": {"leaseName": "m1-lease", "serviceAccountName": "m1-account", **spec},
        "status": dict(status),
    }
    return decode_metalnode(msgspec.json.encode(document))


def connected(since: str = "2025-12-31T00:00:00Z", status: str = "True") -> dict[str, Any]:
    return {
        "type": "AgentConnected",
        "status": status,
        "reason": "HeartbeatReceived" if status == "True" else "HeartbeatExpired",
        "message": "",
        "lastTransitionTime": since,
        "observedGeneration": 1,
    }


@dataclass(slots=True)
class Bench:
    """A MetalNode with one connected Mac that reports TAILNET and LAN."""

    settings: CheckSettings = field(default_factory=CheckSettings)
    policy: AddressPolicy = POLICY
    clock: FakeClock = field(default_factory=FakeClock)
    report: str | None = field(default_factory=lambda: report_for(UID))
    slots: bool = True
    """Whether a check that is due gets a slot."""
    calm_until: timedelta | None = None
    """Until when our own blindness holds back what age would end."""
    refuse_pods: str = ""
    """The API server refuses pods in these words."""
    node: CachedMetalNode = field(default_factory=lambda: node_of())
    memory: Memory | None = None
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[timedelta] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    writes: int = 0

    def __post_init__(self) -> None:
        self.connect()

    # The world's doings -------------------------------------------------------------------------
    def connect(self, status: str = "True") -> None:
        """The heartbeat reconciler's condition, turned now."""
        self._patch_status(conditions=connected(format_time(self.clock.wall), status))

    def edit(self, **spec: Any) -> None:
        """The admin edits the spec."""
        document = msgspec.to_builtins(self.node)
        document["spec"] = {**document["spec"], **spec}
        document["metadata"]["generation"] += 1
        self._replace(document)

    def ask(self, seen: str | None = None) -> None:
        """`llmkube metal verify`."""
        document = msgspec.to_builtins(self.node)
        known = document.get("status", {}).get("verification", {}).get("lastStartTime", "")
        document["metadata"]["annotations"] = {VERIFY_ANNOTATION: known if seen is None else seen}
        self._replace(document)

    def restart(self) -> None:
        """Another controller takes over, with nothing but the status."""
        self.memory = None

    def pod(self) -> dict[str, Any]:
        """The pod that the status names."""
        return self.pods[self.book.pod_uid or ""]

    def request(self) -> CheckRequest:
        return decode_request(self.pod()["spec"]["containers"][0]["env"][0]["value"])

    def answer(self, *, exit_code: int = 0, message: str | None = None, **results: str) -> None:
        """The running pod ends. Results by outcome: `Reachable="100.101.2.3"`, all others as
        `others=` says (Timeout)."""
        asked = self.request()
        others = Outcome(results.pop("others", "Timeout"))
        by_address = {a: Outcome(name) for name, text in results.items() for a in text.split()}
        report = CheckReport(
            asked.input_hash,
            tuple(AddressResult(a, by_address.get(a, others)) for a in asked.addresses),
        )
        text = encode_report(report) if message is None else message
        terminated = {"exitCode": exit_code, "reason": "Completed", "message": text}
        self.pod()["status"] = {
            "phase": "Succeeded" if exit_code == 0 else "Failed",
            "containerStatuses": [{"name": "verifier", "state": {"terminated": terminated}}],
        }

    def pod_status(self, **status: Any) -> None:
        """What scheduler and kubelet say of the running pod."""
        self.pod()["status"] = status

    # Looking ------------------------------------------------------------------------------------
    @property
    def book(self) -> Bookkeeping:
        return Bookkeeping.of(self.node.status.verification)

    @property
    def reachable(self) -> CachedCondition:
        condition = self.node.status.condition("Reachable")
        assert condition is not None
        return condition

    @property
    def state(self) -> tuple[str, str, str | None]:
        """Status and reason of Reachable, and hostIP."""
        return self.reachable.status, self.reachable.reason, self.node.status.host_ip

    @property
    def results(self) -> dict[str, str]:
        return {c.address: c.result for c in self.node.status.candidates}

    def seen(self) -> Seen:
        uid = self.book.pod_uid if self.book.running else None
        document = self.pods.get(uid or "")
        pod = decode_pod(msgspec.json.encode(document)) if document else None
        gone = uid is not None and pod is None
        return Seen(self.node, self.report, pod, gone, self.calm_until, self.memory)

    # Running ------------------------------------------------------------------------------------
    def look(self) -> VerificationDecision:
        """Decide, and act on it, once."""
        now = self.clock.now()
        decision = decide(self.seen(), self.settings, self.policy, now)
        if decision.plan is not None and self.slots:
            decision = start(decision, self.settings, now)
        self._apply(decision)
        if decision.starting is not None:
            self._launch(decision)
        return decision

    def settle(self, *, limit: int = 10) -> VerificationDecision:
        """Look until nothing more happens at this instant."""
        for _ in range(limit):
            before = (self.node, self.book)
            decision = self.look()
            if (self.node, self.book) == before:
                return decision
        raise AssertionError("it does not settle")

    def wait(self, duration: timedelta) -> None:
        """Let time pass, waking up exactly when decisions ask for it."""
        end = self.clock.mono + duration
        while True:
            wake_at = self.settle().wake_at
            if wake_at is None or wake_at > end:
                break
            assert wake_at > self.clock.mono, "a wake-up in the past would spin"
            self.clock.advance(wake_at - self.clock.mono)
        self.clock.advance(end - self.clock.mono)
        self.settle()

    def until_start(self) -> timedelta:
        """Let time pass, wake-up by wake-up, until a check runs; return how long that took."""
        begun = self.clock.mono
        while not self.settled_running():
            wake_at = self.settle().wake_at
            assert wake_at is not None, "nothing would ever start"
            self.clock.advance(wake_at - self.clock.mono)
        return self.clock.mono - begun

    def settled_running(self) -> bool:
        self.settle()
        return self.book.running

    def verify(self, **results: str) -> None:
        """A whole check, from start to result, now."""
        self.settle()
        self.answer(**results)
        self.settle()

    def _launch(self, decision: VerificationDecision) -> None:
        assert decision.starting is not None
        if self.refuse_pods:
            assert self.memory is not None
            refusal = Refusal(decision.book.last_start, NoAnswer(self.refuse_pods))
            self.memory = replace(self.memory, refusal=refusal)
            return
        self.starts.append(self.clock.mono)
        uid = f"pod-{len(self.starts)}"
        pod = render_pod(
            self.node,
            decision.starting.inputs,
            name=f"pod-{len(self.starts)}",
            policy=self.policy,
            checks=self.settings,
            settings=IMAGE,
        )
        pod["metadata"]["uid"] = uid
        self.pods[uid] = pod
        named = decision.book.named(uid).to_json()
        self._apply_status({**(decision.status or {}), "verification": named})

    def _apply(self, decision: VerificationDecision) -> None:
        assert decision.status is not None
        self.memory = decision.memory
        self.events += [event.reason for event in decision.events]
        self._apply_status(decision.status)

    def _apply_status(self, status: Mapping[str, Any]) -> None:
        before = self.node
        document = msgspec.to_builtins(self.node)
        old = document.get("status", {})
        theirs = [c for c in old.get("conditions", []) if c["type"] != "Reachable"]
        new = {k: v for k, v in status.items() if v not in (None, [], {})}
        new["conditions"] = [*theirs, *status["conditions"]]
        document["status"] = new
        self._replace(document)
        self.writes += self.node.status != before.status

    def _patch_status(self, *, conditions: dict[str, Any]) -> None:
        document = msgspec.to_builtins(self.node)
        status = document.setdefault("status", {})
        others = [c for c in status.get("conditions", []) if c["type"] != conditions["type"]]
        status["conditions"] = [*others, conditions]
        self._replace(document)

    def _replace(self, document: dict[str, Any]) -> None:
        self.node = decode_metalnode(msgspec.json.encode(document))


# What many tests say ---------------------------------------------------------------------------
OTHER_UID = "11111111-2222-4333-8444-555555555555"
MINUTE = timedelta(minutes=1)
PENDING = ("Unknown", "VerificationPending", None)
VERIFIED = ("True", "Verified", TAILNET)
FAILED = ("False", "VerificationFailed", None)
NO_ANSWER = ("Unknown", "VerifierFailed", None)


def report_with(*addresses: str, **changes: Any) -> str:
    """A report of these addresses, all on the LAN."""
    candidates = [{"address": a, "source": "lan"} for a in addresses]
    return report_for(UID, candidates=candidates, **changes)


def rotated() -> tuple[str, str]:
    """A report with another key, and its pin."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = b64encode(make_certificate([f"urn:uuid:{UID}"], key=key)).decode()
    pin = pin_text(key)
    return report_for(UID, ingressSPKI=pin, ingressCertificate=certificate), pin


def verified(**changes: Any) -> Bench:
    """A Mac that was just verified."""
    bench = Bench(**changes)
    bench.verify(Reachable=f"{TAILNET} {LAN}")
    assert bench.state == VERIFIED
    return bench
