"""What queues, workers and reflectors tell the metrics: three small ports.

`llmkube.metrics` implements them with the ecosystem's names; a caller that wants no metrics
passes `SILENT`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol


class QueueMetrics(Protocol):
    """The `workqueue_*` family of one queue."""

    def observe_queue(
        self,
        depth: Callable[[], int],
        unfinished: Callable[[], tuple[timedelta, timedelta]],
    ) -> None:
        """Take depth, and the (sum, longest) of the present runs, from the queue when scraped."""

    def added(self) -> None: ...

    def retried(self) -> None: ...

    def waited(self, duration: timedelta) -> None: ...

    def worked(self, duration: timedelta) -> None: ...


class ReconcileMetrics(Protocol):
    """The `controller_runtime_reconcile_*` family of one controller."""

    def workers(self, limit: int) -> None: ...

    def started(self) -> None: ...

    def finished(self, result: str, duration: timedelta) -> None:
        """`result` is success, requeue_after, or error."""

    def abandoned(self) -> None:
        """A run that `started` was cancelled: it has no result."""

    def terminal_error(self) -> None: ...

    def panicked(self) -> None: ...

    def timed_out(self) -> None: ...


class ReflectorMetrics(Protocol):
    """Health of one informer's watches."""

    def observe_event_age(self, age: Callable[[], timedelta | None]) -> None:
        """Take the age of the last event or bookmark from the informer when scraped."""

    def relisted(self) -> None: ...

    def restarted(self, reason: str) -> None: ...

    def bad_object(self) -> None: ...


def _ignore(*_args: object) -> None:
    pass


class Silent:
    """All three ports, telling nobody."""

    observe_queue = added = retried = waited = worked = staticmethod(_ignore)
    workers = started = finished = abandoned = staticmethod(_ignore)
    terminal_error = panicked = timed_out = staticmethod(_ignore)
    observe_event_age = relisted = restarted = bad_object = staticmethod(_ignore)


SILENT = Silent()
