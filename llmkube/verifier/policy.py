"""The address policy: which addresses a dial-back may touch.

A candidate list comes from a half-trusted machine, so without a policy a Mac could make a pod
scan the cluster from inside. The controller applies this policy before it starts a verifier pod,
and the verifier applies it again before it dials.

Every network is spelled out here: the verdicts of `ipaddress` (`is_private`, `is_reserved`, …)
change between Python versions, and controller and verifier must agree. What is promised:

* Text is read strictly. Zone ids, brackets, ports, leading zeros, decimal and hex disguises are
  no addresses. An IPv4-mapped IPv6 address *is* its IPv4 address.
* An IPv6 address is allowed only if it, and every IPv4 address it embeds, is allowed.
* Between `allow` and `deny` the longest matching prefix decides, and a tie is a denial. So
  `--deny-cidr 10.0.0.0/8 --allow-cidr 10.1.2.0/24` opens one subnet of a denied range, and
  `--allow-cidr 0.0.0.0/0 --deny-cidr 10.96.0.0/12` keeps the service range closed.
* An allowed network also lifts the fixed list for the addresses in it (but not for the IPv4
  addresses that those embed: each of them is judged by itself).

Next: `protocol.py`, what controller and verifier tell each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_ADDRESS_LENGTH = 45
"""The longest text form of an IP address (IPv6 with an IPv4 tail)."""

_MAPPED = IPv6Network("::ffff:0:0/96")

_METADATA = "a cloud metadata address"
_RESERVED = "a reserved address"
_NAT64 = "a NAT64 address: list the IPv4 address itself"

_REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), why)
    for network, why in (
        # Metadata first: the most telling reason wins where networks nest.
        ("169.254.169.254/32", _METADATA),  # AWS, Azure, Google, OpenStack, …
        ("100.100.100.200/32", _METADATA),  # Alibaba
        ("168.63.129.16/32", _METADATA),  # Azure's platform channel
        ("192.0.0.192/32", _METADATA),  # Oracle
        ("fd00:ec2::254/128", _METADATA),  # AWS
        ("fd00:ec2::23/128", _METADATA),  # AWS, credentials of EKS pods
        ("fd20:ce::254/128", _METADATA),  # Google
        ("255.255.255.255/32", "the broadcast address"),
        ("0.0.0.0/8", "an unspecified address"),  # 0.0.0.0 dials the pod itself
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", _RESERVED),
        ("192.0.0.0/24", _RESERVED),  # protocol assignments; macOS puts its own CLAT here
        ("::/128", "the unspecified address"),
        ("::1/128", "the loopback address"),
        ("fe80::/10", "a link-local address"),
        ("ff00::/8", "a multicast address"),
        ("64:ff9b::/96", _NAT64),
        ("64:ff9b:1::/48", _NAT64),
    )
)
_UNICAST = (IPv6Network("2000::/3"), IPv6Network("fc00::/7"))
"""Global unicast and unique local: any other IPv6 address is reserved or no unicast address."""

_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_COMPATIBLE = IPv6Network("::/96")
_NAT64_WELL_KNOWN = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_ISATAP_MARKS = (0x00005EFE, 0x02005EFE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says about one address.

    `address` is the canonical text, or the text as given where it is no IP address; `why` says
    in a few words why it is refused, and is empty where it is allowed.
    """

    address: str
    allowed: bool
    why: str


def parse_address(text: str) -> Address:
    """The address that `text` spells, IPv4-mapped ones as IPv4.

    Raises ValueError, with words for the admin, for anything but one plain IP address.
    """
    if "%" in text:
        raise ValueError("has a zone id, which means nothing on another machine")
    if len(text) > MAX_ADDRESS_LENGTH:
        raise ValueError(f"is longer than any IP address ({MAX_ADDRESS_LENGTH} characters)")
    try:
        address = ip_address(text)
    except ValueError:
        raise ValueError(
            "is not an IP address (no host name, port, brackets, CIDR or leading zeros)"
        ) from None
    if isinstance(address, IPv6Address) and address in _MAPPED:
        return _low32(int(address))
    return address


