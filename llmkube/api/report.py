"""The agent's report: what a Mac claims about itself, one JSON document in a Lease annotation.

The Mac is not trusted, so `parse_report` is the edge where text becomes values: whatever the text,
it returns a well-formed `AgentReport` or raises `InvalidReport`, in bounded time and memory, and
nothing that it lets through can break a status write, a log line or a terminal. Whether the claims
are *true* is the verifier's business (`llmkube.verifier`); whether the certificate names the right
MetalNode is the caller's, who knows the UID. A report rarely changes: callers cache by text.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from cryptography import x509

from llmkube.api.candidates import CandidateSource
from llmkube.api.names import MAX_REPORT_BYTES
from llmkube.api.spki import SpkiPin, strict_base64

REPORT_VERSION = 1
MAX_CERTIFICATE_BYTES = 4 * 1024
MAX_DEPTH = 16
PORTS = range(1024, 65536)
_BASE64_OF_CERTIFICATE = -(-MAX_CERTIFICATE_BYTES // 3) * 4
_BASE64_OF_PIN = 44
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_MAX_ADDRESS = 64
"""Longer than any IP address, so that cutting off never makes a bad address good."""
_UID_URN = re.compile(
    r"urn:uuid:([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})", re.IGNORECASE
).fullmatch
_SOURCES: Mapping[str, CandidateSource] = {source.value: source for source in CandidateSource}


class InvalidReport(ValueError):
    """A report that breaks the contract: `field` names where (`report` for the whole), `why` says
    how. Both are safe to print: short, printable, and without the Mac's own text but key names."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class ReportedCandidate(msgspec.Struct, frozen=True, gc=False):
    """An address the Mac believes it has. Not yet parsed: `rules.candidates` judges it."""

    address: str
    source: CandidateSource


@dataclass(frozen=True, slots=True)
class ReportedCapacity:
    """Hardware, as far as the Mac could find out."""

    chip: str | None = None
    gpu_cores: int | None = None
    memory_bytes: int | None = None
    metal_version: str | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """A well-formed report. `certificate_uid` is the UID, in lower case, that the certificate's
    only URI SAN names; the certificate's key is the one that `ingress_spki` pins."""

    agent_version: str
    ingress_port: int
    ingress_spki: SpkiPin
    ingress_certificate: bytes
    certificate_uid: str
    candidates: tuple[ReportedCandidate, ...]
    capacity: ReportedCapacity
    version: int = REPORT_VERSION


def parse_report(text: str | bytes) -> AgentReport:
    """Parse the annotation's text. Raises InvalidReport, and nothing else."""
    document = _Fields(_load(text))
    version = document.integer("version", 0, _INT32_MAX)
    if version != REPORT_VERSION:
        _refuse("version", f"is {version}, and this controller reads {REPORT_VERSION}")
    port = document.integer("ingressPort", PORTS.start, PORTS.stop - 1)
    pin = _parse_pin(document.text("ingressSPKI"))
    der, uid = _parse_certificate(document.text("ingressCertificate"), pin)
    return AgentReport(
        version=version,
        agent_version=document.label("agentVersion", 64) or "",
        ingress_port=port,
        ingress_spki=pin,
        ingress_certificate=der,
        certificate_uid=uid,
        candidates=_parse_candidates(document.array("candidates")),
        capacity=_parse_capacity(document.object("capacity")),
    )


