"""The agent's report: what is taken, what is refused and in which words (SPEC 3.1)."""

from __future__ import annotations

import json
import string
from base64 import b64decode, b64encode
from typing import Any, NoReturn

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkube.api.candidates import CandidateSource
from llmkube.api.names import MAX_REPORT_BYTES
from llmkube.api.report import (
    MAX_CERTIFICATE_BYTES,
    AgentReport,
    InvalidReport,
    ReportedCandidate,
    ReportedCapacity,
    parse_report,
    render_report,
)
from llmkube.api.spki import SpkiPin
from tests.support.reports import (
    UID,
    make_certificate,
    pin_text,
    report_document,
    report_text,
    shared_key,
)


def b64(raw: bytes) -> str:
    return b64encode(raw).decode()


def certificate(*args: Any, **kwargs: Any) -> str:
    return b64(make_certificate(*args, **kwargs))


def in_capacity(text: str) -> str:
    """A report whose capacity is this JSON text, which no dict could hold."""
    return report_text(capacity="@").replace('"@"', text)


def test_a_valid_report_becomes_values() -> None:
    report = parse_report(report_text())
    assert report.version == 1
    assert report.agent_version == "v0.1.0"
    assert report.ingress_port == 9443
    assert str(report.ingress_spki) == pin_text()
    assert report.ingress_certificate == b64decode(report_document()["ingressCertificate"])
    assert report.certificate_uid == UID
    assert report.candidates == (
        ReportedCandidate("100.101.2.3", CandidateSource.TAILNET),
        ReportedCandidate("192.168.1.20", CandidateSource.LAN),
    )
    assert report.capacity == ReportedCapacity("Apple M5 Max", 40, 137438953472, "Metal 4")


def test_bytes_are_read_like_text() -> None:
    text = report_text()
    assert parse_report(text.encode()) == parse_report(text)


OPENSSL_CERTIFICATE = (
    "MIIBaTCCARugAwIBAgIUIEX4ciuHd5Kw2sNqRX/FKI1kvZUwBQYDK2VwMAwxCjAIBgNVBAMMAXgwHhcNMjYxMTMwMTk1"
    "NTUwWhcNMzYxMTI3MTk1NTUwWjAMMQowCAYDVQQDDAF4MCowBQYDK2VwAyEAS1K0PCJg+sXbowl/9oxf6FkGeumexCGK"
    "GGjllUr9B4ejgY4wgYswHQYDVR0OBBYEFMwEvBEgVDg5x0wBu8TJPdn4SZPdMB8GA1UdIwQYMBaAFMwEvBEgVDg5x0wB"
    "u8TJPdn4SZPdMA8GA1UdEwEB/wQFMAMBAf8wOAYDVR0RBDEwL4YtdXJuOnV1aWQ6MGIwZThjYmItNmEwYy00ZDBmLThh"
    "NTMtMmExZjVkM2M5ZTEwMAUGAytlcANBAC53NKxPCDg+/NMn26G6Rl6OVVLIZ/0bmX7inpsOg3mFK7pSwkv9OIm8O+Gv"
    "3EYKOAaIS0kzoaxlwgiPqQyXrw4="
)
OPENSSL_PIN = "wmPA8K8sKUa/j1ShursgYa1JRTuIf972YmKa2CKcMz0="


def test_certificate_and_pin_are_those_of_openssl() -> None:
    """`openssl x509 -pubkey | openssl pkey -pubin -outform der | openssl dgst -sha256 -binary`."""
    report = parse_report(
        report_text(ingressCertificate=OPENSSL_CERTIFICATE, ingressSPKI=OPENSSL_PIN)
    )
    assert str(report.ingress_spki) == OPENSSL_PIN
    assert report.certificate_uid == UID


