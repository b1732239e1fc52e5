"""The verification reconciler: it keeps Reachable true by dialling Macs back from pods.

What is true and what is due is decided in `rules.verification`; this module sees to it. A start is
three writes, so that a crash between any two loses nothing:

1. the status gets lastStartTime, and no podUID: whatever happens next, no second start within the
   spacing, and a start that never gets further is simply due again;
2. the pod, under a name that nobody can foresee: until the status names its UID nobody believes it;
3. the status gets podUID, as long as lastStartTime is still ours.

A pod of ours that the status does not name is an orphan, of a start that was cut short or of a
stranger; it is deleted unread after a live look at the MetalNode. A pod's result is in the status
before the pod is deleted. Read `verification_caches` for what it looks up, `check_slots` for whose
turn it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from llmkube.api.cached import CachedLease, CachedMetalNode, CachedPod
from llmkube.api.names import METALNODE_UID_LABEL, ConditionType, FieldManager
from llmkube.clock import ZERO, Clock, Now
from llmkube.informers.guard import CacheGuard
from llmkube.informers.queue import WorkQueue
from llmkube.informers.store import Change
from llmkube.informers.view import View
from llmkube.informers.worker import Outcome
from llmkube.kube.client import KubeClient
from llmkube.kube.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooLarge,
    Unavailable,
)
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import LEASES, METALNODES, PODS
from llmkube.log import get_logger
from llmkube.reconcilers.check_slots import CheckSlots
from llmkube.reconcilers.live import read_live
from llmkube.reconcilers.pace import Pace
from llmkube.reconcilers.shell import ATTEMPTS, Applied, Live, Shell
from llmkube.reconcilers.status import Ownership, StatusWriter, Target
from llmkube.reconcilers.verification_caches import (
    VerificationCaches,
    is_running,
    lease_key,
    lease_matters,
    node_matters,
    report_text,
)
from llmkube.reconcilers.verification_metrics import VerificationMetrics
from llmkube.reconcilers.watchfulness import Deferred
from llmkube.rules import verification
from llmkube.rules.calm import FOREVER
from llmkube.rules.check_progress import Refusal
from llmkube.rules.checks import SECOND, Bookkeeping, CheckSettings
from llmkube.rules.verification import Memory, Plan, Seen, VerificationDecision
from llmkube.rules.verifier_answer import NoAnswer, one_line
from llmkube.rules.verifier_pod import PodSettings, pod_name, render_pod
from llmkube.verifier.policy import AddressPolicy

OWNERSHIP = Ownership(
    METALNODES,
    FieldManager.VERIFICATION,
    fields=(
        "observedGeneration",
        "hostIP",
        "ingressPort",
        "ingressSPKI",
        "candidates",
        "verification",
    ),
    conditions=(ConditionType.REACHABLE,),
)

_NO_WEBHOOK = "InternalError"
"""Of the answer where an admission webhook is down that must be asked: a refusal, in spite of its
status 500. Should the pod exist all the same, it is an orphan."""
_SWEPT_PER_RUN = 20
"""Orphans deleted in one run."""
_LOOKS_PER_INTAKE = 30
"""A report may end a True between two intakes; this often, each second, that is looked at."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VerificationSettings:
    """What the admin can set about checks."""

    checks: CheckSettings
    pods: PodSettings
    policy: AddressPolicy


@dataclass(frozen=True, slots=True)
class Sight:
    """One MetalNode as observed, with every pod that claims to be about it."""

    target: Target
    seen: Seen
    pods: tuple[CachedPod, ...]


