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
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

QUEUE_BUCKETS = tuple(10.0**exponent for exponent in range(-8, 4))
# fmt: off
RECONCILE_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9,
    1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5, 6, 7, 8, 9, 10, 15, 20, 25, 30, 40, 50,
    60,
)
REST_LATENCY_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
# fmt: on


RECONCILE_RESULTS = ("error", "requeue_after", "requeue", "success")


class Metrics:
    """All metrics of one program, in a registry of their own."""

    def __init__(self) -> None:
        # Half of all lines, and no dashboard reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
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

    def waited(self, duration: timedelta) -> None:
        """A key was handed to a worker after waiting that long."""
        self._waited.observe(duration.total_seconds())

    def worked(self, duration: timedelta) -> None:
        """A worker is done with a key after that long."""
        self._worked.observe(duration.total_seconds())

    def observe_queue(
        self,
        depth: Callable[[], int],
        unfinished: Callable[[], tuple[timedelta, timedelta]],
    ) -> None:
        """Where the gauges are read from at each scrape; `unfinished` is (sum, longest)."""
        self._depth.set_function(depth)
        self._unfinished.set_function(lambda: unfinished()[0].total_seconds())
        self._longest.set_function(lambda: unfinished()[1].total_seconds())


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
            result: families.total.labels(controller, result) for result in RECONCILE_RESULTS
        }
        self._errors = families.errors.labels(controller)
        self._terminal = families.terminal.labels(controller)
        self._panics = families.panics.labels(controller)
        self._timeouts = families.timeouts.labels(controller)
        self._workers = families.workers.labels(controller)
        self._active = families.active.labels(controller)
        self._seconds = families.seconds.labels(controller)

    def workers(self, limit: int) -> None:
        """How many workers the controller has."""
        self._workers.set(limit)

    def started(self) -> None:
        """A worker began a reconcile."""
        self._active.inc()

    def finished(self, result: str, duration: timedelta) -> None:
        """A reconcile that was `started` ended: error, requeue_after, requeue or success."""
        self._active.dec()
        self._total[result].inc()
        self._seconds.observe(duration.total_seconds())
        if result == "error":
            self._errors.inc()

    def abandoned(self) -> None:
        """A reconcile that was `started` was cancelled: it has no result."""
        self._active.dec()

    def terminal_error(self) -> None:
        """The error, also counted as such, is one that no retry can mend."""
        self._terminal.inc()

    def panicked(self) -> None:
        """The error, also counted as such, is a bug."""
        self._panics.inc()

    def timed_out(self) -> None:
        """The error, also counted as such, is a reconcile that took too long."""
        self._timeouts.inc()


# Reflectors ------------------------------------------------------------------------------------


class _ReflectorFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
        label = ("reflector",)
        self.event_age = Gauge(
            "llmkube_reflector_last_event_age_seconds",
            "Time since the last event or bookmark; NaN before the first",
            label,
            registry=registry,
        )
        self.relists = Counter(
            "llmkube_reflector_relists", "Lists after the first", label, registry=registry
        )
        self.restarts = Counter(
            "llmkube_reflector_restarts",
            "Lists or watches begun again, by reason",
            (*label, "reason"),
            registry=registry,
        )
        self.bad_objects = Counter(
            "llmkube_reflector_bad_objects",
            "Objects that could not be decoded and were left out",
            label,
            registry=registry,
        )


class ReflectorMetrics:
    """Health of one reflector. The reasons of its restarts are a fixed set of words."""

    def __init__(self, families: _ReflectorFamilies, name: str) -> None:
        self._name = name
        self._event_age = families.event_age.labels(name)
        self._relists = families.relists.labels(name)
        self._restarts = families.restarts
        self._bad_objects = families.bad_objects.labels(name)

    def observe_event_age(self, age: Callable[[], timedelta | None]) -> None:
        """Where the age of the last event or bookmark is read from at each scrape."""

        def seconds() -> float:
            found = age()
            return float("nan") if found is None else found.total_seconds()

        self._event_age.set_function(seconds)

    def relisted(self) -> None:
        """The cache is listed again."""
        self._relists.inc()

    def restarted(self, reason: str) -> None:
        """A list or watch is begun again."""
        self._restarts.labels(self._name, reason).inc()

    def bad_object(self) -> None:
        """An object was left out."""
        self._bad_objects.inc()


# Requests --------------------------------------------------------------------------------------


class _RestFamilies:
    def __init__(self, registry: CollectorRegistry) -> None:
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
        self.seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Time until the whole answer is read (of a watch: until its headers)",
            ("verb", "host"),
            buckets=REST_LATENCY_BUCKETS,
            registry=registry,
        )


class RestMetrics:
    """Requests to one API server. The families of sizes are left out: each would cost a write
    as much as its time does, and controller-runtime does not register them either."""

    ERROR = "<error>"  # client-go's label for requests without an answer

    def __init__(self, families: _RestFamilies, host: str) -> None:
        self._families = families
        self._host = host
        self._requests: dict[tuple[str, int], Counter] = {}
        self._seconds: dict[str, Histogram] = {}

    def answered(self, method: str, status: int, took: timedelta) -> None:
        """An answer came."""
        counter = self._requests.get((method, status))
        if counter is None:
            counter = self._families.requests.labels(str(status), method, self._host)
            self._requests[method, status] = counter
        counter.inc()
        histogram = self._seconds.get(method)
        if histogram is None:
            histogram = self._seconds[method] = self._families.seconds.labels(method, self._host)
        histogram.observe(took.total_seconds())

    def failed(self, method: str) -> None:
        """No answer came."""
        self._families.requests.labels(self.ERROR, method, self._host).inc()

    def repeated(self, method: str, status: int | None) -> None:
        """The transport sends a request once more, after this answer or none."""
        code = self.ERROR if status is None else str(status)
        self._families.retries.labels(code, method, self._host).inc()


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
