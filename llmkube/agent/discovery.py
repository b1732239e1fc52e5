"""Which of this machine's addresses to tell the cluster, and why not the others.

`choose` is pure: interface addresses, the admin's overrides and what the ingress listens on go
in, candidates in preference order and the rejected rest with reasons come out. A candidate is a
claim, nothing more: the cluster dials it back before anybody uses it. `CandidateFinder` reads the
interfaces and logs what was chosen and rejected, once per change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from llmkube.agent.interfaces import InterfaceAddress, InterfacesUnreadable, read_interfaces
from llmkube.api.candidates import CandidateSource
from llmkube.api.report import ReportedCandidate
from llmkube.log import get_logger

MAX_CANDIDATES: Final = 16

Address = IPv4Address | IPv6Address

_TAILNET: Final = (IPv4Network("100.64.0.0/10"), IPv6Network("fd7a:115c:a1e0::/48"))
_DOCKER: Final = (IPv4Network("192.168.65.0/24"), IPv4Network("172.17.0.0/16"))
_DOCKER_BRIDGE: Final = re.compile(r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}")

_NOT_LANS: Final = tuple(
    (re.compile(pattern), why)
    for pattern, why in (
        (r"(utun|tun|tap|wg|ppp|ipsec|gif|stf|sit|gre|zt|tailscale)\w*", "a tunnel, not a LAN"),
        (r"(awdl|llw|p2p|nan|anpi|ap)\d+", "an Apple device-to-device link, not a LAN"),
        # bridge0 joins Thunderbolt ports and is a LAN; macOS numbers its own bridges from 100.
        (r"bridge\d{3,}", "a bridge to virtual machines or shared clients, not a LAN"),
        (r"(vmenet|vmnet|vnic|virbr|vnet|vboxnet|lxdbr)\w*", "a virtual machine link, not a LAN"),
        (r"(veth|cni|flannel|cali|cilium|lxc|podman|kube-)[\w.-]*", "a container link, not a LAN"),
        (r"(dummy|ifb|nodelocaldns)\w*", "no network at all"),
    )
)

_RANK: Final = {source: rank for rank, source in enumerate(CandidateSource)}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rejected:
    """An address that is not offered, and why."""

    address: Address
    interface: str
    why: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface}): {self.why}"


@dataclass(frozen=True, slots=True)
class Discovery:
    """What `choose` decided."""

    candidates: tuple[ReportedCandidate, ...] = ()
    rejected: tuple[Rejected, ...] = ()


def choose(
    found: Iterable[InterfaceAddress],
    overrides: Sequence[Address] = (),
    bound_to: Sequence[Address] = (),
) -> Discovery:
    """Sort the machine's addresses into candidates and the rejected rest.

    `overrides` are the admin's --host-ip: always offered, first, in their order (they may be
    another machine's, of a port forwarding). `bound_to` are the addresses the ingress listens on;
    empty or unspecified means all.
    """
    chosen: dict[Address, CandidateSource] = dict.fromkeys(overrides, CandidateSource.OVERRIDE)
    rejected = []
    ranked: list[tuple[CandidateSource, InterfaceAddress]] = []
    for item in found:
        verdict = _classify(item, bound_to)
        if isinstance(verdict, CandidateSource):
            ranked.append((verdict, item))
        elif not item.loopback:
            rejected.append(Rejected(item.address, item.interface, verdict))
    ranked.sort(key=_preference)
    for source, item in ranked:
        if item.address not in chosen and len(chosen) >= MAX_CANDIDATES:
            why = f"more than {MAX_CANDIDATES} candidates"
            rejected.append(Rejected(item.address, item.interface, why))
        else:
            chosen.setdefault(item.address, source)
    candidates = tuple(ReportedCandidate(str(ip), source) for ip, source in chosen.items())
    return Discovery(candidates[:MAX_CANDIDATES], tuple(rejected))


def _classify(item: InterfaceAddress, bound_to: Sequence[Address]) -> CandidateSource | str:
    """The source of a candidate, or why the address is none."""
    address = item.address
    if why := _unusable(item, bound_to):
        return why
    if any(address in network for network in _TAILNET):
        return CandidateSource.TAILNET
    if any(address in network for network in _DOCKER) or _DOCKER_BRIDGE.fullmatch(item.interface):
        return CandidateSource.DOCKER_HOST
    for pattern, why in _NOT_LANS:
        if pattern.fullmatch(item.interface):
            return why
    return "a tunnel, not a LAN" if item.point_to_point else CandidateSource.LAN


def _unusable(item: InterfaceAddress, bound_to: Sequence[Address]) -> str:
    """Why nobody could reach the ingress there, whatever the network; "" if somebody might."""
    address = item.address
    if item.loopback or address.is_loopback:
        return "loopback: only this machine itself reaches it"
    if address.is_link_local:
        return "link-local: not routed"
    if address.is_unspecified or address.is_multicast:
        return "not a host's address"
    if not item.up:
        return "the interface is down"
    if item.unstable:
        return f"a {item.unstable} address: it will not last"
    if bound_to and not any(bound == address or _covers(bound, address) for bound in bound_to):
        return "the ingress does not listen there (--ingress-bind)"
    return ""


def _covers(bound: Address, address: Address) -> bool:
    return bound.is_unspecified and bound.version == address.version


def _preference(entry: tuple[CandidateSource, InterfaceAddress]) -> tuple[object, ...]:
    """A total order, so that the report changes only when the addresses do."""
    source, item = entry
    wired = item.interface.startswith(("en", "eth"))  # en0, enp3s0, eth0: before any bridge
    name = _natural(item.interface)
    return _RANK[source], item.address.version, not wired, name, int(item.address)


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """en2 before en10."""
    return tuple((text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", name))


@dataclass(slots=True)
class CandidateFinder:
    """Finds candidates anew for each report; keeps the last ones if the system does not tell."""

    overrides: tuple[Address, ...] = ()
    bound_to: tuple[Address, ...] = ()
    _last: Discovery | None = field(default=None, init=False)
    _failing: bool = field(default=False, init=False)

    async def find(self) -> Discovery:
        """The candidates now. Logs them if they differ from the last ones."""
        try:
            found = await read_interfaces()
        except InterfacesUnreadable as error:
            if not self._failing:
                log.warning("cannot read the network interfaces", error=str(error))
            self._failing = True
            return self._last or choose((), self.overrides, self.bound_to)
        self._failing = False
        discovery = choose(found, self.overrides, self.bound_to)
        if discovery != self._last:
            self._last = discovery
            _tell(discovery)
        return discovery


def _tell(discovery: Discovery) -> None:
    chosen = ", ".join(f"{c.address} ({c.source})" for c in discovery.candidates)
    rejected = "; ".join(str(item) for item in discovery.rejected)
    if chosen:
        log.info("addresses offered to the cluster", chosen=chosen, rejected=rejected)
    else:
        log.warning(
            "no address to offer to the cluster: connect a network, or name one with --host-ip",
            rejected=rejected,
        )