def parse_network(text: str) -> Network:
    """The CIDR that `text` spells; a mapped one of at least /96 as IPv4.

    Raises ValueError, with words for the admin, also where host bits are set.
    """
    if "%" in text:
        raise ValueError(f"{text!r} has a zone id; give a plain CIDR such as 10.96.0.0/12")
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ValueError(f"{error}; give a CIDR such as 10.96.0.0/12") from None
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


class AddressPolicy:
    """The fixed list of refused networks, with what the admin allows and denies on top."""

    __slots__ = ("allow", "deny")

    def __init__(self, allow: Iterable[Network] = (), deny: Iterable[Network] = ()) -> None:
        self.allow = tuple(allow)
        self.deny = tuple(deny)

    def verdict(self, text: str) -> Verdict:
        """Judge one address as text. Never raises: what cannot be read is refused."""
        try:
            address = parse_address(text)
        except ValueError as error:
            return Verdict(text, False, str(error))
        why = self.refusal(address)
        return Verdict(str(address), why is None, why or "")

    def refusal(self, address: Address) -> str | None:
        """Why `address` must not be dialled, or None if it may."""
        why = self._judge(address)
        if why is not None or isinstance(address, IPv4Address):
            return why
        for form, embedded in _embedded(address):
            inner = self._judge(embedded)
            if inner is not None:
                return f"{form} of {embedded}, {inner}"
        return None

    def _judge(self, address: Address) -> str | None:
        denied = _longest_match(address, self.deny)
        allowed = _longest_match(address, self.allow)
        if denied is not None and (allowed is None or denied.prefixlen >= allowed.prefixlen):
            return f"denied by {denied}"
        return None if allowed is not None else _fixed_refusal(address)


def _longest_match(address: Address, networks: tuple[Network, ...]) -> Network | None:
    matches = (net for net in networks if net.version == address.version and address in net)
    return max(matches, key=lambda net: net.prefixlen, default=None)


def _fixed_refusal(address: Address) -> str | None:
    for network, why in _REFUSED:
        if network.version == address.version and address in network:
            return why
    if isinstance(address, IPv6Address) and not any(address in net for net in _UNICAST):
        return _RESERVED
    return None


def _embedded(address: IPv6Address) -> Iterator[tuple[str, IPv4Address]]:
    """Every IPv4 address that a gateway or a tunnel may read out of `address`."""
    number = int(address)
    if address in _SIX_TO_FOUR:
        yield "6to4 form", _low32(number >> 80)
    if address in _TEREDO:
        yield "Teredo form (server)", _low32(number >> 64)
        yield "Teredo form (client)", _low32(~number)
    if address in _COMPATIBLE and number > 1:  # :: and ::1 have meanings of their own
        yield "IPv4-compatible form", _low32(number)
    if address in _NAT64_WELL_KNOWN or address in _TRANSLATED:
        yield "translated form", _low32(number)
    if address in _NAT64_LOCAL:
        yield from (("NAT64 form", inner) for inner in _local_nat64(number))
    if (number >> 32) & 0xFFFFFFFF in _ISATAP_MARKS:
        yield "ISATAP form", _low32(number)


def _local_nat64(number: int) -> Iterator[IPv4Address]:
    """RFC 6052 knows several places below a /48; bits 64–71 are left out of each."""
    yield IPv4Address((((number >> 64) & 0xFFFF) << 16) | ((number >> 40) & 0xFFFF))  # /48
    yield IPv4Address((((number >> 64) & 0xFF) << 24) | ((number >> 32) & 0xFFFFFF))  # /56
    yield _low32(number >> 24)  # /64
    yield _low32(number)  # /96


def _low32(number: int) -> IPv4Address:
    return IPv4Address(number & 0xFFFFFFFF)
