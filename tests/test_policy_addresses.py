"""The address policy as a table: SPEC 3.3, in every textual disguise.

Each row has an id that names the sentence it proves: `fixed` (always refused), `embeds` (an IPv6
form of a refused IPv4), `open` (private, CGNAT, unique local and public are where Macs live),
`text` (strict reading).
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.verifier.policy import AddressPolicy, Network, parse_address, parse_network

LOOPBACK, LINK, META = "loopback", "link-local", "metadata"
RESERVED, MULTI, UNSPEC = "reserved", "multicast", "unspecified"
NOT_IP = "not an IP address"

REFUSED = [
    # fixed: the list of SPEC 3.3, edges included
    ("fixed-loopback", "127.0.0.1", "127.0.0.1", LOOPBACK),
    ("fixed-loopback-last", "127.255.255.255", "127.255.255.255", LOOPBACK),
    ("fixed-loopback-v6", "::1", "::1", LOOPBACK),
    ("fixed-loopback-v6-long", "0:0:0:0:0:0:0:1", "::1", LOOPBACK),
    ("fixed-loopback-v6-dotted", "::0.0.0.1", "::1", LOOPBACK),
    ("fixed-unspecified", "0.0.0.0", "0.0.0.0", UNSPEC),
    ("fixed-this-network", "0.1.2.3", "0.1.2.3", UNSPEC),
    ("fixed-unspecified-v6", "::", "::", UNSPEC),
    ("fixed-unspecified-v6-long", "0000:0000::0000", "::", UNSPEC),
    ("fixed-link-local", "169.254.0.1", "169.254.0.1", LINK),
    ("fixed-link-local-last", "169.254.255.255", "169.254.255.255", LINK),
    ("fixed-link-local-v6", "fe80::1", "fe80::1", LINK),
    ("fixed-link-local-v6-last", "febf:ffff::1", "febf:ffff::1", LINK),
    ("fixed-link-local-v6-case", "FE80::ABCD", "fe80::abcd", LINK),
    ("fixed-multicast", "224.0.0.1", "224.0.0.1", MULTI),
    ("fixed-multicast-last", "239.255.255.255", "239.255.255.255", MULTI),
    ("fixed-multicast-v6", "ff02::1", "ff02::1", MULTI),
    ("fixed-multicast-v6-global", "ff0e::1", "ff0e::1", MULTI),
    ("fixed-reserved", "240.0.0.1", "240.0.0.1", RESERVED),
    ("fixed-reserved-last", "255.255.255.254", "255.255.255.254", RESERVED),
    ("fixed-broadcast", "255.255.255.255", "255.255.255.255", "broadcast"),
    ("fixed-reserved-protocol", "192.0.0.2", "192.0.0.2", RESERVED),
    ("fixed-reserved-v6", "4000::1", "4000::1", RESERVED),
    ("fixed-reserved-v6-discard", "100::1", "100::1", RESERVED),
    ("fixed-reserved-v6-low", "::2", "::2", RESERVED),
    ("fixed-reserved-v6-site-local", "fec0::1", "fec0::1", RESERVED),
    ("fixed-reserved-v6-fe00", "fe00::1", "fe00::1", RESERVED),
    ("fixed-reserved-v6-1fff", "1fff:ffff::1", "1fff:ffff::1", RESERVED),
    ("fixed-metadata-aws", "169.254.169.254", "169.254.169.254", META),
    ("fixed-metadata-aws-v6", "fd00:ec2::254", "fd00:ec2::254", META),
    ("fixed-metadata-aws-v6-long", "fd00:0ec2:0:0:0:0:0:0254", "fd00:ec2::254", META),
    ("fixed-metadata-aws-v6-dotted", "fd00:ec2::0.0.2.84", "fd00:ec2::254", META),
    ("fixed-metadata-eks-v6", "fd00:ec2::23", "fd00:ec2::23", META),
    ("fixed-metadata-google-v6", "fd20:ce::254", "fd20:ce::254", META),
    ("fixed-metadata-alibaba", "100.100.100.200", "100.100.100.200", META),
    ("fixed-metadata-azure", "168.63.129.16", "168.63.129.16", META),
    ("fixed-metadata-oracle", "192.0.0.192", "192.0.0.192", META),
    # embeds: mapped addresses are their IPv4 address
    ("embeds-mapped-dotted", "::ffff:127.0.0.1", "127.0.0.1", LOOPBACK),
    ("embeds-mapped-hex", "::ffff:7f00:1", "127.0.0.1", LOOPBACK),
    ("embeds-mapped-case", "::FFFF:7F00:0001", "127.0.0.1", LOOPBACK),
    ("embeds-mapped-long", "0:0:0:0:0:ffff:127.0.0.1", "127.0.0.1", LOOPBACK),
    ("embeds-mapped-longest", "0000:0000:0000:0000:0000:ffff:127.000.0.1", None, NOT_IP),
    ("embeds-mapped-metadata", "::ffff:a9fe:a9fe", "169.254.169.254", META),
    ("embeds-mapped-alibaba", "::ffff:100.100.100.200", "100.100.100.200", META),
    ("embeds-mapped-unspecified", "::ffff:0:0", "0.0.0.0", UNSPEC),
    ("embeds-compatible-dotted", "::127.0.0.1", "::7f00:1", RESERVED),
    ("embeds-compatible-metadata", "::169.254.169.254", "::a9fe:a9fe", RESERVED),
    ("embeds-compatible-private", "::10.0.0.1", "::a00:1", RESERVED),
    ("embeds-translated", "::ffff:0:127.0.0.1", "::ffff:0:7f00:1", RESERVED),
    ("embeds-nat64", "64:ff9b::127.0.0.1", "64:ff9b::7f00:1", "NAT64"),
    ("embeds-nat64-metadata", "64:ff9b::a9fe:a9fe", "64:ff9b::a9fe:a9fe", "NAT64"),
    ("embeds-nat64-public-too", "64:ff9b::8.8.8.8", "64:ff9b::808:808", "NAT64"),
    ("embeds-nat64-local", "64:ff9b:1::10.0.0.1", "64:ff9b:1::a00:1", "NAT64"),
    ("embeds-nat64-local-last", "64:ff9b:1:ffff::1", "64:ff9b:1:ffff::1", "NAT64"),
    ("embeds-nat64-neighbour", "64:ff9b:2::1", "64:ff9b:2::1", RESERVED),
    ("embeds-6to4-loopback", "2002:7f00:1::", "2002:7f00:1::", LOOPBACK),
    ("embeds-6to4-loopback-host", "2002:7f00:1:1::5", "2002:7f00:1:1::5", LOOPBACK),
    ("embeds-6to4-metadata", "2002:a9fe:a9fe::1", "2002:a9fe:a9fe::1", META),
    ("embeds-6to4-unspecified", "2002::1", "2002::1", UNSPEC),
    ("embeds-6to4-alibaba", "2002:6464:64c8::1", "2002:6464:64c8::1", META),
    ("embeds-6to4-multicast", "2002:e000:1::", "2002:e000:1::", MULTI),
    ("embeds-teredo-client", "2001::a00:1:0:0:80ff:fffe", "2001:0:a00:1::80ff:fffe", LOOPBACK),
    ("embeds-teredo-server", "2001:0:7f00:1::f5ff:fffe", "2001:0:7f00:1::f5ff:fffe", LOOPBACK),
    ("embeds-teredo-metadata", "2001:0:a00:1::5601:5601", "2001:0:a00:1::5601:5601", META),
    ("embeds-isatap", "2001:db8::5efe:127.0.0.1", "2001:db8::5efe:7f00:1", LOOPBACK),
    ("embeds-isatap-global", "fd00::200:5efe:a9fe:a9fe", "fd00::200:5efe:a9fe:a9fe", META),
    ("embeds-isatap-in-6to4", "2002:a00:1::5efe:7f00:1", "2002:a00:1::5efe:7f00:1", LOOPBACK),
    # text: strict reading
    ("text-zone", "fe80::1%en0", None, "zone id"),
    ("text-zone-allowed-address", "fd00::1%1", None, "zone id"),
    ("text-zone-v4", "10.0.0.1%en0", None, "zone id"),
    ("text-zone-empty", "fd00::1%", None, "zone id"),
    ("text-zone-escaped", "fe80::1%25en0", None, "zone id"),
    ("text-leading-zero", "010.0.0.1", None, NOT_IP),
    ("text-octal-loopback", "0177.0.0.1", None, NOT_IP),
    ("text-leading-zeros-last", "10.0.0.001", None, NOT_IP),
    ("text-decimal", "2130706433", None, NOT_IP),
    ("text-hex", "0x7f000001", None, NOT_IP),
    ("text-hex-octets", "0x7f.0.0.1", None, NOT_IP),
    ("text-short", "127.1", None, NOT_IP),
    ("text-zero", "0", None, NOT_IP),
    ("text-brackets", "[::1]", None, NOT_IP),
    ("text-brackets-v4", "[10.0.0.1]", None, NOT_IP),
    ("text-port", "10.0.0.1:9443", None, NOT_IP),
    ("text-port-v6", "[fd00::1]:9443", None, NOT_IP),
    ("text-cidr", "10.0.0.1/32", None, NOT_IP),
    ("text-cidr-v6", "fd00::/64", None, NOT_IP),
    ("text-hostname", "mac.example.com", None, NOT_IP),
    ("text-localhost", "localhost", None, NOT_IP),
    ("text-empty", "", None, NOT_IP),
    ("text-space", " 10.0.0.1", None, NOT_IP),
    ("text-newline", "10.0.0.1\n", None, NOT_IP),
    ("text-nul", "10.0.0.1\0", None, NOT_IP),
    ("text-fullwidth-digits", "１２７.0.0.1", None, NOT_IP),
    ("text-arabic-digits", "١٢٧.0.0.1", None, NOT_IP),
    ("text-ideographic-dots", "127。0。0。1", None, NOT_IP),
    ("text-too-many-octets", "10.0.0.0.1", None, NOT_IP),
    ("text-octet-range", "10.0.0.256", None, NOT_IP),
    ("text-negative", "10.0.0.-1", None, NOT_IP),
    ("text-trailing-dot", "10.0.0.1.", None, NOT_IP),
    ("text-two-gaps", "fd00::1::2", None, NOT_IP),
    ("text-v6-nine-groups", "1:2:3:4:5:6:7:8:9", None, NOT_IP),
    ("text-v6-five-digits", "fd000::1", None, NOT_IP),
    ("text-v6-in-v4", "10.0.0.::1", None, NOT_IP),
    ("text-url", "https://10.0.0.1", None, NOT_IP),
    ("text-huge", "1" * 10_000, None, "longer"),
    ("text-longest-plus-one", "0000:0000:0000:0000:0000:ffff:255.255.255.2555", None, "longer"),
]

ALLOWED = [
    ("open-10", "10.0.0.1", "10.0.0.1"),
    ("open-172", "172.16.5.4", "172.16.5.4"),
    ("open-docker-host", "192.168.65.254", "192.168.65.254"),
    ("open-192-168", "192.168.1.20", "192.168.1.20"),
    ("open-tailnet", "100.101.2.3", "100.101.2.3"),
    ("open-tailnet-first", "100.64.0.0", "100.64.0.0"),
    ("open-beside-alibaba", "100.100.100.201", "100.100.100.201"),
    ("open-beside-azure", "168.63.129.17", "168.63.129.17"),
    ("open-beside-loopback-low", "126.255.255.255", "126.255.255.255"),
    ("open-beside-loopback-high", "128.0.0.1", "128.0.0.1"),
    ("open-beside-link-local", "169.255.0.1", "169.255.0.1"),
    ("open-beside-multicast", "223.255.255.255", "223.255.255.255"),
    ("open-beside-protocol", "192.0.1.1", "192.0.1.1"),
    ("open-public", "8.8.8.8", "8.8.8.8"),
    ("open-first", "1.0.0.0", "1.0.0.0"),
    ("open-ula", "fd00::1", "fd00::1"),
    ("open-ula-first", "fc00::1", "fc00::1"),
    ("open-tailnet-v6", "fd7a:115c:a1e0::1", "fd7a:115c:a1e0::1"),
    ("open-beside-aws-v6", "fd00:ec2::255", "fd00:ec2::255"),
    ("open-public-v6", "2606:4700::1111", "2606:4700::1111"),
    ("open-last-global-v6", "3fff:ffff::1", "3fff:ffff::1"),
    ("open-mapped-is-v4", "::ffff:192.168.1.20", "192.168.1.20"),
    ("open-mapped-hex-is-v4", "0:0:0:0:0:FFFF:C0A8:0114", "192.168.1.20"),
    ("open-v6-upper-case", "FD00:0:0::00AB", "fd00::ab"),
    ("open-v6-dotted-tail", "fd00::1.2.3.4", "fd00::102:304"),
    ("open-6to4-of-public", "2002:808:808::1", "2002:808:808::1"),
    ("open-beside-teredo", "2001:1::1", "2001:1::1"),
    ("open-like-isatap", "2001:db8::5eff:7f00:1", "2001:db8::5eff:7f00:1"),
]


@pytest.mark.parametrize(
    ("text", "address", "why"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused(text: str, address: str | None, why: str) -> None:
    verdict = AddressPolicy().verdict(text)
    assert not verdict.allowed
    assert why in verdict.why
    assert verdict.address == (text if address is None else address)


@pytest.mark.parametrize(
    ("text", "address"), [row[1:] for row in ALLOWED], ids=[row[0] for row in ALLOWED]
)
def test_allowed(text: str, address: str) -> None:
    verdict = AddressPolicy().verdict(text)
    assert verdict.allowed, verdict.why
    assert (verdict.address, verdict.why) == (address, "")


def test_the_table_is_as_long_as_asked() -> None:
    assert len({row[1] for row in (*REFUSED, *ALLOWED)}) >= 80


@pytest.mark.parametrize(
    "text", [row[1] for row in REFUSED if row[2] is None], ids=lambda text: ascii(text)[:40]
)
def test_what_is_no_address_raises_with_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"zone id|longer|not an IP address"):
        parse_address(text)


# --allow-cidr and --deny-cidr --------------------------------------------------------------------
def nets(*texts: str) -> tuple[Network, ...]:
    return tuple(parse_network(text) for text in texts)


FLAGS = [
    # deny closes what is open, in every form that embeds it
    ("deny", [], ["10.96.0.0/12"], "10.96.0.1", False),
    ("deny-outside", [], ["10.96.0.0/12"], "10.112.0.1", True),
    ("deny-mapped", [], ["10.96.0.0/12"], "::ffff:10.96.0.1", False),
    ("deny-6to4", [], ["10.96.0.0/12"], "2002:a60:1::1", False),
    ("deny-teredo-client", [], ["10.96.0.0/12"], "2001:0:808:808::f59f:fffe", False),
    ("deny-teredo-server", [], ["10.96.0.0/12"], "2001:0:a60:1::f7f7:f7f7", False),
    ("deny-isatap", [], ["10.96.0.0/12"], "fd00::5efe:10.96.0.1", False),
    ("deny-as-mapped-network", [], ["::ffff:10.96.0.0/108"], "10.96.0.1", False),
    ("deny-v6", [], ["fd00:10:96::/112"], "fd00:10:96::1", False),
    ("deny-all-v4", [], ["0.0.0.0/0"], "8.8.8.8", False),
    ("deny-all-v4-leaves-v6", [], ["0.0.0.0/0"], "fd00::1", True),
    ("deny-all-v4-in-v6", [], ["0.0.0.0/0"], "2002:808:808::1", False),
    ("deny-all-v6", [], ["::/0"], "fd00::1", False),
    ("deny-all-v6-leaves-v4", [], ["::/0"], "10.0.0.1", True),
    ("deny-one", [], ["10.0.0.1"], "10.0.0.1", False),
    # allow lifts the fixed list
    ("allow-loopback", ["127.0.0.0/8"], [], "127.0.0.1", True),
    ("allow-loopback-mapped", ["127.0.0.0/8"], [], "::ffff:127.0.0.1", True),
    ("allow-loopback-v6", ["::1/128"], [], "::1", True),
    ("allow-loopback-only", ["127.0.0.1/32"], [], "127.0.0.2", False),
    ("allow-metadata", ["169.254.169.254/32"], [], "169.254.169.254", True),
    ("allow-does-not-lift-zones", ["fe80::/10"], [], "fe80::1%en0", False),
    ("allow-link-local-v6", ["fe80::/10"], [], "fe80::1", True),
    ("allow-nat64-of-open", ["64:ff9b::/96"], [], "64:ff9b::8.8.8.8", True),
    ("allow-nat64-not-of-refused", ["64:ff9b::/96"], [], "64:ff9b::127.0.0.1", False),
    ("allow-nat64-not-of-denied", ["64:ff9b::/96"], ["10.96.0.0/12"], "64:ff9b::a60:1", False),
    ("allow-local-nat64-48", ["64:ff9b:1::/48"], [], "64:ff9b:1:7f00:0:100::", False),
    ("allow-6to4-not-of-refused", ["2002::/16"], [], "2002:7f00:1::", False),
    ("allow-6to4-and-embedded", ["2002::/16", "127.0.0.0/8"], [], "2002:7f00:1::", True),
    ("allow-all-v6-not-compatible", ["::/0"], [], "::127.0.0.1", False),
    # the longest prefix decides, a tie denies
    ("allow-within-deny", ["10.1.2.0/24"], ["10.0.0.0/8"], "10.1.2.3", True),
    ("allow-within-deny-outside", ["10.1.2.0/24"], ["10.0.0.0/8"], "10.1.3.3", False),
    ("deny-within-allow", ["0.0.0.0/0"], ["10.96.0.0/12"], "10.96.0.1", False),
    ("deny-within-allow-outside", ["0.0.0.0/0"], ["10.96.0.0/12"], "127.0.0.1", True),
    ("deny-equals-allow", ["10.0.0.0/8"], ["10.0.0.0/8"], "10.0.0.1", False),
    ("longest-of-many", ["10.0.0.0/8", "10.1.2.3/32"], ["10.1.0.0/16"], "10.1.2.3", True),
    ("families-apart", ["::/0"], ["10.0.0.0/8"], "10.0.0.1", False),
]


@pytest.mark.parametrize(
    ("allow", "deny", "text", "allowed"), [row[1:] for row in FLAGS], ids=[row[0] for row in FLAGS]
)
def test_flags(allow: list[str], deny: list[str], text: str, allowed: bool) -> None:
    assert AddressPolicy(nets(*allow), nets(*deny)).verdict(text).allowed is allowed


@pytest.mark.parametrize(
    "text", ["10.0.0.1/8", "10.0.0.0/33", "pods", "", "fe80::%en0/64", "10.0.0.0/8/8", "fd00::1/64"]
)
def test_a_bad_cidr_says_how_one_looks(text: str) -> None:
    with pytest.raises(ValueError, match=r"10\.96\.0\.0/12"):
        parse_network(text)


# Properties --------------------------------------------------------------------------------------
V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)


@given(V4)
def test_no_disguise_of_a_refused_ipv4_is_allowed(inner: IPv4Address) -> None:
    policy = AddressPolicy(deny=nets("10.96.0.0/12"))
    if policy.verdict(str(inner)).allowed:
        return
    number = int(inner)
    for disguise in (
        (0xFFFF << 32) | number,
        number,
        (0x64FF9B << 96) | number,
        (0x2002 << 112) | (number << 80) | 1,
        (0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF),
        (0x20010000 << 96) | (number << 64) | 0x08080808,
        (0x2001_0DB8 << 96) | (0x5EFE << 32) | number,
    ):
        assert not policy.verdict(str(IPv6Address(disguise))).allowed


@given(st.one_of(V4, V6))
def test_canonical_text_is_stable_and_never_mapped(address: IPv4Address | IPv6Address) -> None:
    canonical = parse_address(str(address))
    assert parse_address(str(canonical)) == canonical
    assert not (isinstance(canonical, IPv6Address) and canonical.ipv4_mapped)


@given(st.text(max_size=60))
def test_any_text_has_a_verdict(text: str) -> None:
    verdict = AddressPolicy().verdict(text)
    assert verdict.allowed or verdict.why


@given(V6)
def test_an_allowed_ipv6_address_is_unicast(address: IPv6Address) -> None:
    if AddressPolicy().verdict(str(address)).allowed and address.ipv4_mapped is None:
        assert int(address) >> 125 == 1 or int(address) >> 121 == 0xFC >> 1
