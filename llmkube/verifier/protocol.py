"""What controller and verifier tell each other: one question, one answer.

The question travels in the environment variable `LLMKUBE_CHECK`, the answer in the pod's
termination message. Both are JSON. The answer comes from a pod, so the controller reads it as
strictly as the agent's report: it fits in 4,096 bytes (the API server cuts there), knows every
key, names each address once in canonical form, and echoes the hash of what was asked.

Next: `dialback.py`, how the answer is found; `llmkube/rules/checks.py`, who reads it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from llmkube.verifier.policy import Network, parse_address, parse_network

CHECK_VARIABLE = "LLMKUBE_CHECK"
"""Environment variable with the request."""
TERMINATION_LOG_VARIABLE = "LLMKUBE_TERMINATION_LOG"
"""Environment variable naming another file for the report (the demo's local pods)."""
TERMINATION_LOG = "/dev/termination-log"

VERSION = 1
MAX_REPORT_BYTES = 4096
MAX_ADDRESSES = 17
MAX_DETAIL = 120
MAX_CERTIFICATE_BYTES = 4096
SPKI_BYTES = 32
_MAX_TIMEOUT = timedelta(minutes=1)
_MAX_HASH = 128


class Outcome(StrEnum):
    """What a dial-back found at one address: the one source of these names."""

    REACHABLE = "Reachable"
    TIMEOUT = "Timeout"
    REFUSED = "Refused"
    PIN_MISMATCH = "PinMismatch"
    CERTIFICATE_MISMATCH = "CertificateMismatch"
    NOT_ALLOWED = "NotAllowed"
    ERROR = "Error"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What to dial, and which key and certificate must answer.

    `spki` is the SHA-256 of the DER SubjectPublicKeyInfo (32 bytes), `certificate` the DER of the
    agent's certificate, `addresses` canonical texts in preference order.
    """

    input_hash: str
    spki: bytes
    certificate: bytes
    port: int
    addresses: tuple[str, ...]
    allow: tuple[Network, ...] = ()
    deny: tuple[Network, ...] = ()
    connect_timeout: timedelta = timedelta(seconds=5)
    handshake_timeout: timedelta = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class AddressResult:
    """What was found at one address; `detail` is for people, at most MAX_DETAIL characters."""

    address: str
    result: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The answer: the hash of the question and one result for each address asked about."""

    input_hash: str
    results: tuple[AddressResult, ...]


def encode_request(request: CheckRequest) -> str:
    """The value of LLMKUBE_CHECK. It holds nothing secret: pin and certificate are public."""
    return json.dumps(
        {
            "version": VERSION,
            "inputHash": request.input_hash,
            "spki": b64encode(request.spki).decode(),
            "certificate": b64encode(request.certificate).decode(),
            "port": request.port,
            "addresses": request.addresses,
            "allow": [str(network) for network in request.allow],
            "deny": [str(network) for network in request.deny],
            "connectTimeoutSeconds": request.connect_timeout.total_seconds(),
            "handshakeTimeoutSeconds": request.handshake_timeout.total_seconds(),
        },
        separators=(",", ":"),
    )


def decode_request(text: str) -> CheckRequest:
    """Read LLMKUBE_CHECK. Raises ValueError naming the field that is wrong."""
    if not text:
        raise ValueError("is empty or not set")
    fields = _versioned(text)
    request = CheckRequest(
        input_hash=fields.text("inputHash", _MAX_HASH),
        spki=fields.base64("spki", SPKI_BYTES),
        certificate=fields.base64("certificate", MAX_CERTIFICATE_BYTES),
        port=fields.integer("port", 1, 65535),
        addresses=tuple(_canonical(item) for item in fields.texts("addresses", MAX_ADDRESSES)),
        allow=tuple(parse_network(item) for item in fields.texts("allow")),
        deny=tuple(parse_network(item) for item in fields.texts("deny")),
        connect_timeout=fields.seconds("connectTimeoutSeconds"),
        handshake_timeout=fields.seconds("handshakeTimeoutSeconds"),
    )
    fields.close()
    if len(request.spki) != SPKI_BYTES:
        raise ValueError(f"spki: {len(request.spki)} bytes instead of {SPKI_BYTES}")
    _refuse_duplicates(request.addresses)
    return request


def encode_report(report: CheckReport) -> str:
    """The termination message, in at most MAX_REPORT_BYTES: details are cut to what fits."""
    for limit in (MAX_DETAIL, 80, 40, 0):
        text = _encode_report(report, limit)
        if len(text) <= MAX_REPORT_BYTES:
            return text
    raise ValueError(f"{len(report.results)} results do not fit in {MAX_REPORT_BYTES} bytes")


def _encode_report(report: CheckReport, limit: int) -> str:
    results = [
        {"address": item.address, "result": item.result, "detail": _plain(item.detail)[:limit]}
        for item in report.results
    ]
    document = {"version": VERSION, "inputHash": report.input_hash, "results": results}
    return json.dumps(document, separators=(",", ":"))


def decode_report(text: str | None) -> CheckReport:
    """Read a termination message. Raises ValueError saying what is wrong with it.

    It cannot tell whether the right question was answered: the caller compares the hash and the
    addresses with what it asked.
    """
    if not text:
        raise ValueError("the termination message is empty")
    if len(text) > MAX_REPORT_BYTES or len(text.encode(errors="replace")) > MAX_REPORT_BYTES:
        raise ValueError(f"the termination message is longer than {MAX_REPORT_BYTES} bytes")
    fields = _versioned(text)
    report = CheckReport(
        input_hash=fields.text("inputHash", _MAX_HASH),
        results=tuple(_decode_result(item) for item in fields.objects("results", MAX_ADDRESSES)),
    )
    fields.close()
    _refuse_duplicates(tuple(result.address for result in report.results))
    return report


def _decode_result(document: Mapping[str, Any]) -> AddressResult:
    fields = _Fields(document)
    address = _canonical(fields.text("address", 45))
    name = fields.text("result", 32)
    detail = fields.text("detail", MAX_DETAIL)
    fields.close()
    try:
        return AddressResult(address, Outcome(name), _plain(detail))
    except ValueError:
        raise ValueError(f"result: {_plain(name)!r} is no known outcome") from None


def _plain(text: str) -> str:
    """Printable ASCII only: it ends up in conditions, events and terminals."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def _canonical(text: str) -> str:
    try:
        address = str(parse_address(text))
    except ValueError as error:
        raise ValueError(f"address {_plain(text)[:64]!r} {error}") from None
    if address != text:
        raise ValueError(f"address {_plain(text)!r} is not in canonical form ({address})")
    return address


def _refuse_duplicates(addresses: tuple[str, ...]) -> None:
    if len(set(addresses)) != len(addresses):
        raise ValueError("an address occurs twice")


def _load(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004 - one error class for the caller
    return document


def _versioned(text: str) -> _Fields:
    fields = _Fields(_load(text))
    if fields.integer("version", 0, 1 << 31) != VERSION:
        raise ValueError(f"version: only {VERSION} is known: both images must be of one release")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice")
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class _Fields:
    """Takes a JSON object apart by type; what is left at the end is an error."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._rest = dict(document)

    def close(self) -> None:
        if self._rest:
            names = ", ".join(sorted(_plain(name)[:32] for name in self._rest))
            raise ValueError(f"unknown fields: {names[:200]}")

    def text(self, name: str, limit: int) -> str:
        value: str = self._take(name, str)
        if len(value) > limit:
            raise ValueError(f"{name}: longer than {limit} characters")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value: int = self._take(name, int)
        if not low <= value <= high:
            raise ValueError(f"{name}: not within {low}–{high}")
        return value

    def seconds(self, name: str) -> timedelta:
        value: float = self._take(name, int, float)
        if not 0 < value <= _MAX_TIMEOUT.total_seconds():
            raise ValueError(f"{name}: not within 0–{_MAX_TIMEOUT.total_seconds():.0f} s")
        return timedelta(seconds=value)

    def base64(self, name: str, limit: int) -> bytes:
        text = self.text(name, limit * 4 // 3 + 4)
        try:
            data = b64decode(text, validate=True)
        except ValueError:
            raise ValueError(f"{name}: not base64") from None
        if not 0 < len(data) <= limit:
            raise ValueError(f"{name}: not within 1–{limit} bytes")
        return data

    def texts(self, name: str, limit: int = 1024) -> list[str]:
        return self._items(name, str, limit)

    def objects(self, name: str, limit: int) -> list[dict[str, Any]]:
        return self._items(name, dict, limit)

    def _items(self, name: str, kind: type, limit: int) -> list[Any]:
        value = self._take(name, list)
        if len(value) > limit:
            raise ValueError(f"{name}: more than {limit} items")
        if not all(type(item) is kind for item in value):
            raise ValueError(f"{name}: not a list of {kind.__name__}")
        return list(value)

    def _take(self, name: str, *kinds: type) -> Any:
        if name not in self._rest:
            raise ValueError(f"{name}: missing")
        value = self._rest.pop(name)
        if type(value) not in kinds:
            raise ValueError(f"{name}: a {type(value).__name__} instead of {kinds[0].__name__}")
        return value
