"""The report: everything this machine claims, gathered anew for each beat.

A claim that cannot be gathered is left out or kept as it was; the beat itself never waits for it
long. What the text may look like is `llmkube.api.report`'s contract.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta

import llmkube
from llmkube.agent.discovery import CandidateFinder
from llmkube.agent.hardware import read_capacity
from llmkube.agent.identity import Identity, IngressCertificate, certificate_for, load_certificate
from llmkube.agent.ingress import Ingress, tls_context
from llmkube.agent.statedir import StateDir
from llmkube.api.report import AgentReport, ReportedCandidate, ReportedCapacity, render_report
from llmkube.api.spki import SpkiPin
from llmkube.clock import Clock
from llmkube.log import get_logger

HARDWARE_RETRY = timedelta(hours=1)

log = get_logger(__name__)


def make_report(
    certificate: IngressCertificate,
    identity: Identity,
    port: int,
    candidates: tuple[ReportedCandidate, ...],
    capacity: ReportedCapacity,
) -> AgentReport:
    """The report as a value."""
    return AgentReport(
        agent_version=f"v{llmkube.__version__}",
        ingress_port=port,
        ingress_spki=SpkiPin(identity.spki),
        ingress_certificate=certificate.der,
        certificate_uid=certificate.uid,
        candidates=candidates,
        capacity=capacity,
    )


@dataclass(slots=True)
class Reporter:
    """Gathers the report, and keeps the ingress serving the certificate that it names."""

    state: StateDir
    identity: Identity
    ingress: Ingress
    port: int
    finder: CandidateFinder
    clock: Clock
    looked: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once the system has been asked for its hardware."""
    _certificate: IngressCertificate | None = field(default=None, init=False)
    _capacity: ReportedCapacity = field(default_factory=ReportedCapacity, init=False)

    async def run(self) -> None:
        """Find out the hardware: once, or again each hour until the system tells."""
        while True:
            self._capacity = await read_capacity()
            self.looked.set()
            if self._capacity.chip is not None and self._capacity.memory_bytes is not None:
                log.info("hardware found", **dataclasses.asdict(self._capacity))
                return
            await asyncio.sleep(HARDWARE_RETRY.total_seconds())

    def serve_last(self) -> None:
        """Serve with the certificate of the last run, before the API server was ever asked:
        an outage must not take the LLM away from those who know the way. Raises StateError."""
        certificate = load_certificate(self.state.path, self.identity)
        if certificate is not None:
            self._serve(certificate)

    async def render(self, uid: str) -> str:
        """The report for the MetalNode with this UID. Raises StateError, ssl.SSLError."""
        if self._certificate is None or self._certificate.uid != uid:
            now = self.clock.now().wall
            self._serve(
                await asyncio.to_thread(certificate_for, self.state, self.identity, uid, now)
            )
        assert self._certificate is not None
        discovery = await self.finder.find()
        return render_report(
            make_report(
                self._certificate, self.identity, self.port, discovery.candidates, self._capacity
            )
        )

    def _serve(self, certificate: IngressCertificate) -> None:
        self.ingress.use(tls_context(certificate, self.identity.path))
        self._certificate = certificate
