"""Which addresses the agent offers, from recorded `ifconfig` output, netlink and tables."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.agent.discovery import MAX_CANDIDATES, CandidateFinder, choose
from llmkube.agent.interfaces import (
    InterfaceAddress,
    parse_addresses,
    parse_ifconfig,
    parse_links,
    read_interfaces,
)
from tests.support.macs import AIR, STUDIO


def chosen(text: str, *overrides: str) -> list[tuple[str, str]]:
    found = parse_ifconfig(text)
    discovery = choose(found, [ip_address(address) for address in overrides])
    return [(candidate.address, candidate.source.value) for candidate in discovery.candidates]


def rejected(text: str) -> dict[str, str]:
    return {str(item.address): item.why for item in choose(parse_ifconfig(text)).rejected}


class TestRecordedMacs:
    def test_a_macbook_on_wifi_and_a_tailnet(self) -> None:
        assert chosen(AIR) == [
            ("100.101.2.3", "tailnet"),
            ("fd7a:115c:a1e0::5f01:203", "tailnet"),
            ("192.168.1.23", "lan"),
            ("fd12:3456:789a:1:1c5f:22ab:99c0:1", "lan"),
        ]

    def test_a_studio_with_virtual_machines_and_a_vpn(self) -> None:
        assert chosen(STUDIO) == [
            ("10.20.0.15", "lan"),
            ("10.40.0.15", "lan"),  # en2 before en10
            ("10.30.0.15", "lan"),
            ("172.31.9.1", "lan"),  # bridge0 joins Thunderbolt ports
            ("192.168.65.1", "docker-host"),
        ]

    def test_what_is_not_offered_is_told_why(self) -> None:
        assert rejected(STUDIO) == {
            "192.168.7.9": "the interface is down",
            "10.99.0.1": "the interface is down",
            "169.254.13.7": "link-local: not routed",
            "192.168.64.1": "a bridge to virtual machines or shared clients, not a LAN",
            "fdc4:f46c:bb17:931b:1099:c71:e430:9090": "a bridge to virtual machines or shared "
            "clients, not a LAN",
            "192.168.66.1": "a virtual machine link, not a LAN",
            "10.8.0.6": "a tunnel, not a LAN",
        }

    def test_addresses_that_will_not_last_are_not_offered(self) -> None:
        why = rejected(AIR)
        assert why["fd12:3456:789a:1:a5d4:e1f0:0:77"] == "a temporary address: it will not last"
        assert why["2001:db8:7:1:10c4:9f32:1:5"] == "a deprecated address: it will not last"

    def test_the_admins_addresses_come_first_and_once(self) -> None:
        assert chosen(AIR, "192.168.65.254", "192.168.1.23")[:3] == [
            ("192.168.65.254", "override"),
            ("192.168.1.23", "override"),
            ("100.101.2.3", "tailnet"),
        ]
        assert len(chosen(AIR, "192.168.1.23")) == 4

    @given(st.text())
    def test_any_text_is_read_without_a_crash(self, text: str) -> None:
        list(parse_ifconfig(text))
        list(parse_ifconfig(AIR + text + STUDIO))


def at(interface: str, address: str, **more: object) -> InterfaceAddress:
    return InterfaceAddress(interface, ip_address(address), **more)  # type: ignore[arg-type]


class TestRules:
    @pytest.mark.parametrize(
        ("item", "verdict"),
        [
            (at("eth0", "192.168.1.5"), "lan"),
            (at("br0", "10.0.0.5"), "lan"),
            (at("eth0", "203.0.113.7"), "lan"),
            (at("tailscale0", "100.64.0.1"), "tailnet"),
            (at("eth0", "100.127.255.255"), "tailnet"),
            (at("eth0", "100.128.0.1"), "lan"),
            (at("docker0", "172.17.0.1"), "docker-host"),
            (at("br-0123456789ab", "172.20.0.1"), "docker-host"),
            (at("bridge100", "192.168.65.1"), "docker-host"),
            (at("bridge100", "192.168.64.1"), None),
            (at("utun5", "192.168.1.5"), None),
            (at("wg0", "10.7.0.2"), None),
            (at("ppp0", "203.0.113.7", point_to_point=True), None),
            (at("eth0", "10.0.0.9", point_to_point=True), None),
            (at("veth12ab", "10.1.1.1"), None),
            (at("cni0", "10.244.0.1"), None),
            (at("virbr0", "192.168.122.1"), None),
            (at("awdl0", "fd00::1"), None),
            (at("eth0", "169.254.1.1"), None),
            (at("eth0", "fe80::1"), None),
            (at("eth0", "10.0.0.5", up=False), None),
            (at("eth0", "fd00::5", unstable="tentative"), None),
            (at("lo", "10.255.0.1", loopback=True), None),
        ],
        ids=lambda value: f"{value.interface} {value.address}" if hasattr(value, "up") else None,
    )
    def test_table(self, item: InterfaceAddress, verdict: str | None) -> None:
        found = [candidate.source.value for candidate in choose([item]).candidates]
        assert found == ([verdict] if verdict else [])

    def test_only_what_the_ingress_listens_on_is_offered(self) -> None:
        both = [at("eth0", "10.0.0.5"), at("eth0", "fd00::5")]
        for bound, expected in (
            ("10.0.0.5", ["10.0.0.5"]),
            ("127.0.0.1", []),
            ("0.0.0.0", ["10.0.0.5"]),
            ("::", ["fd00::5"]),
        ):
            found = choose(both, bound_to=[ip_address(bound)])
            assert [candidate.address for candidate in found.candidates] == expected

    def test_the_list_is_capped_and_overrides_survive(self) -> None:
        many = [at(f"eth{number}", f"10.0.0.{number}") for number in range(1, 40)]
        overrides = [ip_address(f"10.1.0.{number}") for number in range(3)]
        discovery = choose(many, overrides)
        assert len(discovery.candidates) == MAX_CANDIDATES
        assert [c.source.value for c in discovery.candidates][:4] == ["override"] * 3 + ["lan"]
        assert len(discovery.rejected) == 39 - 13
        assert len(choose(many, [ip_address(f"10.1.0.{n}") for n in range(30)]).candidates) == 16

    @given(st.permutations(list(parse_ifconfig(AIR)) + list(parse_ifconfig(STUDIO))))
    def test_the_order_of_interfaces_changes_nothing(self, found: list[InterfaceAddress]) -> None:
        whole = list(parse_ifconfig(AIR)) + list(parse_ifconfig(STUDIO))
        assert choose(found).candidates == choose(whole).candidates


class TestNetlink:
    def test_a_recorded_answer(self) -> None:
        links = message(16, struct.pack("=BxHiII", 0, 1, 7, 0x1 | 0x40 | 0x10, 0), {3: b"ppp0\0"})
        addresses = message(
            20,
            struct.pack("=BBBBI", socket.AF_INET, 32, 0x80, 0, 7),
            {1: bytes([10, 0, 0, 1]), 2: bytes([10, 0, 0, 2])},
        ) + message(
            20,
            struct.pack("=BBBBI", socket.AF_INET6, 64, 0x01, 0, 7),
            {1: ip_address("fd00::7").packed, 8: struct.pack("=I", 0x101)},
        )
        assert list(parse_addresses(addresses, parse_links(links))) == [
            at("ppp0", "10.0.0.2", point_to_point=True),
            at("ppp0", "fd00::7", point_to_point=True, unstable="temporary"),
        ]

    @given(st.binary())
    def test_garbage_raises_what_the_reader_catches(self, data: bytes) -> None:
        with suppress(ValueError, OSError, struct.error):
            list(parse_addresses(data, parse_links(data)))

    async def test_this_machine_has_a_loopback(self) -> None:
        found = await read_interfaces()
        assert any(item.loopback and str(item.address) == "127.0.0.1" for item in found)


def message(kind: int, fixed: bytes, attributes: dict[int, bytes]) -> bytes:
    body = fixed
    for number, value in attributes.items():
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


async def test_the_finder_logs_once_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    finder = CandidateFinder()
    first = await finder.find()
    assert await finder.find() == first
    assert capsys.readouterr().out.count("to the cluster") == 1
    finder.overrides = (ip_address("192.0.2.99"),)
    assert (await finder.find()).candidates[0].address == "192.0.2.99"
    assert capsys.readouterr().out.count("to the cluster") == 1
