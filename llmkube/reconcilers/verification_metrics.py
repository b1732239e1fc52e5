"""How checks end, and how many are out there or waiting."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from llmkube.rules.check_progress import CheckResult


class VerificationMetrics:
    """The metrics of checks, pre-set to 0 for each result."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._results = Counter(
            "llmkube_metalnode_verifications",
            "Checks that ended, by result: verified (some address answered as the Mac), failed"
            " (none did), no_answer (the verifier pod gave no answer).",
            ["result"],
            registry=registry,
        )
        for result in CheckResult:
            self._results.labels(result)
        self._slots = Gauge(
            "llmkube_metalnode_verification_slots",
            "Checks by state: in_use (at most --max-concurrent-checks), waiting (due, without a"
            " slot).",
            ["state"],
            registry=registry,
        )

    def ended(self, result: CheckResult) -> None:
        self._results.labels(result).inc()

    def slots(self, in_use: int, waiting: int) -> None:
        self._slots.labels("in_use").set(in_use)
        self._slots.labels("waiting").set(waiting)
