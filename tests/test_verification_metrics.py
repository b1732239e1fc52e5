"""How checks end, as a scrape shows it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from llmkube.reconcilers.verification_metrics import VerificationMetrics
from llmkube.rules.check_progress import CheckResult


def test_every_result_has_a_series_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = VerificationMetrics(registry)
    metrics.ended(CheckResult.VERIFIED)
    metrics.slots(3, 5)
    text = generate_latest(registry).decode()
    for line in (
        'llmkube_metalnode_verifications_total{result="verified"} 1.0',
        'llmkube_metalnode_verifications_total{result="failed"} 0.0',
        'llmkube_metalnode_verifications_total{result="no_answer"} 0.0',
        'llmkube_metalnode_verification_slots{state="in_use"} 3.0',
        'llmkube_metalnode_verification_slots{state="waiting"} 5.0',
    ):
        assert line in text
