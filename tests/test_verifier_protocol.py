"""The check protocol: what is written can be read, and nothing else can (SPEC 3.4)."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.verifier.policy import parse_network
from llmkube.verifier.protocol import (
    MAX_ADDRESSES,
    MAX_REPORT_BYTES,
    AddressResult,
    CheckReport,
    CheckRequest,
    Outcome,
    decode_report,
    decode_request,
    encode_report,
    encode_request,
)

LONGEST = tuple(f"fd00:1234:1234:1234:1234:1234:1234:{1000 + n}" for n in range(MAX_ADDRESSES))
REQUEST = CheckRequest(
    input_hash="a" * 64,
    spki=bytes(range(32)),
    certificate=b"c" * 4096,
    port=65535,
    addresses=LONGEST,
    allow=(parse_network("127.0.0.0/8"),),
    deny=(parse_network("10.96.0.0/12"), parse_network("fd00:10::/64")),
    connect_timeout=timedelta(milliseconds=250),
)


def report(*results: AddressResult) -> CheckReport:
    return CheckReport("a" * 64, results)


def document(**changes: object) -> str:
    result = {"address": "10.0.0.1", "result": "Reachable", "detail": ""}
    return json.dumps({"version": 1, "inputHash": "h", "results": [result], **changes})


def test_a_request_survives_the_road() -> None:
    assert decode_request(encode_request(REQUEST)) == REQUEST


def test_seventeen_long_results_fit() -> None:
    outcome = Outcome.CERTIFICATE_MISMATCH
    full = report(*(AddressResult(text, outcome, "x" * 500) for text in LONGEST))
    text = encode_report(full)
    assert len(text.encode()) <= MAX_REPORT_BYTES
    read = decode_report(text)
    assert [(item.address, item.result) for item in read.results] == [
        (address, outcome) for address in LONGEST
    ]


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.text()), max_size=MAX_ADDRESSES))
def test_any_report_survives_the_road(found: list[tuple[Outcome, str]]) -> None:
    results = [
        AddressResult(address, outcome, detail)
        for address, (outcome, detail) in zip(LONGEST, found, strict=False)
    ]
    text = encode_report(report(*results))
    assert len(text.encode()) <= MAX_REPORT_BYTES
    read = decode_report(text)
    assert read.input_hash == "a" * 64
    assert [item.result for item in read.results] == [item.result for item in results]
    assert all(item.detail.isascii() and item.detail.isprintable() for item in read.results)


BAD_REPORTS = [
    ("none", None, "empty"),
    ("empty", "", "empty"),
    ("text", "Reachable", "Expecting value"),
    ("cut", document()[:-2], "Expecting"),
    ("trailing", document() + "x", "Extra data"),
    ("oversized", document(inputHash="h" * 4096), "4096"),
    ("oversized-in-bytes", document(detail="x" * 10) + "é" * 2040, "4096"),
    ("list", "[]", "not a JSON object"),
    ("deep", "[" * 4000, "deep|Expecting"),  # how deep is too deep depends on the version
    ("duplicate-key", '{"version":1,"version":1}', "twice"),
    ("nan", '{"version":NaN}', "NaN"),
    ("infinity", '{"version":-Infinity}', "Infinity"),
    ("no-version", "{}", "version: missing"),
    ("other-version", document(version=2), "one release"),
    ("bool-version", document(version=True), "bool"),
    ("float-version", document(version=1.0), "float"),
    ("no-hash", document(inputHash=None), "inputHash"),
    ("long-hash", document(inputHash="h" * 129), "inputHash"),
    ("extra", document(extra=1), "unknown fields: extra"),
    ("results-object", document(results={}), "results"),
    ("results-strings", document(results=["10.0.0.1"]), "results"),
    ("too-many", document(results=[{}] * 18), "more than 17"),
    ("result-empty", document(results=[{}]), "address: missing"),
    (
        "result-extra",
        document(results=[{"address": "10.0.0.1", "result": "Error", "detail": "", "x": 1}]),
        "unknown fields: x",
    ),
    (
        "unknown-outcome",
        document(results=[{"address": "10.0.0.1", "result": "Pending", "detail": ""}]),
        "known outcome",
    ),
    (
        "outcome-case",
        document(results=[{"address": "10.0.0.1", "result": "reachable", "detail": ""}]),
        "known outcome",
    ),
    (
        "no-address",
        document(results=[{"address": "mac.local", "result": "Error", "detail": ""}]),
        "not an IP address",
    ),
    (
        "mapped-address",
        document(results=[{"address": "::ffff:10.0.0.1", "result": "Error", "detail": ""}]),
        "canonical",
    ),
    (
        "long-detail",
        document(results=[{"address": "10.0.0.1", "result": "Error", "detail": "x" * 121}]),
        "detail",
    ),
    (
        "twice",
        document(results=[{"address": "10.0.0.1", "result": "Error", "detail": ""}] * 2),
        "twice",
    ),
    ("huge-integer", '{"version":' + "9" * 4000 + "}", "version"),
]


@pytest.mark.parametrize(
    ("text", "why"), [row[1:] for row in BAD_REPORTS], ids=[row[0] for row in BAD_REPORTS]
)
def test_a_garbled_report_is_refused_with_words(text: str | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_report(text)


@given(st.text(max_size=200))
def test_no_text_crashes_the_reader(text: str) -> None:
    try:
        decode_report(text)
    except ValueError:
        return
    raise AssertionError("a random text was taken for a report")


def test_control_characters_end_at_the_edge() -> None:
    text = document(results=[{"address": "10.0.0.1", "result": "Error", "detail": "\x1b[2J\nlook"}])
    assert decode_report(text).results[0].detail == "?[2J?look"


REQUEST_DOCUMENT = json.loads(encode_request(REQUEST))
BAD_REQUESTS = [
    ("port-0", {"port": 0}, "port"),
    ("port-text", {"port": "9443"}, "port"),
    ("spki-short", {"spki": "AAAA"}, "spki"),
    ("spki-not-base64", {"spki": "*" * 44}, "spki"),
    ("certificate-empty", {"certificate": ""}, "certificate"),
    ("certificate-large", {"certificate": "A" * 8000}, "certificate"),
    ("addresses-18", {"addresses": [f"10.0.0.{n}" for n in range(18)]}, "addresses"),
    ("addresses-number", {"addresses": [1]}, "addresses"),
    ("addresses-twice", {"addresses": ["10.0.0.1", "10.0.0.1"]}, "twice"),
    ("addresses-name", {"addresses": ["mac.local"]}, "not an IP address"),
    ("allow", {"allow": ["10.0.0.1/8"]}, "host bits"),
    ("timeout-0", {"connectTimeoutSeconds": 0}, "connectTimeoutSeconds"),
    ("timeout-long", {"handshakeTimeoutSeconds": 3600}, "handshakeTimeoutSeconds"),
    ("extra", {"extra": 1}, "unknown fields: extra"),
]


@pytest.mark.parametrize(
    ("changes", "why"), [row[1:] for row in BAD_REQUESTS], ids=[row[0] for row in BAD_REQUESTS]
)
def test_a_bad_request_is_refused_with_the_field(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_request(json.dumps({**REQUEST_DOCUMENT, **changes}))
