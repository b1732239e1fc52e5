"""The addresses this machine has: read from the kernel, as plain values.

macOS is asked with `ifconfig`, whose output `parse_ifconfig` reads; Linux with two netlink
messages, which `parse_links` and `parse_addresses` read: no external program, no privilege. All
three are pure. Which of the addresses are worth telling the cluster is `llmkube.agent.discovery`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from llmkube.agent.command import run_command

IFCONFIG: Final = ("/sbin/ifconfig", "-a")
COMMAND_TIMEOUT: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of one interface."""

    interface: str
    address: IPv4Address | IPv6Address
    up: bool = True
    """The interface is up and has a carrier."""
    loopback: bool = False
    point_to_point: bool = False
    unstable: str = ""
    """Why the kernel itself will not keep this address, "" if it will."""


class InterfacesUnreadable(Exception):
    """The system did not tell its addresses."""


async def read_interfaces() -> tuple[InterfaceAddress, ...]:
    """Every address of this machine now. Raises InterfacesUnreadable."""
    if sys.platform == "darwin":
        try:
            return tuple(parse_ifconfig(await run_command(IFCONFIG, COMMAND_TIMEOUT)))
        except (OSError, TimeoutError, ValueError) as error:
            raise InterfacesUnreadable(f"{IFCONFIG[0]} failed: {error}") from error
    try:
        return await asyncio.to_thread(_read_netlink)
    except (OSError, struct.error, ValueError) as error:
        raise InterfacesUnreadable(f"netlink failed: {error}") from error


# macOS -----------------------------------------------------------------------------------------

_HEAD: Final = re.compile(r"^(?P<name>[a-zA-Z][\w.-]*): flags=[0-9a-f]+<(?P<flags>[A-Z0-9_,]*)>")
_INET: Final = re.compile(r"^\s+inet6? (?P<address>[0-9a-fA-F:.]+)(?:%[\w.-]+)?(?P<rest>.*)$")
_INACTIVE: Final = re.compile(r"^\s+status: (inactive|no carrier)\s*$", re.MULTILINE)
# A temporary IPv6 address (RFC 8981) changes daily; a tentative, duplicated or detached one does
# not answer; a deprecated one is about to go.
_UNSTABLE: Final = ("temporary", "deprecated", "tentative", "duplicated", "detached")


def parse_ifconfig(text: str) -> Iterator[InterfaceAddress]:
    """The addresses in the output of macOS' `ifconfig -a`; what is not understood is skipped."""
    for block in re.split(r"\n(?=\S)", text):
        head = _HEAD.match(block)
        if head is not None:
            flags = frozenset(head["flags"].split(","))
            up = {"UP", "RUNNING"} <= flags and _INACTIVE.search(block) is None
            for line in block.splitlines()[1:]:
                yield from _parse_inet(line, head["name"], flags, up)


def _parse_inet(
    line: str, interface: str, flags: frozenset[str], up: bool
) -> Iterator[InterfaceAddress]:
    found = _INET.match(line)
    if found is None:
        return
    try:
        address = ip_address(found["address"])
    except ValueError:
        return
    words = found["rest"].split()
    yield InterfaceAddress(
        interface=interface,
        address=address,
        up=up,
        loopback="LOOPBACK" in flags,
        point_to_point="POINTOPOINT" in flags,
        unstable=next((word for word in _UNSTABLE if word in words), ""),
    )


# Linux: rtnetlink(7) ---------------------------------------------------------------------------

_RTM_GETLINK, _RTM_NEWLINK, _RTM_GETADDR, _RTM_NEWADDR = 18, 16, 22, 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFF_UP, _IFF_LOOPBACK, _IFF_POINTOPOINT, _IFF_RUNNING = 0x1, 0x8, 0x10, 0x40
_IFLA_IFNAME = 3
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_SECONDARY_OR_TEMPORARY = 0x01  # "secondary" for IPv4, "temporary" for IPv6
_IFA_F_BROKEN = {0x08: "duplicated", 0x20: "deprecated", 0x40: "tentative"}

_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr
_LINK: Final = struct.Struct("=BxHiII")  # ifinfomsg
_ADDR: Final = struct.Struct("=BBBBI")  # ifaddrmsg
_ATTRIBUTE: Final = struct.Struct("=HH")  # rtattr


@dataclass(frozen=True, slots=True)
class Link:
    """An interface as netlink tells it."""

    name: str
    flags: int


def _read_netlink() -> tuple[InterfaceAddress, ...]:
    links = parse_links(_dump(_RTM_GETLINK))
    return tuple(parse_addresses(_dump(_RTM_GETADDR), links))


def _dump(message_type: int) -> bytes:
    """The answer to one dump request: all netlink messages, concatenated."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(COMMAND_TIMEOUT.total_seconds())
        body = bytes(16)  # AF_UNSPEC, everything else zero: all interfaces, both families
        length = _HEADER.size + len(body)
        link.send(_HEADER.pack(length, message_type, _NLM_F_REQUEST_DUMP, 1, 0) + body)
        answer = b""
        while True:
            part = link.recv(65536)
            answer += part
            if not part or any(kind == _NLMSG_DONE for kind, _ in _messages(part)):
                return answer


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Split netlink messages. Raises OSError for an error message, ValueError for garbage."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            raise ValueError("a truncated netlink message")
        body = data[offset + _HEADER.size : offset + length]
        if kind == _NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", body)[0], "netlink refused the request")
        yield kind, body
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found


def parse_links(data: bytes) -> dict[int, Link]:
    """Interfaces by index, from RTM_NEWLINK messages."""
    links = {}
    for kind, body in _messages(data):
        if kind == _RTM_NEWLINK:
            _, _, index, flags, _ = _LINK.unpack_from(body)
            name = _attributes(body[_LINK.size :]).get(_IFLA_IFNAME, b"")
            links[index] = Link(name.rstrip(b"\0").decode("utf-8", "replace"), flags)
    return links


def parse_addresses(data: bytes, links: dict[int, Link]) -> Iterator[InterfaceAddress]:
    """Addresses from RTM_NEWADDR messages; those of interfaces not in `links` are skipped."""
    for kind, body in _messages(data):
        if kind != _RTM_NEWADDR:
            continue
        family, _, short_flags, _, index = _ADDR.unpack_from(body)
        link = links.get(index)
        attributes = _attributes(body[_ADDR.size :])
        # On a point-to-point link IFA_ADDRESS is the peer, and only IFA_LOCAL is ours.
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if link is None or packed is None or len(packed) not in (4, 16):
            continue
        flags = _flags(attributes, short_flags)
        yield InterfaceAddress(
            interface=link.name,
            address=ip_address(packed),
            up=link.flags & _IFF_UP != 0 and link.flags & _IFF_RUNNING != 0,
            loopback=link.flags & _IFF_LOOPBACK != 0,
            point_to_point=link.flags & _IFF_POINTOPOINT != 0,
            unstable=_instability(family, flags),
        )


def _flags(attributes: dict[int, bytes], short_flags: int) -> int:
    wide = attributes.get(_IFA_FLAGS, b"")
    return int(struct.unpack("=I", wide)[0]) if len(wide) == 4 else short_flags


def _instability(family: int, flags: int) -> str:
    if family == socket.AF_INET6 and flags & _IFA_F_SECONDARY_OR_TEMPORARY:
        return "temporary"
    return next((word for bit, word in _IFA_F_BROKEN.items() if flags & bit), "")