ACCEPTED = [
    pytest.param(report_text(ingressPort=1024), id="lowest port"),
    pytest.param(report_text(ingressPort=65535), id="highest port"),
    pytest.param(report_text(candidates=[]), id="no candidates is a well-formed report"),
    pytest.param(report_text(capacity=...), id="a Mac that knows nothing of its hardware"),
    pytest.param(report_text(capacity={}), id="an empty capacity"),
    pytest.param(report_text(capacity={"gpuCores": 2**31 - 1}), id="the largest int32"),
    pytest.param(report_text(capacity={"memoryBytes": 2**63 - 1}), id="the largest int64"),
    pytest.param(report_text(agentVersion=...), id="no agent version"),
    pytest.param(report_text(future={"a": [1.5, None, True]}), id="an unknown key is ignored"),
    pytest.param(report_text(future=0.1e-300), id="a fraction in an unknown key"),
    pytest.param(
        report_text(candidates=[{"address": "10.0.0.1", "source": "lan", "mtu": 1280}]),
        id="an unknown key of a candidate",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([f"URN:UUID:{UID.upper()}"])),
        id="a URN is compared without regard to case",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate(dns=["mac.local"])),
        id="a DNS name beside the one URI",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate(filler=3000)), id="a certificate of 3 KiB"
    ),
    pytest.param(" \n" + report_text() + "\n", id="blanks around the document"),
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text: str) -> None:
    assert parse_report(text).certificate_uid == UID


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(rsa.generate_private_key(65537, 2048), id="an RSA key"),
        pytest.param(ed25519.Ed25519PrivateKey.generate(), id="an Ed25519 key"),
        pytest.param(ec.generate_private_key(ec.SECP384R1()), id="a P-384 key"),
    ],
)
def test_any_usual_key_is_taken(key: Any) -> None:
    text = report_text(ingressSPKI=pin_text(key), ingressCertificate=b64(make_certificate(key=key)))
    assert str(parse_report(text).ingress_spki) == pin_text(key)


DER = make_certificate()
# A version field of 5 in place of 2: cryptography raises InvalidVersion, which is no ValueError.
VERSION_5 = DER.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020105"), 1)
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
PIN = SpkiPin.parse(pin_text()).digest
assert VERSION_5 != DER