def render_report(report: AgentReport) -> str:
    """The annotation's text for a report; `parse_report` reads it back."""
    capacity = {
        "chip": report.capacity.chip,
        "gpuCores": report.capacity.gpu_cores,
        "memoryBytes": report.capacity.memory_bytes,
        "metalVersion": report.capacity.metal_version,
    }
    document = {
        "version": report.version,
        "agentVersion": report.agent_version,
        "ingressPort": report.ingress_port,
        "ingressSPKI": str(report.ingress_spki),
        "ingressCertificate": b64encode(report.ingress_certificate).decode(),
        "candidates": [
            {"address": candidate.address, "source": candidate.source.value}
            for candidate in report.candidates
        ],
        "capacity": {key: value for key, value in capacity.items() if value is not None},
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


# JSON, strictly ---------------------------------------------------------------------------------
def _load(text: str | bytes) -> dict[str, Any]:
    try:
        raw = text.encode() if isinstance(text, str) else text
        if len(raw) > MAX_REPORT_BYTES:
            # Not how many: each number would be a fault of its own, to be told anew.
            _refuse("report", f"has more than {MAX_REPORT_BYTES} bytes")
        value = _decode_json(text if isinstance(text, str) else raw.decode())
    except UnicodeError:
        _refuse("report", "is not UTF-8")
    except RecursionError:  # not a ValueError
        _refuse("report", f"is nested deeper than {MAX_DEPTH} levels")
    except InvalidReport:
        raise
    except ValueError:  # the decoder's own words quote the text: they stay here
        _refuse("report", "is not JSON")
    if not isinstance(value, dict):
        _refuse("report", "is not a JSON object")
    if _too_deep(value):
        _refuse("report", f"is nested deeper than {MAX_DEPTH} levels")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _refuse(clean_text(key, 32) or "report", "is given twice in one object")
            seen.add(key)
    return value


def _no_constant(_name: str) -> NoReturn:
    _refuse("report", "contains NaN or Infinity, which are not JSON")


_decode_json: Callable[[str], Any] = json.JSONDecoder(
    object_pairs_hook=_object_without_duplicates, parse_constant=_no_constant
).decode


_CONTAINERS = frozenset({dict, list})


def _too_deep(value: object) -> bool:
    """Whether containers nest beyond MAX_DEPTH, wherever this interpreter's own limit lies."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def clean_text(text: str, limit: int) -> str:
    """Printable characters only (no control, bidi, or line-break character), at most `limit`."""
    if not text.isprintable():
        text = "".join(character for character in text if character.isprintable())
    return text[:limit].strip()


def _refuse(field: str, why: str) -> NoReturn:
    raise InvalidReport(field, why)


_WORDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class _Fields:
    """Typed access to one JSON object; `prefix` places it in the report, for messages."""

    __slots__ = ("_prefix", "_value")

    def __init__(self, value: dict[str, Any], prefix: str = "") -> None:
        self._value = value
        self._prefix = prefix

    def _get(self, key: str, kind: type, *, required: bool) -> Any:
        value = self._value.get(key, _MISSING)
        if value is _MISSING:
            if required:
                _refuse(self._prefix + key, "is missing")
            return None
        if type(value) is not kind:  # exactly: True is an int to isinstance
            _refuse(self._prefix + key, f"is {_WORDS[type(value)]}, not {_WORDS[kind]}")
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        return self._in_range(key, self._get(key, int, required=True), least, most)

    def optional_integer(self, key: str, most: int) -> int | None:
        value = self._get(key, int, required=False)
        return None if value is None else self._in_range(key, value, 0, most)

    def _in_range(self, key: str, value: int, least: int, most: int) -> int:
        if not least <= value <= most:
            _refuse(self._prefix + key, f"is not within {least} to {most}")
        return value

    def text(self, key: str) -> str:
        value: str = self._get(key, str, required=True)
        return value

    def label(self, key: str, limit: int) -> str | None:
        """Text for people: cleaned and cut. None when absent or nothing is left."""
        value = self._get(key, str, required=False)
        if value is None:
            return None
        if not value.isascii() and _has_lone_surrogate(value):
            _refuse(self._prefix + key, "contains half a surrogate pair, which is no text")
        return clean_text(value, limit) or None

    def array(self, key: str) -> list[Any]:
        value: list[Any] = self._get(key, list, required=True)
        return value

    def object(self, key: str) -> _Fields:
        return _Fields(self._get(key, dict, required=False) or {}, f"{self._prefix}{key}.")


_MISSING = object()


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


_UNUSABLE_CERTIFICATE = "is not one well-formed DER certificate with a usable key"


# The parts --------------------------------------------------------------------------------------
def _parse_candidates(values: list[Any]) -> tuple[ReportedCandidate, ...]:
    """All of them: there are at most about a thousand in 16 KiB, and the best may come last."""
    return tuple(_parse_candidate(index, value) for index, value in enumerate(values))


def _parse_candidate(index: int, value: Any) -> ReportedCandidate:
    if type(value) is not dict:
        _refuse(f"candidates[{index}]", "is not an object")
    if (usual := _usual_candidate(value)) is not None:
        return usual
    fields = _Fields(value, f"candidates[{index}].")
    address = fields.text("address")[:_MAX_ADDRESS]
    if not address.isprintable():  # never mend an address: only keep it from harming a terminal
        address = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in address)
    source = fields.label("source", 16)
    return ReportedCandidate(address, _SOURCES.get(source or "", CandidateSource.UNKNOWN))


def _usual_candidate(value: dict[str, Any]) -> ReportedCandidate | None:
    """A candidate with nothing to mend, in a fifth of the time; None: look closer."""
    address, source = value.get("address"), value.get("source")
    if type(address) is not str or type(source) is not str or source not in _SOURCES:
        return None
    if len(address) > _MAX_ADDRESS or not address.isprintable():
        return None
    return ReportedCandidate(address, _SOURCES[source])


def _parse_capacity(fields: _Fields) -> ReportedCapacity:
    return ReportedCapacity(
        chip=fields.label("chip", 128),
        gpu_cores=fields.optional_integer("gpuCores", _INT32_MAX),
        memory_bytes=fields.optional_integer("memoryBytes", _INT64_MAX),
        metal_version=fields.label("metalVersion", 32),
    )


def _parse_pin(text: str) -> SpkiPin:
    try:
        if len(text) != _BASE64_OF_PIN:
            raise ValueError
        return SpkiPin.parse(text)
    except ValueError:
        _refuse("ingressSPKI", "is not the standard base64 of 32 bytes")


def _parse_certificate(text: str, pin: SpkiPin) -> tuple[bytes, str]:
    """The DER and the UID it names."""
    field = "ingressCertificate"
    if len(text) > _BASE64_OF_CERTIFICATE:
        _refuse(field, f"is larger than {MAX_CERTIFICATE_BYTES} bytes of DER")
    try:
        der = strict_base64(text)
    except ValueError:
        _refuse(field, "is not standard base64")
    if len(der) > MAX_CERTIFICATE_BYTES:
        _refuse(field, f"is larger than {MAX_CERTIFICATE_BYTES} bytes of DER")
    try:
        certificate = x509.load_der_x509_certificate(der)
        actual_pin = SpkiPin.of(certificate)
        uris = _uris(certificate)
    except Exception:  # cryptography raises InvalidVersion, UnsupportedAlgorithm, TypeError, …
        _refuse(field, _UNUSABLE_CERTIFICATE)
    except BaseException as error:  # a panic in its Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        _refuse(field, _UNUSABLE_CERTIFICATE)
    if actual_pin != pin:
        _refuse(field, "has another key than ingressSPKI pins")
    match = _UID_URN(uris[0]) if len(uris) == 1 else None
    if match is None:
        _refuse(field, "does not carry exactly one URI SAN, urn:uuid:<UID of the MetalNode>")
    return der, match[1].lower()


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.UniformResourceIdentifier)
