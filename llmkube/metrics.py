"""Metrics under the names that the ecosystem's dashboards and alerts already know.

`Metrics` owns one registry and is passed explicitly: nothing is global, so two controllers in one
process do not add up. The families follow client-go, component-base and controller-runtime (names,
labels, buckets); what has no standard name is `llmkube_*`. Every label has a bounded set of
values: names of controllers, reasons from enums, never names of objects. Per-object series are a
collector of their own over the caches, registered by the controller.

Each part of the program gets a handle with resolved children (`QueueMetrics`, `RestMetrics`, …),
so that counting costs a lookup less on the hot paths.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

QUEUE_BUCKETS = tuple(10.0**exponent for exponent in range(-8, 4))
# fmt: off
RECONCILE_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9,
    1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5, 6, 7, 8, 9, 10, 15, 20, 25, 30, 40, 50,
    60,
)
REST_LATENCY_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
REST_SIZE_BUCKETS = (
    64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216,
)
PROCESSING_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# fmt: on


class ReconcileResult(StrEnum):
    """How a reconcile ended: the values of `controller_runtime_reconcile_total{result}`."""

    ERROR = "error"
    REQUEUE_AFTER = "requeue_after"
    REQUEUE = "requeue"
    SUCCESS = "success"


class RestartReason(StrEnum):
    """Why a reflector opened its stream again."""

    END = "end"
    """The server ended the stream, as it does by design."""
    SHORT = "short"
    """It ended at once, without an event."""
    SILENCE = "silence"
    BROKEN = "broken"
    EXPIRED = "expired"
    """410: the resourceVersion is gone."""
    THROTTLED = "throttled"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    MISSING = "missing"
    UNAVAILABLE = "unavailable"
    BAD_EVENT = "bad_event"


class Metrics:
    """All metrics of one program, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._queues = _QueueFamilies(self.registry)
        self._reconciles = _ReconcileFamilies(self.registry)
        self._reflectors = _ReflectorFamilies(self.registry)
        self._rest = _RestFamilies(self.registry)
        self._leaders = _LeaderFamilies(self.registry)

    def queue(self, name: str) -> QueueMetrics:
        """The metrics of one work queue; its controller has the same name."""
        return QueueMetrics(self._queues, name)

    def reconcile(self, controller: str) -> ReconcileMetrics:
        """The metrics of one controller's reconciles, pre-set to 0."""
        return ReconcileMetrics(self._reconciles, controller)

    def reflector(self, name: str) -> ReflectorMetrics:
        """The metrics of one reflector, pre-set to 0."""
        return ReflectorMetrics(self._reflectors, name)

    def rest(self, server: str) -> RestMetrics:
        """The metrics of requests to the API server at that URL."""
        return RestMetrics(self._rest, urlsplit(server).netloc)

    def leader(self, name: str) -> LeaderMetrics:
        """The metrics of one leader election."""
        return LeaderMetrics(self._leaders, name)


# Work queues -----------------------------------------------------------------------------------