REFUSED = [
    pytest.param("", "report", "not JSON", id="nothing"),
    pytest.param("{", "report", "not JSON", id="half a document"),
    pytest.param("null", "report", "not a JSON object", id="null"),
    pytest.param("[]", "report", "not a JSON object", id="a list"),
    pytest.param('"text"', "report", "not a JSON object", id="a string"),
    pytest.param(report_text() + "{}", "report", "not JSON", id="two documents"),
    pytest.param("\ufeff" + report_text(), "report", "not JSON", id="a byte order mark"),
    pytest.param(b"\xff\xfe{}", "report", "not UTF-8", id="bytes that are not UTF-8"),
    pytest.param('{"\ud800":1}', "report", "not UTF-8", id="half a surrogate pair in the text"),
    pytest.param(
        report_text(pad="x" * MAX_REPORT_BYTES), "report", "more than 16384", id="more than 16 KiB"
    ),
    pytest.param(
        json.dumps(report_document(pad="ü" * 8000), ensure_ascii=False),
        "report",
        "more than 16384",
        id="16 KiB are counted in bytes",
    ),
    pytest.param("[" * 16000, "report", "nested deeper", id="16,000 open brackets"),
    pytest.param(
        '{"a":' + "[" * 8000 + "]" * 8000 + "}", "report", "nested deeper", id="8,000 nested lists"
    ),
    pytest.param(
        report_text(future=[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]),
        "report",
        "nested deeper",
        id="eighteen levels in an unknown key",
    ),
    pytest.param(in_capacity('{"gpuCores":NaN}'), "report", "NaN", id="NaN"),
    pytest.param(in_capacity('{"gpuCores":Infinity}'), "report", "NaN", id="Infinity"),
    pytest.param(in_capacity('{"gpuCores":-Infinity}'), "report", "NaN", id="-Infinity"),
    pytest.param(
        report_text()[:-1] + ',"version":1}', "version", "twice", id="a key twice at the top"
    ),
    pytest.param(in_capacity('{"chip":"a","chip":"a"}'), "chip", "twice", id="twice in capacity"),
    pytest.param(
        report_text()[:-1] + ',"x":[{"y":{"z":1,"z":2}}]}', "z", "twice", id="twice, far below"
    ),
    pytest.param(
        report_text()[:-1] + ',"\\u001b[31m":1,"\\u001b[31m":2}',
        "[31m",
        "twice",
        id="twice, and the key is hostile",
    ),
    pytest.param('{"\\u0000":1,"\\u0000":2}', "report", "twice", id="twice, nothing printable"),
    pytest.param(report_text(version=...), "version", "missing", id="no version"),
    pytest.param(report_text(version=2), "version", "is 2", id="a later version"),
    pytest.param(report_text(version=True), "version", "a boolean", id="true is no version 1"),
    pytest.param(report_text(version=1.0), "version", "a fraction", id="1.0 is no version 1"),
    pytest.param(report_text(version="1"), "version", "a string", id="version as text"),
    pytest.param(report_text(version=10**30), "version", "within", id="a huge version"),
    pytest.param(report_text(agentVersion=1), "agentVersion", "an integer", id="agentVersion 1"),
    pytest.param(report_text(agentVersion=None), "agentVersion", "null", id="agentVersion null"),
    pytest.param(report_text(ingressPort=...), "ingressPort", "missing", id="no port"),
    pytest.param(report_text(ingressPort=1023), "ingressPort", "within 1024", id="a low port"),
    pytest.param(report_text(ingressPort=65536), "ingressPort", "within", id="port 65536"),
    pytest.param(report_text(ingressPort=-1), "ingressPort", "within", id="a negative port"),
    pytest.param(report_text(ingressPort="9443"), "ingressPort", "a string", id="port as text"),
    pytest.param(report_text(ingressPort=9443.0), "ingressPort", "a fraction", id="port 9443.0"),
    pytest.param(report_text(ingressPort=True), "ingressPort", "a boolean", id="port true"),
    pytest.param(report_text(candidates=...), "candidates", "missing", id="no list at all"),
    pytest.param(report_text(candidates={}), "candidates", "an object", id="candidates as object"),
    pytest.param(report_text(candidates=["::1"]), "candidates[0]", "object", id="bare addresses"),
    pytest.param(
        report_text(candidates=[{"address": "10.0.0.1"}, {"source": "lan"}]),
        "candidates[1].address",
        "missing",
        id="a candidate without address",
    ),
    pytest.param(
        report_text(candidates=[{"address": 167772161, "source": "lan"}]),
        "candidates[0].address",
        "an integer",
        id="an address as number",
    ),
    pytest.param(
        report_text(candidates=[{"address": "10.0.0.1", "source": ["lan"]}]),
        "candidates[0].source",
        "a list",
        id="a source as list",
    ),
    pytest.param(report_text(capacity=[]), "capacity", "a list", id="capacity as list"),
    pytest.param(report_text(capacity=None), "capacity", "null", id="capacity null"),
    pytest.param(
        report_text(capacity={"gpuCores": 2**31}), "capacity.gpuCores", "within", id="2^31 cores"
    ),
    pytest.param(
        report_text(capacity={"gpuCores": -1}), "capacity.gpuCores", "within", id="-1 cores"
    ),
    pytest.param(
        report_text(capacity={"gpuCores": True}), "capacity.gpuCores", "boolean", id="true cores"
    ),
    pytest.param(
        report_text(capacity={"memoryBytes": 2**63}),
        "capacity.memoryBytes",
        "within",
        id="2^63 bytes",
    ),
    pytest.param(
        in_capacity('{"memoryBytes":1' + "0" * 5000 + "}"), "report", "", id="5,000 digits"
    ),
    pytest.param(
        in_capacity('{"memoryBytes":1e400}'), "capacity.memoryBytes", "a fraction", id="1e400 bytes"
    ),
    pytest.param(
        report_text(capacity={"chip": {}}), "capacity.chip", "an object", id="a chip as object"
    ),
    pytest.param(
        report_text(capacity={"chip": "\ud800"}), "capacity.chip", "surrogate", id="half a pair"
    ),
    pytest.param(
        report_text(agentVersion="v\udfff"), "agentVersion", "surrogate", id="half a pair "
    ),
    pytest.param(report_text(ingressSPKI=...), "ingressSPKI", "missing", id="no pin"),
    pytest.param(report_text(ingressSPKI=""), "ingressSPKI", "base64", id="an empty pin"),
    pytest.param(report_text(ingressSPKI=b64(PIN[:31])), "ingressSPKI", "32", id="31 bytes"),
    pytest.param(report_text(ingressSPKI=b64(PIN + b"x")), "ingressSPKI", "32", id="33 bytes"),
    pytest.param(
        report_text(ingressSPKI=pin_text()[:-1]), "ingressSPKI", "base64", id="without padding"
    ),
    pytest.param(
        report_text(ingressSPKI=b64(b"\xfb" * 32).replace("+", "-")),
        "ingressSPKI",
        "base64",
        id="the URL-safe alphabet",
    ),
    pytest.param(
        report_text(ingressSPKI=pin_text()[:20] + "\n" + pin_text()[20:-1]),
        "ingressSPKI",
        "base64",
        id="a line break within",
    ),
    pytest.param(
        report_text(ingressSPKI=b64(bytes(32))[:-2] + "B="),
        "ingressSPKI",
        "base64",
        id="stray bits behind the last byte",
    ),
    pytest.param(report_text(ingressSPKI="ü" * 44), "ingressSPKI", "base64", id="not even ASCII"),
    pytest.param(report_text(ingressCertificate=...), "ingressCertificate", "missing", id="none"),
    pytest.param(report_text(ingressCertificate=""), "ingressCertificate", "", id="empty"),
    pytest.param(
        report_text(ingressCertificate="@@@@"), "ingressCertificate", "base64", id="not base64"
    ),
    pytest.param(
        report_text(ingressCertificate=b64(b"hello")), "ingressCertificate", "DER", id="no DER"
    ),
    pytest.param(
        report_text(ingressCertificate=b64(DER[:-1])), "ingressCertificate", "DER", id="cut off"
    ),
    pytest.param(
        report_text(ingressCertificate=b64(DER + b"\0")),
        "ingressCertificate",
        "DER",
        id="a byte behind it",
    ),
    pytest.param(
        report_text(ingressCertificate=b64(DER + DER)),
        "ingressCertificate",
        "one",
        id="two certificates",
    ),
    pytest.param(
        report_text(ingressCertificate=b64(VERSION_5)),
        "ingressCertificate",
        "DER",
        id="a certificate version that does not exist",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate(filler=MAX_CERTIFICATE_BYTES)),
        "ingressCertificate",
        "larger than 4096",
        id="more than 4 KiB",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate(key=OTHER_KEY)),
        "ingressCertificate",
        "another key",
        id="a certificate of another key",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([])),
        "ingressCertificate",
        "exactly one URI SAN",
        id="no SAN",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([], dns=["mac.local"])),
        "ingressCertificate",
        "exactly one URI SAN",
        id="a SAN without URI",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([f"urn:uuid:{UID}", f"urn:uuid:{UID}"])),
        "ingressCertificate",
        "exactly one URI SAN",
        id="two URIs",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([f"https://{UID}"])),
        "ingressCertificate",
        "exactly one URI SAN",
        id="another scheme",
    ),
    pytest.param(
        report_text(ingressCertificate=certificate([f"urn:uuid:{UID}x"])),
        "ingressCertificate",
        "exactly one URI SAN",
        id="no UUID",
    ),
]


