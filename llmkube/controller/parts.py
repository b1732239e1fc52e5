"""The pieces of a running controller, built from the options and connected to each other.

Informers are shared: whichever reconcilers are switched on, there is one cache of each resource.
Handlers are attached in leaders and followers alike, so that a new leader has seen the heartbeats
that the old one saw. Read `run` for what happens to the pieces.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

from llmkube.api.cached import (
    CachedFederatedCluster,
    CachedLease,
    CachedMeta,
    CachedMetalNode,
    CachedPod,
)
from llmkube.api.names import VERIFIER_SELECTOR
from llmkube.clock import ZERO, Clock
from llmkube.controller.options import ControllerName, Options
from llmkube.informers.guard import CacheGuard
from llmkube.informers.informer import Informer
from llmkube.informers.queue import WorkQueue
from llmkube.informers.store import Index
from llmkube.informers.worker import Outcome
from llmkube.kube.client import KubeClient
from llmkube.kube.events import EventRecorder
from llmkube.kube.resources import (
    FEDERATEDCLUSTERS,
    LEASES,
    METALNODES,
    PODS,
    SERVICEACCOUNTS,
    Resource,
)
from llmkube.kube.transport import PATIENCE
from llmkube.kube.watch import Pace, at_once
from llmkube.metrics import Metrics, ReconcileMetrics
from llmkube.reconcilers import heartbeat, verification_caches
from llmkube.reconcilers.collectors import (
    FEDERATEDCLUSTER_FAMILIES,
    METALNODE_FAMILIES,
    ObjectCollector,
)
from llmkube.reconcilers.federatedcluster import FederatedClusterReconciler
from llmkube.reconcilers.heartbeat import HeartbeatReconciler, Sources
from llmkube.reconcilers.verification import VerificationReconciler, VerificationSettings
from llmkube.reconcilers.verification_caches import VerificationCaches
from llmkube.reconcilers.verification_metrics import VerificationMetrics
from llmkube.rules.liveness import Record
from llmkube.rules.verifier_pod import PodSettings
from llmkube.verifier.policy import AddressPolicy

T = TypeVar("T", bound=Any)
RecordOf = Callable[[T], Record | None]

NOT_NODE_LEASES = "metadata.namespace!=kube-node-lease"
"""The kubelets' own Leases are many, change often, and are none of our business."""


@dataclass(frozen=True, slots=True)
class Controller:
    """One reconciler with its queue and the informers that it waits for.

    The queue is paused except while workers take from it: handlers write their books in leaders
    and followers alike, and `enqueue_all` at the start of each term covers what they did not queue.
    """

    name: ControllerName
    queue: WorkQueue
    reconcile: Callable[[str], Awaitable[Outcome]]
    enqueue_all: Callable[[], None]
    informers: tuple[Informer[Any], ...]
    metrics: ReconcileMetrics