class _QueueFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(name, help_text, labels, registry=registry)

        labels = ("name", "controller")
        self.depth = gauge("workqueue_depth", "Keys that wait, without those that wait for a time")
        self.adds = Counter("workqueue_adds", "Keys added", labels, registry=registry)
        self.retries = Counter("workqueue_retries", "Keys put back", labels, registry=registry)
        self.unfinished = gauge(
            "workqueue_unfinished_work_seconds", "Sum of the ages of the reconciles in progress"
        )
        self.longest = gauge(
            "workqueue_longest_running_processor_seconds", "Age of the oldest reconcile in progress"
        )
        self.waited = Histogram(
            "workqueue_queue_duration_seconds",
            "How long a key waited before its reconcile",
            labels,
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self.worked = Histogram(
            "workqueue_work_duration_seconds",
            "How long a reconcile took",
            labels,
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )


class QueueMetrics:
    """One work queue. Gauges are read from the queue when scraped, so they cannot drift."""

    def __init__(self, families: _QueueFamilies, name: str) -> None:
        self._depth = families.depth.labels(name, name)
        self._adds = families.adds.labels(name, name)
        self._retries = families.retries.labels(name, name)
        self._unfinished = families.unfinished.labels(name, name)
        self._longest = families.longest.labels(name, name)
        self._waited = families.waited.labels(name, name)
        self._worked = families.worked.labels(name, name)

    def added(self) -> None:
        self._adds.inc()

    def retried(self) -> None:
        self._retries.inc()

    def started(self, waited: timedelta) -> None:
        """A key was handed to a worker after waiting that long."""
        self._waited.observe(waited.total_seconds())

    def finished(self, worked: timedelta) -> None:
        """A worker is done with a key after that long."""
        self._worked.observe(worked.total_seconds())

    def observe(
        self,
        depth: Callable[[], int],
        unfinished: Callable[[], timedelta],
        longest: Callable[[], timedelta],
    ) -> None:
        """Where the gauges are read from, at each scrape."""
        self._depth.set_function(depth)
        self._unfinished.set_function(lambda: unfinished().total_seconds())
        self._longest.set_function(lambda: longest().total_seconds())


# Reconciles ------------------------------------------------------------------------------------


class _ReconcileFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"controller_runtime_{name}", help_text, label, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"controller_runtime_{name}", help_text, label, registry=registry)

        label = ("controller",)
        self.total = Counter(
            "controller_runtime_reconcile",
            "Reconciles, by how they ended",
            ("controller", "result"),
            registry=registry,
        )
        self.errors = counter("reconcile_errors", "Reconciles that failed")
        self.terminal = counter(
            "terminal_reconcile_errors", "Reconciles that failed in a way no retry can mend"
        )
        self.panics = counter("reconcile_panics", "Reconciles that hit a bug")
        self.timeouts = counter("reconcile_timeouts", "Reconciles that took too long")
        self.workers = gauge("max_concurrent_reconciles", "Workers of the controller")
        self.active = gauge("active_workers", "Workers in a reconcile now")
        self.seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "How long reconciles took",
            label,
            buckets=RECONCILE_BUCKETS,
            registry=registry,
        )


class ReconcileMetrics:
    """One controller's reconciles."""

    def __init__(self, families: _ReconcileFamilies, controller: str) -> None:
        self._total = {
            result: families.total.labels(controller, result.value) for result in ReconcileResult
        }
        self._errors = families.errors.labels(controller)
        self._terminal = families.terminal.labels(controller)
        self._panics = families.panics.labels(controller)
        self._timeouts = families.timeouts.labels(controller)
        self._workers = families.workers.labels(controller)
        self._active = families.active.labels(controller)
        self._seconds = families.seconds.labels(controller)

    def concurrency(self, workers: int) -> None:
        """How many workers the controller has."""
        self._workers.set(workers)

    def began(self) -> None:
        self._active.inc()

    def ended(self, result: ReconcileResult, took: timedelta) -> None:
        """A reconcile that `began` ended. An error is also counted by its kind, if it has one."""
        self._active.dec()
        self._total[result].inc()
        self._seconds.observe(took.total_seconds())
        if result is ReconcileResult.ERROR:
            self._errors.inc()

    def abandoned(self) -> None:
        """A reconcile that `began` was cancelled: it has no result."""
        self._active.dec()

    def terminal(self) -> None:
        self._terminal.inc()

    def panicked(self) -> None:
        self._panics.inc()

    def timed_out(self) -> None:
        self._timeouts.inc()


# Reflectors ------------------------------------------------------------------------------------


class _ReflectorFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, ("reflector", *labels), registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(name, help_text, ("reflector",), registry=registry)

        self.event_age = gauge(
            "llmkube_reflector_last_event_age_seconds",
            "Time since the last event or bookmark; NaN before the first",
        )
        self.synced = gauge("llmkube_reflector_synced", "1 once the cache holds a whole list")
        self.objects = gauge("llmkube_reflector_objects", "Objects in the cache")
        self.lists = counter("llmkube_reflector_lists", "Lists and re-lists begun")
        self.events = counter("llmkube_reflector_events", "Watch events received")
        self.restarts = counter(
            "llmkube_reflector_watch_restarts", "Watches opened again, by reason", "reason"
        )
        self.bad_objects = counter(
            "llmkube_reflector_bad_objects", "Objects that could not be decoded and were left out"
        )
        self.processing = Histogram(
            "informer_processing_latency_seconds",
            "How long handling one batch of events took",
            ("name",),
            buckets=PROCESSING_BUCKETS,
            registry=registry,
        )


