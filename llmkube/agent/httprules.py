"""What may pass between a client and the LLM server, as pure rules on targets and headers.

The ingress reads HTTP with a strict parser and writes it anew, so framing never passes through:
Content-Length and Transfer-Encoding of the one connection are not those of the other. What the
parser lets through and a proxy still must not is refused here. The doing is
`llmkube.agent.relay`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Self
from urllib.parse import urlsplit

from multidict import CIMultiDict, CIMultiDictProxy

from llmkube.agent.gate import TOKEN_HEADER

READY_PATH: Final = "/_llmkube/ready"
RESERVED_PREFIX: Final = "/_llmkube"

# RFC 9110 7.6.1, and what RFC 7540 and browsers' habits add.
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Written anew for the upstream: a client's own word for these is worth nothing there.
_REWRITTEN: Final = frozenset(
    {
        "content-length",
        "expect",
        "forwarded",
        "host",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-real-ip",
        TOKEN_HEADER.lower(),
    }
)
_PRINTABLE: Final = re.compile(r"/[\x21\x22\x24-\x7e]*")  # origin form; no space, no fragment

Headers = CIMultiDictProxy[str] | CIMultiDict[str]


@dataclass(frozen=True, slots=True)
class Upstream:
    """The local LLM server."""

    authority: str
    """host:port, IPv6 in brackets: what the upstream sees as Host. Servers that guard against
    DNS rebinding (Ollama does) refuse any other."""
    local: bool
    """Its address is this machine's loopback."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `http://HOST:PORT`. Raises ValueError that says what is wrong."""
        parts = urlsplit(text)
        if parts.scheme != "http":
            raise ValueError(
                f"{text!r} must be http://HOST:PORT: the LLM server is on this machine"
            )
        if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"{text!r} must be http://HOST:PORT and nothing more")
        host = parts.hostname or ""
        if not re.fullmatch(r"[0-9A-Za-z.:-]+", host):
            raise ValueError(f"{text!r} has no valid host")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{shown}:{parts.port or 80}", _is_loopback(host))

    def url(self, target: str, scheme: str = "http") -> str:
        """The URL of an origin-form target there."""
        return f"{scheme}://{self.authority}{target}"

    def __str__(self) -> str:
        return f"http://{self.authority}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of our own."""

    status: int
    text: str


def is_ready_probe(method: str, target: str) -> bool:
    """Is this the one request that needs no token?"""
    return method in ("GET", "HEAD") and target.partition("?")[0] == READY_PATH


def refuse(method: str, target: str, headers: Headers) -> Refusal | None:
    """Why a request with a good token is not passed on all the same; None if it is."""
    if method in ("CONNECT", "TRACE"):
        return Refusal(405, f"{method} is not served here")
    if not _PRINTABLE.fullmatch(target) and (method, target) != ("OPTIONS", "*"):
        return Refusal(400, "the request target must be a plain path: no host, fragment or spaces")
    path = target.partition("?")[0]
    if path == RESERVED_PREFIX or path.startswith(RESERVED_PREFIX + "/"):
        return Refusal(404, f"only GET {READY_PATH} is served under {RESERVED_PREFIX}")
    return _refuse_framing(method, headers)


def _refuse_framing(method: str, headers: Headers) -> Refusal | None:
    """The parser is strict already; these are the classics of request smuggling, spelled out."""
    encodings = headers.getall("Transfer-Encoding", [])
    lengths = headers.getall("Content-Length", [])
    if encodings and (len(encodings) > 1 or encodings[0].strip().lower() != "chunked"):
        return Refusal(501, "the only Transfer-Encoding taken is chunked")
    if lengths and (encodings or len(lengths) > 1):
        return Refusal(400, "one Content-Length or chunked, not both")
    if _asks_for_websocket(headers) and (method != "GET" or encodings or lengths):
        return Refusal(400, "a WebSocket begins with a GET without a body")
    if headers.get("Expect", "100-continue").lower() != "100-continue":
        return Refusal(417, "the only Expect taken is 100-continue")
    return None


def wants_websocket(method: str, headers: Headers) -> bool:
    """RFC 6455 4.1: a GET that asks to turn this connection into a WebSocket."""
    return method == "GET" and _asks_for_websocket(headers)


def _asks_for_websocket(headers: Headers) -> bool:
    upgrades = headers.get("Upgrade", "").lower()
    return upgrades == "websocket" and "upgrade" in _connection_tokens(headers)


def request_headers(headers: Headers, upstream: Upstream, client: str) -> CIMultiDict[str]:
    """The headers for the upstream, all but the framing."""
    passed = _end_to_end(headers, _REWRITTEN)
    passed["Host"] = upstream.authority
    passed["X-Forwarded-For"] = client
    passed["X-Forwarded-Proto"] = "https"
    if host := headers.get("Host"):
        passed["X-Forwarded-Host"] = host
    return passed


def response_headers(headers: Headers) -> CIMultiDict[str]:
    """The headers for the client. A Content-Length stays: the body is passed on as it is."""
    return _end_to_end(headers, frozenset())


def websocket_headers(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """Without the handshake, which belongs to each of the two connections."""
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if not name.lower().startswith("sec-websocket-")
    )


def _end_to_end(headers: Headers, dropped: frozenset[str]) -> CIMultiDict[str]:
    gone = _HOP_BY_HOP | dropped | _connection_tokens(headers) - {"content-length"}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in gone)


def _connection_tokens(headers: Headers) -> set[str]:
    values = headers.getall("Connection", [])
    return {token.strip().lower() for value in values for token in value.split(",")}