@pytest.mark.parametrize(("text", "field", "why"), REFUSED)
def test_refused_with_field_and_reason(text: str | bytes, field: str, why: str) -> None:
    with pytest.raises(InvalidReport) as caught:
        parse_report(text)
    assert caught.value.field == field
    assert why in caught.value.why
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


CLEANED = [
    pytest.param("Apple\x00 M5\x1b[31m\n", "Apple M5[31m", id="control characters go"),
    pytest.param("M5 \u202egnp.exe", "M5 gnp.exe", id="bidirectional overrides go"),
    pytest.param("M5\u2028Max", "M5Max", id="line separators go"),
    pytest.param("x" * 500, "x" * 128, id="128 characters stay"),
    pytest.param("芯" * 500, "芯" * 128, id="characters are counted, not bytes"),
    pytest.param("  Apple M5  ", "Apple M5", id="blanks around go"),
    pytest.param("\x00\x01", None, id="nothing is left"),
    pytest.param("", None, id="empty"),
]


@pytest.mark.parametrize(("chip", "expected"), CLEANED)
def test_text_for_people_is_cleaned(chip: str, expected: str | None) -> None:
    assert parse_report(report_text(capacity={"chip": chip})).capacity.chip == expected


def test_the_other_texts_have_their_own_limits() -> None:
    report = parse_report(report_text(agentVersion="v" * 200, capacity={"metalVersion": "M" * 200}))
    assert report.agent_version == "v" * 64
    assert report.capacity.metal_version == "M" * 32


SOURCES = [
    ("override", CandidateSource.OVERRIDE),
    ("docker-host", CandidateSource.DOCKER_HOST),
    ("starlink", CandidateSource.UNKNOWN),
    ("", CandidateSource.UNKNOWN),
    (None, CandidateSource.UNKNOWN),
]