class Parts:
    """Everything that `run` starts. Construction connects it and starts nothing."""

    def __init__(
        self,
        options: Options,
        client: KubeClient,
        recorder: EventRecorder,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.metrics = metrics
        self.informers: dict[str, Informer[Any]] = {}
        self.controllers: list[Controller] = []
        self.collectors: list[ObjectCollector] = []
        self._options = options
        self._client = client
        self._recorder = recorder
        self._clock = clock
        self._build()

    def _build(self) -> None:
        wanted = self._options.controllers
        if wanted & {ControllerName.HEARTBEAT, ControllerName.VERIFICATION}:
            self._add_metal_controllers(wanted)
        if ControllerName.FEDERATEDCLUSTER in wanted:
            self._add_federatedcluster()

    def _add_metal_controllers(self, wanted: frozenset[ControllerName]) -> None:
        indexes: dict[str, Index[CachedMetalNode]] = {}
        if ControllerName.HEARTBEAT in wanted:
            indexes |= heartbeat.METALNODE_INDEXES
        if ControllerName.VERIFICATION in wanted:
            indexes |= verification_caches.NODE_INDEXES
        nodes: Informer[CachedMetalNode] = self._informer(
            METALNODES,
            CachedMetalNode,
            indexes=indexes,
            pace=self._gathering,
        )
        guard = nodes.guard()
        leases: Informer[CachedLease] = self._informer(
            LEASES,
            CachedLease,
            field_selector=None if self._options.namespaces else NOT_NODE_LEASES,
            pace=self._gathering,
        )
        record_of: RecordOf[CachedMetalNode] = _no_record
        if ControllerName.HEARTBEAT in wanted:
            record_of = self._add_heartbeat(nodes, leases, guard)
        self.collectors.append(ObjectCollector(METALNODE_FAMILIES, nodes.store.values, record_of))
        if ControllerName.VERIFICATION in wanted:
            self._add_verification(nodes, leases, guard)

    def _add_heartbeat(
        self,
        nodes: Informer[CachedMetalNode],
        leases: Informer[CachedLease],
        guard: CacheGuard[CachedMetalNode],
    ) -> RecordOf[CachedMetalNode]:
        accounts: Informer[CachedMeta] = self._informer(
            SERVICEACCOUNTS, CachedMeta, metadata_only=True
        )
        queue = self._queue(ControllerName.HEARTBEAT)
        reconciler = HeartbeatReconciler(
            self._client,
            Sources(nodes, leases, accounts),
            queue,
            self._recorder,
            guard,
            self._clock,
            self._options.tuning.heartbeat,
        )
        reconciler.attach()
        self._add(
            ControllerName.HEARTBEAT,
            queue,
            reconciler.reconcile,
            reconciler.enqueue_all,
            (nodes, leases, accounts),
        )
        return reconciler.record_of

    def _add_verification(
        self,
        nodes: Informer[CachedMetalNode],
        leases: Informer[CachedLease],
        guard: CacheGuard[CachedMetalNode],
    ) -> None:
        pods: Informer[CachedPod] = self._informer(
            PODS,
            CachedPod,
            label_selector=VERIFIER_SELECTOR,
            indexes=verification_caches.POD_INDEXES,
        )
        queue = self._queue(ControllerName.VERIFICATION)
        caches = VerificationCaches(nodes.store, leases.store, pods.store)
        reconciler = VerificationReconciler(
            client=self._client,
            clock=self._clock,
            recorder=self._recorder,
            guard=guard,
            caches=caches,
            view=nodes.view,
            queue=queue,
            settings=self._verification_settings(),
            metrics=VerificationMetrics(self.metrics.registry),
        )
        nodes.add_handler(reconciler.on_metalnode)
        leases.add_handler(reconciler.on_lease)
        pods.add_handler(reconciler.on_pod)

        def enqueue_all() -> None:
            # Pods too: their MetalNode may have gone while nobody led.
            owners = map(caches.keys_of_pod, pods.store.values())
            for key in dict.fromkeys(chain(nodes.store.keys(), *owners)):
                queue.add(key, initial=True)

        self._add(
            ControllerName.VERIFICATION,
            queue,
            reconciler.reconcile,
            enqueue_all,
            (nodes, leases, pods),
        )

    def _verification_settings(self) -> VerificationSettings:
        options = self._options
        return VerificationSettings(
            checks=options.tuning.checks,
            pods=PodSettings(options.verifier_image, options.verifier_image_pull_secret),
            policy=AddressPolicy(options.allow_cidrs, options.deny_cidrs),
        )

    def _add_federatedcluster(self) -> None:
        queue = self._queue(ControllerName.FEDERATEDCLUSTER)
        workers = self._options.tuning.queue.workers

        def pace() -> timedelta:
            """A push is looked at at once, unless it would have to wait for a worker anyway."""
            return PATIENCE if len(queue) > workers else ZERO

        clusters: Informer[CachedFederatedCluster] = self._informer(
            FEDERATEDCLUSTERS, CachedFederatedCluster, pace=pace
        )
        reconciler = FederatedClusterReconciler(
            self._client,
            clusters,
            queue,
            self._recorder,
            clusters.guard(),
            self._clock,
            self._options.tuning.phase,
        )
        reconciler.attach()
        self.collectors.append(
            ObjectCollector(FEDERATEDCLUSTER_FAMILIES, clusters.store.values, reconciler.record_of)
        )
        self._add(
            ControllerName.FEDERATEDCLUSTER,
            queue,
            reconciler.reconcile,
            reconciler.enqueue_all,
            (clusters,),
        )

    def _add(
        self,
        name: ControllerName,
        queue: WorkQueue,
        reconcile: Callable[[str], Awaitable[Outcome]],
        enqueue_all: Callable[[], None],
        informers: tuple[Informer[Any], ...],
    ) -> None:
        metrics = self.metrics.reconcile(name)  # 0 from the start, in followers, too
        metrics.workers(self._options.tuning.queue.workers)
        self.controllers.append(Controller(name, queue, reconcile, enqueue_all, informers, metrics))

    def _queue(self, name: ControllerName) -> WorkQueue:
        """A queue that takes no keys yet: see `Controller`."""
        settings = self._options.tuning.queue
        queue = WorkQueue(
            name,
            self._clock,
            self.metrics.queue(name),
            base=settings.backoff_base,
            cap=settings.backoff_cap,
        )
        queue.pause()
        return queue

    def _gathering(self) -> timedelta:
        return self._options.tuning.life.coalescing

    def _informer(
        self,
        resource: Resource,
        decode: type[T],
        *,
        indexes: Mapping[str, Any] | None = None,
        field_selector: str | None = None,
        label_selector: str | None = None,
        metadata_only: bool = False,
        pace: Pace = at_once,
    ) -> Informer[T]:
        informer: Informer[T] = Informer(
            self._client,
            resource,
            decode=decode,
            namespaces=self._options.namespaces if resource.namespaced else (),
            label_selector=label_selector,
            field_selector=field_selector,
            metadata_only=metadata_only,
            pace=pace,
            indexes=indexes,
            clock=self._clock,
            settings=self._options.tuning.reflector,
            metrics=self.metrics.reflector(resource.plural),
        )
        self._client.add_late_listener(informer.view.stalled)
        self.informers[resource.plural] = informer
        return informer


def _no_record(_node: CachedMetalNode) -> None:
    """Nobody observes heartbeats here."""
