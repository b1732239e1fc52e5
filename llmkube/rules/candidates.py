"""Candidates: which addresses of a Mac are tried, in which order, and what is known of each.

The admin's `spec.hostIP` comes first, then what the Mac reports, by how far each kind of address
usually carries. Every address is brought to its canonical form, listed once, and judged by the
address policy before anything dials it. The list never has more than MAX_CANDIDATES entries, and
whatever is left out is counted, so that a message can say so.

Neighbours: `llmkube.verifier.policy` judges addresses; `checks` says what a list, with pin and
port, amounts to; `reachable` what the results mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from llmkube.api.cached import CachedCandidate
from llmkube.api.candidates import MAX_CANDIDATES, CandidateResult, CandidateSource
from llmkube.api.report import ReportedCandidate
from llmkube.verifier.policy import Address, AddressPolicy, parse_address

_RANK: Mapping[CandidateSource, int] = {source: n for n, source in enumerate(CandidateSource)}
_RESULTS = frozenset(result.value for result in CandidateResult)


class InvalidHostIP(ValueError):
    """`spec.hostIP` is not one plain IP address; the message continues "spec.hostIP …"."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One address to try. `address` is canonical; `refusal` says why the policy forbids dialling
    it, and is empty where it is allowed."""

    address: str
    source: CandidateSource
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class CandidateList:
    """The addresses in preference order, and how many were left out.

    `unreadable` were no IP addresses; `surplus` came after the first MAX_CANDIDATES. Duplicates
    are left out without being counted: nothing is lost with them.
    """

    entries: tuple[Listed, ...] = ()
    unreadable: int = 0
    surplus: int = 0

    @property
    def allowed(self) -> tuple[str, ...]:
        """The addresses that may be dialled, in preference order."""
        return tuple(entry.address for entry in self.entries if not entry.refusal)


NO_CANDIDATES = CandidateList()


def read_host_ip(text: str | None) -> str | None:
    """The canonical form of `spec.hostIP`, None where it is not set. Raises InvalidHostIP."""
    if not text:
        return None
    try:
        return str(parse_address(text))
    except ValueError as error:
        raise InvalidHostIP(str(error)) from None


@lru_cache(maxsize=256)
def list_candidates(
    host_ip: str | None, reported: tuple[ReportedCandidate, ...], policy: AddressPolicy
) -> CandidateList:
    """The candidate list of a MetalNode. `host_ip` is what `read_host_ip` returned.

    A check takes about eight decisions in a row on the same list, so the last ones are kept; few,
    because a Mac may report hundreds of addresses.
    """
    first = [ReportedCandidate(host_ip, CandidateSource.OVERRIDE)] if host_ip else []
    # sorted() is stable: within one source the Mac's own order is kept.
    ranked = [*first, *sorted(reported, key=lambda candidate: _RANK[candidate.source])]
    found: dict[Address, CandidateSource] = {}
    unreadable = 0
    for candidate in ranked:
        try:
            found.setdefault(parse_address(candidate.address), candidate.source)
        except ValueError:
            unreadable += 1
    # A report has room for hundreds, and to judge an address takes longer than to read it.
    kept = islice(found.items(), MAX_CANDIDATES)
    entries = tuple(
        Listed(str(address), source, policy.refusal(address) or "") for address, source in kept
    )
    return CandidateList(entries, unreadable, len(found) - len(entries))


def with_results(
    entries: Iterable[Listed], previous: Sequence[CachedCandidate], *, same_ingress: bool
) -> tuple[CachedCandidate, ...]:
    """`status.candidates` for a list, with the results of before where they still hold.

    They hold while pin and port are the same (`same_ingress`). What the policy refuses now is
    NotAllowed, whatever was found before; what it allows now and refused before is Pending.
    """
    known = {c.address: c for c in previous if _holds(c)} if same_ingress else {}
    return tuple(_with_result(entry, known.get(entry.address)) for entry in entries)


def _holds(candidate: CachedCandidate) -> bool:
    # NotAllowed without a time is the controller's own verdict, which it reaches anew each time.
    judged = candidate.result != CandidateResult.NOT_ALLOWED or candidate.checked_at is not None
    return judged and candidate.result in _RESULTS


def _with_result(entry: Listed, before: CachedCandidate | None) -> CachedCandidate:
    source = entry.source.value
    if entry.refusal:
        return CachedCandidate(entry.address, CandidateResult.NOT_ALLOWED.value, source)
    if before is None:
        return CachedCandidate(entry.address, CandidateResult.PENDING.value, source)
    return CachedCandidate(entry.address, before.result, source, before.checked_at)