@pytest.mark.parametrize(("source", "expected"), SOURCES)
def test_a_source_we_do_not_know_is_unknown(source: str | None, expected: CandidateSource) -> None:
    candidate = {"address": "10.0.0.1"} | ({} if source is None else {"source": source})
    (parsed,) = parse_report(report_text(candidates=[candidate])).candidates
    assert parsed.source is expected


def test_an_address_is_made_printable_but_never_mended() -> None:
    hostile = ["10.0.0.\x001", "10.0.0.1\n", "\x1b[2J", "1" * 500, "10.0.0.1" + " " * 100]
    report = parse_report(report_text(candidates=[{"address": a} for a in hostile]))
    for candidate in report.candidates:
        assert candidate.address.isprintable()
        assert len(candidate.address) <= 64
        assert candidate.address != "10.0.0.1"


def test_as_many_candidates_as_fit_are_kept_in_order() -> None:
    """The best address may be the last one; what is dialled is limited later."""
    many = [{"address": f"10.0.{i // 256}.{i % 256}"} for i in range(300)]
    report = parse_report(json.dumps(report_document(candidates=many), separators=(",", ":")))
    assert [c.address for c in report.candidates] == [c["address"] for c in many]


def test_ten_thousand_candidates_are_too_large() -> None:
    with pytest.raises(InvalidReport, match="more than 16384"):
        parse_report(report_text(candidates=[{"address": "10.0.0.1"}] * 10_000))


def test_a_certificate_that_makes_the_library_panic_costs_its_report_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rust code panics with a BaseException, which would end the controller, and again each start:
    the Lease is still there."""
    panic = type("PanicException", (BaseException,), {})

    def load(_der: bytes) -> NoReturn:
        raise panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("cryptography.x509.load_der_x509_certificate", load)
    with pytest.raises(InvalidReport, match="ingressCertificate"):
        parse_report(report_text())


# Properties -------------------------------------------------------------------------------------
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=40),  # surrogates and controls included
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=12,
)
VALID = report_document()
KEYS = [*sorted(VALID), "future"]


def must_not_raise(text: str | bytes) -> AgentReport | None:
    try:
        return parse_report(text)
    except InvalidReport as error:
        refusal = error
    assert str(refusal).isprintable()
    return None


@given(st.text() | st.binary())
def test_any_text_is_a_report_or_an_invalid_report(text: str | bytes) -> None:
    must_not_raise(text)


@given(st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3))
def test_any_value_at_any_key_is_a_report_or_an_invalid_report(changes: dict[str, Any]) -> None:
    report = must_not_raise(json.dumps(VALID | changes))
    if report is not None:
        assert json.loads(render_report(report))["ingressPort"] == report.ingress_port
        render_report(report).encode()


@given(st.integers(0, len(DER) - 1), st.integers(0, 255))
def test_any_damaged_certificate_is_a_report_or_an_invalid_report(at: int, value: int) -> None:
    damaged = DER[:at] + bytes([value]) + DER[at + 1 :]
    must_not_raise(report_text(ingressCertificate=b64(damaged)))


@given(st.binary(max_size=300))
def test_any_bytes_as_certificate_are_refused(der: bytes) -> None:
    assert must_not_raise(report_text(ingressCertificate=b64(der))) is None


@given(st.integers(0, 2000), st.sampled_from(string.printable + "\0\x7fé\U0001f600"))
def test_any_damaged_document_is_a_report_or_an_invalid_report(at: int, character: str) -> None:
    text = report_text()
    must_not_raise(text[:at] + character + text[at + 1 :])


LABELS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=32)


@settings(max_examples=50)
@given(
    version=LABELS,
    port=st.integers(1024, 65535),
    candidates=st.lists(
        st.builds(
            ReportedCandidate, st.ip_addresses().map(str), st.sampled_from(list(CandidateSource))
        ),
        max_size=30,
    ),
    capacity=st.builds(
        ReportedCapacity,
        st.none() | LABELS,
        st.none() | st.integers(0, 2**31 - 1),
        st.none() | st.integers(0, 2**63 - 1),
        st.none() | LABELS,
    ),
)
def test_what_an_agent_renders_the_controller_reads(
    version: str, port: int, candidates: list[ReportedCandidate], capacity: ReportedCapacity
) -> None:
    report = AgentReport(
        agent_version=version,
        ingress_port=port,
        ingress_spki=SpkiPin.parse(pin_text(shared_key())),
        ingress_certificate=DER,
        certificate_uid=UID,
        candidates=tuple(candidates),
        capacity=capacity,
    )
    assert parse_report(render_report(report)) == report