class ReflectorMetrics:
    """One reflector and its cache."""

    def __init__(self, families: _ReflectorFamilies, name: str) -> None:
        self._event_age = families.event_age.labels(name)
        self._synced = families.synced.labels(name)
        self._objects = families.objects.labels(name)
        self._lists = families.lists.labels(name)
        self._events = families.events.labels(name)
        self._restarts = {
            reason: families.restarts.labels(name, reason.value) for reason in RestartReason
        }
        self._bad_objects = families.bad_objects.labels(name)
        self._processing = families.processing.labels(name)

    def listed(self) -> None:
        self._lists.inc()

    def received(self, events: int, took: timedelta) -> None:
        """A batch of watch events was handled."""
        self._events.inc(events)
        self._processing.observe(took.total_seconds())

    def restarted(self, reason: RestartReason) -> None:
        self._restarts[reason].inc()

    def bad_object(self) -> None:
        self._bad_objects.inc()

    def observe(
        self,
        event_age: Callable[[], timedelta | None],
        synced: Callable[[], bool],
        objects: Callable[[], int],
    ) -> None:
        """Where the gauges are read from, at each scrape."""

        def age() -> float:
            found = event_age()
            return float("nan") if found is None else found.total_seconds()

        self._event_age.set_function(age)
        self._synced.set_function(lambda: float(synced()))
        self._objects.set_function(objects)


# Requests --------------------------------------------------------------------------------------


class _RestFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help_text, ("verb", "host"), buckets=buckets, registry=registry)

        self.requests = Counter(
            "rest_client_requests",
            "Requests to the API server; code <error> where no answer came",
            ("code", "method", "host"),
            registry=registry,
        )
        self.retries = Counter(
            "rest_client_request_retries",
            "Requests sent once more by the transport",
            ("code", "verb", "host"),
            registry=registry,
        )
        self.seconds = histogram(
            "rest_client_request_duration_seconds",
            "Time until the whole answer (of a watch: until its headers)",
            REST_LATENCY_BUCKETS,
        )
        self.sent = histogram(
            "rest_client_request_size_bytes", "Size of request bodies", REST_SIZE_BUCKETS
        )
        self.received = histogram(
            "rest_client_response_size_bytes", "Size of response bodies", REST_SIZE_BUCKETS
        )


class _Verb:
    """The children of one HTTP method, resolved once."""

    __slots__ = ("codes", "received", "seconds", "sent")

    def __init__(self, families: _RestFamilies, method: str, host: str) -> None:
        self.codes: dict[str, Counter] = {}
        self.seconds = families.seconds.labels(method, host)
        self.sent = families.sent.labels(method, host)
        self.received = families.received.labels(method, host)


class RestMetrics:
    """Requests to one API server."""

    ERROR = "<error>"  # client-go's label for requests without an answer

    def __init__(self, families: _RestFamilies, host: str) -> None:
        self._families = families
        self._host = host
        self._verbs: dict[str, _Verb] = {}

    def answered(
        self, method: str, status: int, took: timedelta, sent: int, received: int | None
    ) -> None:
        """An answer came. `received` None: its size is not known (a watch)."""
        verb = self._verb(method)
        self._count(verb, method, str(status))
        verb.seconds.observe(took.total_seconds())
        verb.sent.observe(sent)
        if received is not None:
            verb.received.observe(received)

    def failed(self, method: str) -> None:
        """No answer came."""
        self._count(self._verb(method), method, self.ERROR)

    def repeated(self, method: str, status: int | None) -> None:
        """The transport sends a request once more, after this answer or none."""
        code = self.ERROR if status is None else str(status)
        self._families.retries.labels(code, method, self._host).inc()

    def _verb(self, method: str) -> _Verb:
        verb = self._verbs.get(method)
        if verb is None:
            verb = self._verbs[method] = _Verb(self._families, method, self._host)
        return verb

    def _count(self, verb: _Verb, method: str, code: str) -> None:
        counter = verb.codes.get(code)
        if counter is None:
            counter = self._families.requests.labels(code, method, self._host)
            verb.codes[code] = counter
        counter.inc()


# Leader election -------------------------------------------------------------------------------


class _LeaderFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.status = Gauge(
            "leader_election_master_status",
            "1 while this process leads",
            ("name",),
            registry=registry,
        )
        self.slowpath = Counter(
            "leader_election_slowpath",
            "Renewals that had to read the Lease first",
            ("name",),
            registry=registry,
        )


class LeaderMetrics:
    """One leader election."""

    def __init__(self, families: _LeaderFamilies, name: str) -> None:
        self._status = families.status.labels(name)
        self._slowpath = families.slowpath.labels(name)

    def leading(self, yes: bool) -> None:
        self._status.set(1 if yes else 0)

    def slow_path(self) -> None:
        self._slowpath.inc()
