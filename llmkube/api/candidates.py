"""Words about candidate addresses: where one came from, and what dialling it back found.

They are apart from `metalnode` so that the controller, which reads them in `cached` objects and in
reports, does not load the complete pydantic types: that would cost it 10 MB.
"""

from __future__ import annotations

from enum import StrEnum

from llmkube.verifier.protocol import MAX_ADDRESSES, Outcome

MAX_CANDIDATES = MAX_ADDRESSES


class CandidateResult(StrEnum):
    """What the last dial-back of an address found: the verifier's outcomes, and `Pending`."""

    PENDING = "Pending"
    """Not yet checked against the current pin and port."""
    REACHABLE = Outcome.REACHABLE.value
    TIMEOUT = Outcome.TIMEOUT.value
    REFUSED = Outcome.REFUSED.value
    PIN_MISMATCH = Outcome.PIN_MISMATCH.value
    CERTIFICATE_MISMATCH = Outcome.CERTIFICATE_MISMATCH.value
    NOT_ALLOWED = Outcome.NOT_ALLOWED.value
    ERROR = Outcome.ERROR.value


class CandidateSource(StrEnum):
    """Where an address came from, in order of preference."""

    OVERRIDE = "override"
    TAILNET = "tailnet"
    LAN = "lan"
    DOCKER_HOST = "docker-host"
    UNKNOWN = "unknown"
