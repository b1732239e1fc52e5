"""The FederatedCluster rule in kopf: an event handler for pushes, a timer for silence.

Run as `kopf run -A bench/peers/kopf_hub.py`. The timer looks every five seconds, which is what
kopf offers for "when nothing happens".
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import kopf

_KIND = ("federation.llmkube.dev", "v1alpha1", "federatedclusters")


@kopf.on.startup()
def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.finalizer = "llmkube.dev/bench"


@kopf.on.event(*_KIND)
def pushed(status: Any, spec: Any, patch: Any, **_: Any) -> None:
    settle(status, spec, patch)


@kopf.timer(*_KIND, interval=5.0)
def looked(status: Any, spec: Any, patch: Any, **_: Any) -> None:
    settle(status, spec, patch)


def settle(status: Any, spec: Any, patch: Any) -> None:
    """Write the phase if it differs."""
    phase = phase_of(status.get("lastHeartbeatTime"), spec.get("heartbeatIntervalSeconds") or 30)
    if status.get("phase") != phase:
        patch.status["phase"] = phase


def phase_of(stamp: str | None, interval: int) -> str:
    if not stamp:
        return "Unreachable"
    age = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
    if age <= 3 * interval:
        return "Connected"
    return "Stale" if age <= 10 * interval else "Unreachable"