class VerificationReconciler(Shell[Sight, VerificationDecision]):
    """Runs the checks. The composition root adds `on_metalnode`, `on_lease` and `on_pod` to the
    informers (after the guard) and gives `reconcile` to the workers of `queue`. `view` is the sight
    of the MetalNodes' informer: while it is blind, no True ends by its age."""

    def __init__(
        self,
        *,
        client: KubeClient,
        clock: Clock,
        recorder: EventRecorder,
        guard: CacheGuard[CachedMetalNode],
        caches: VerificationCaches,
        view: View,
        queue: WorkQueue,
        settings: VerificationSettings,
        metrics: VerificationMetrics,
    ) -> None:
        super().__init__(
            clock=clock, writer=StatusWriter(client, OWNERSHIP), recorder=recorder, guard=guard
        )
        self._client = client
        self._caches = caches
        self._view = view
        self._deferred = Deferred(queue, view)
        self._queue = queue
        self._settings = settings
        self._metrics = metrics
        self._memory: dict[str, Memory] = {}
        self._pace = Pace(settings.checks.intake / _LOOKS_PER_INTAKE)
        self.slots = CheckSlots(settings.checks.max_concurrent, caches, queue.add)

    # Handlers -----------------------------------------------------------------------------------
    def on_metalnode(self, change: Change[CachedMetalNode]) -> None:
        if node_matters(change):
            self._queue.add(change.key, initial=change.first_sight)
        if is_running(change.old):
            self.slots.look()

    def on_lease(self, change: Change[CachedLease]) -> None:
        if lease_matters(change):
            for node in self._caches.nodes_of_lease(change.key):
                later = self._pace.next(node.key, change.at.mono)
                if later is None:
                    self._queue.add(node.key, initial=change.first_sight)
                else:
                    self._queue.add_at(node.key, later)

    def on_pod(self, change: Change[CachedPod]) -> None:
        pod = change.new or change.old
        for key in self._caches.keys_of_pod(pod) if pod is not None else ():
            self._queue.add(key, initial=change.first_sight)
        if change.new is None or change.new.metadata.deletion_timestamp is not None:
            self.slots.look()

    # One run ------------------------------------------------------------------------------------
    async def reconcile(self, key: str) -> Outcome:
        """One run. Raises ApiError, TerminalError."""
        try:
            outcome = await super().reconcile(key)
        except BaseException:
            self.slots.withdraw(key)  # a start that failed must not hold up others
            raise
        finally:
            self.slots.ended(key)
            self._metrics.slots(self.slots.in_use(), self.slots.waiting)
        if key not in self._caches.nodes:
            await self._sweep_after(key)
        return outcome

    def forget(self, key: str) -> None:
        self._memory.pop(key, None)
        self._pace.forget(key)
        self.slots.withdraw(key)

    async def observe(self, key: str, now: Now, live: Live) -> Sight | None:
        node = self._caches.nodes.get(key)
        if node is not None and live:
            node = await self._live_node(key)
        if node is None or node.metadata.deletion_timestamp is not None:
            return None
        lease = self._caches.leases.get(lease_key(node))
        if Live.EVIDENCE in live:
            lease = await read_live(self._client, LEASES, CachedLease, lease_key(node))
        pods = self._caches.pods_of(node)
        pod, gone = None, False
        book = Bookkeeping.of(node.status.verification)
        if book.running:
            pod = next((p for p in pods if p.metadata.uid == book.pod_uid), None)
            if pod is None or Live.EVIDENCE in live:
                pod = await self._live_pod(node, book.pod_uid)
                gone = pod is None
        calm = self._view.sight_of(key).calm_until(self._settings.checks.reverify, ZERO)
        seen = Seen(node, report_text(lease), pod, gone, calm, self._memory.get(key))
        return Sight(Target.of(node, node.status), seen, pods)

    def decide(self, seen: Sight, now: Now) -> VerificationDecision:
        settings = self._settings
        decision = verification.decide(seen.seen, settings.checks, settings.policy, now)
        key = seen.target.key
        if decision.result is not None:
            self.slots.ending(key)
        if decision.plan is None:
            self.slots.withdraw(key)
        elif self.slots.request(key, decision.plan.last_start):
            return verification.start(decision, settings.checks, now)
        return decision

    async def act(self, applied: Applied[Sight, VerificationDecision]) -> None:
        decision = applied.decision
        key = applied.target.key
        self._memory[key] = decision.memory
        blind = applied.seen.seen.calm_until == FOREVER
        self._deferred.note(key, decision.wake_at, blind=blind)
        if decision.result is not None:
            self._metrics.ended(decision.result)
            log.info("check ended", metalnode=key, result=decision.result.value)
        await self._sweep(applied)
        if decision.starting is not None:
            await self._launch(applied, decision.starting)

    # Starting a check ---------------------------------------------------------------------------
    async def _launch(self, applied: Applied[Sight, VerificationDecision], plan: Plan) -> None:
        """The second and the third write of a start."""
        node, key = applied.seen.seen.node, applied.target.key
        pod = render_pod(
            node,
            plan.inputs,
            name=pod_name(node.metadata.name, secrets.token_hex(5)),
            policy=self._settings.policy,
            checks=self._settings.checks,
            settings=self._settings.pods,
        )
        try:
            created = await self._client.create(PODS, pod)
        except (Forbidden, Invalid, NotFound, TooLarge, Unavailable) as error:
            if isinstance(error, Unavailable) and error.reason != _NO_WEBHOOK:
                raise
            self._refused(applied, error)
            return
        uid = str(created["metadata"]["uid"])
        named = await self._name_pod(applied, uid)
        if named is not None:
            self.slots.started(key, named.resource_version)
            log.info("check started", metalnode=key, pod=created["metadata"]["name"], uid=uid)
        else:
            self.slots.withdraw(key)
            await self._delete(node.metadata.namespace, created["metadata"]["name"], uid)

    def _refused(self, applied: Applied[Sight, VerificationDecision], error: ApiError) -> None:
        """The API server takes no such pod: the next run, at once, writes down why."""
        key, decision = applied.target.key, applied.decision
        answer = NoAnswer(
            one_line(f"the API server refused the verifier pod: {error.message}"),
            "Check the namespace's quota, its pod security level and admission policies, and the"
            " rights of the controller.",
        )
        refusal = Refusal(decision.book.last_start, answer)
        self._memory[key] = replace(decision.memory, refusal=refusal)
        self.slots.withdraw(key)
        self._queue.add(key)

    async def _name_pod(
        self, applied: Applied[Sight, VerificationDecision], pod_uid: str
    ) -> Target | None:
        """Write podUID; None if the start is not ours any more."""
        book = applied.decision.book
        wanted = self.writer.part(self._with_book(applied.decision, book.named(pod_uid)))
        target = applied.target
        for _ in range(ATTEMPTS):
            try:
                return await self.write(target, wanted)
            except NotFound:
                return None
            except Conflict:
                node = await self._live_node(target.key)
                if node is None or node.metadata.uid != target.uid:
                    return None
                if Bookkeeping.of(node.status.verification).last_start != book.last_start:
                    return None
                target = Target.of(node, node.status)
        raise Conflict(f"{target.key} changes faster than podUID can be written", status=409)

    @staticmethod
    def _with_book(decision: VerificationDecision, book: Bookkeeping) -> Mapping[str, Any]:
        return {**(decision.status or {}), "verification": book.to_json()}

    # Pods that are done with --------------------------------------------------------------------
    async def _sweep(self, applied: Applied[Sight, VerificationDecision]) -> None:
        """Delete every pod of this MetalNode but the one that is running."""
        decision, before = applied.decision, applied.seen.seen.node
        known = Bookkeeping.of(before.status.verification).pod_uid
        running = decision.book.pod_uid if decision.book.running else None
        mine = [pod for pod in applied.seen.pods if pod.metadata.uid == known != running]
        strangers = [p for p in applied.seen.pods if p.metadata.uid not in (known, running)]
        for pod in _undeleted(mine):
            await self._delete(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)
        await self._sweep_orphans(applied.target.key, strangers)

    async def _sweep_after(self, key: str) -> None:
        """Delete what a MetalNode that is gone has left, if garbage collection has not yet."""
        await self._sweep_orphans(key, self._caches.pods_left_by(key))

    async def _sweep_orphans(self, key: str, pods: Iterable[CachedPod]) -> None:
        """A few at a time: whoever may create pods may name this MetalNode in thousands of them,
        and the others' checks need this worker, too."""
        found = _undeleted(pods)
        for pod in found[:_SWEPT_PER_RUN]:
            if await self._is_orphan(key, pod):
                await self._delete(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)
        if len(found) > _SWEPT_PER_RUN:
            self._queue.add_at(key, self.clock.monotonic() + SECOND)

    async def _is_orphan(self, key: str, pod: CachedPod) -> bool:
        node = await self._live_node(key)
        if node is None:
            return True
        return Bookkeeping.of(node.status.verification).pod_uid != pod.metadata.uid

    async def _delete(self, namespace: str, name: str, uid: str) -> None:
        with suppress(NotFound, Conflict):  # gone already, or a namesake: neither is ours to delete
            await self._client.delete(PODS, name, namespace, uid=uid)

    # Live reads ---------------------------------------------------------------------------------
    async def _live_node(self, key: str) -> CachedMetalNode | None:
        return await read_live(self._client, METALNODES, CachedMetalNode, key)

    async def _live_pod(self, node: CachedMetalNode, uid: str | None) -> CachedPod | None:
        # Only its UID is known, and that is no field selector.
        found = await self._client.list(
            PODS,
            node.metadata.namespace,
            label_selector=f"{METALNODE_UID_LABEL}={node.metadata.uid}",
        )
        for item in found:
            if item["metadata"]["uid"] == uid:
                return msgspec.convert(item, CachedPod)
        return None


def _undeleted(pods: Iterable[CachedPod]) -> list[CachedPod]:
    return [pod for pod in pods if pod.metadata.deletion_timestamp is None]
