"""What valid reports say for people, kept by Lease so that an unchanged report is parsed once.

Parsing costs a certificate's parse; a reconcile that writes a heartbeat needs two strings and a
few numbers. The text itself is not kept a second time, only its hash (keyed, per process), and
Macs of the same make share one mirror.
"""

from __future__ import annotations

from functools import lru_cache

from llmkube.api.report import InvalidReport, ReportedCapacity, parse_report
from llmkube.rules.heartbeat import Mirror


class MirrorCache:
    """Mirrors by key of the Lease."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Mirror | None]] = {}

    def get(self, key: str, text: str | None) -> Mirror | None:
        """The mirror of the report `text` of that Lease; None if there is none, or it is bad."""
        if text is None:
            return None
        digest = hash(text)
        known = self._known.get(key)
        if known is None or known[0] != digest:
            known = self._known[key] = (digest, _parse(text))
        return known[1]

    def forget(self, key: str) -> None:
        """The Lease is gone."""
        self._known.pop(key, None)


def _parse(text: str) -> Mirror | None:
    try:
        report = parse_report(text)
    except InvalidReport:
        return None
    return _mirror(report.agent_version, report.capacity)


@lru_cache(maxsize=256)
def _mirror(agent_version: str, capacity: ReportedCapacity) -> Mirror:
    return Mirror.of_parts(agent_version, capacity)
