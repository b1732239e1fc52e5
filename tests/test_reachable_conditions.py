"""Reachable: which status, reason, message and hostIP the facts amount to."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from llmkube.verifier.policy import AddressPolicy, parse_network
from tests.support.dialback import (
    FAILED,
    LAN,
    MINUTE,
    OTHER_UID,
    PENDING,
    POLICY,
    TAILNET,
    VERIFIED,
    Bench,
    node_of,
    report_with,
    rotated,
    second,
    verified,
)
from tests.support.reports import UID, make_certificate, pin_text, report_for

# Which condition ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "spec", "status", "reason", "words"),
    [
        pytest.param({"report": None}, {}, "False", "NoReport", "llmkube agent", id="no report"),
        pytest.param(
            {"report": "{"}, {}, "False", "InvalidReport", "JSON", id="a report that is no JSON"
        ),
        pytest.param(
            {"report": report_for(UID, ingressPort=80)},
            {},
            "False",
            "InvalidReport",
            "ingressPort",
            id="a bad field is named",
        ),
        pytest.param(
            {"report": report_for(OTHER_UID)},
            {},
            "False",
            "CertificateMismatch",
            OTHER_UID,
            id="a certificate for another MetalNode",
        ),
        pytest.param(
            {"report": report_with()},
            {},
            "False",
            "NoCandidates",
            "--host-ip",
            id="no address reported",
        ),
        pytest.param(
            {"report": report_with("mac.local", "010.1.1.1")},
            {},
            "False",
            "NoCandidates",
            "2 reported as no IP addresses",
            id="only nonsense reported, and counted",
        ),
        pytest.param(
            {"report": report_with("127.0.0.1", "10.96.0.1")},
            {},
            "False",
            "NoAllowedAddress",
            "127.0.0.1 is a loopback address, 10.96.0.1 is denied by 10.96.0.0/12",
            id="every address is refused",
        ),
        pytest.param(
            {},
            {"hostIP": "not-an-ip"},
            "False",
            "InvalidSpec",
            'spec.hostIP "not-an-ip" is not an IP address',
            id="spec.hostIP is a word",
        ),
        pytest.param(
            {"report": "{"},
            {"hostIP": "10.0.0.0/8"},
            "False",
            "InvalidSpec",
            "one plain IP address",
            id="a wrong spec comes before a wrong report",
        ),
        pytest.param({}, {}, "Unknown", "VerificationPending", TAILNET, id="nothing tried yet"),
    ],
)
def test_conditions_that_need_no_check(
    changes: dict[str, Any], spec: dict[str, Any], status: str, reason: str, words: str
) -> None:
    bench = Bench(**changes)
    bench.slots = False
    bench.edit(**spec)
    bench.settle()
    assert bench.state == (status, reason, None)
    assert words in bench.reachable.message
    if reason != "VerificationPending":
        assert bench.look().plan is None, "nothing may be dialled"
    assert bench.reachable.observed_generation == bench.node.metadata.generation
    assert bench.node.status.observed_generation == bench.node.metadata.generation


@pytest.mark.parametrize(
    "host_ip",
    [
        "mac.example",
        "10.0.0.0/8",
        "fe80::1%en0",
        "10.0.0.1:9443",
        "[fd00::1]",
        "10.0.0.01",
        " 10.0.0.1",
        "0x0a000001",
        "167772161",
        "10.0.1",
    ],
)
def test_host_ip_in_any_other_form_than_an_address_ends_a_true(host_ip: str) -> None:
    bench = verified()
    bench.edit(hostIP=host_ip)
    assert bench.look().confirm_live
    assert bench.state == ("False", "InvalidSpec", None)
    bench.clock.advance(MINUTE * 60)
    assert bench.settle().plan is None


def test_a_refused_host_ip_is_a_candidate_like_any_other() -> None:
    bench = Bench()
    bench.edit(hostIP="127.0.0.1")
    bench.verify(Reachable=LAN)
    assert bench.results == {"127.0.0.1": "NotAllowed", TAILNET: "Timeout", LAN: "Reachable"}
    assert bench.state == ("True", "Verified", LAN)


def test_an_empty_host_ip_is_none() -> None:
    bench = Bench()
    bench.edit(hostIP="")
    bench.verify(Reachable=TAILNET)
    assert bench.state == VERIFIED


def test_a_wrong_spec_comes_before_a_silent_agent_and_that_before_the_report() -> None:
    bench = Bench(report="{")
    bench.connect("False")
    bench.settle()
    assert bench.state == ("Unknown", "AgentDisconnected", None)
    bench.edit(hostIP="nonsense")
    bench.settle()
    assert bench.state == ("False", "InvalidSpec", None)


# Checks and what they mean ------------------------------------------------------------------------


def test_the_first_reachable_candidate_in_preference_order_is_the_host_ip() -> None:
    bench = Bench()
    bench.edit(hostIP="10.1.1.1")
    bench.verify(Reachable=f"{LAN} {TAILNET}", others="Refused")
    assert bench.state == VERIFIED
    assert bench.results == {"10.1.1.1": "Refused", TAILNET: "Reachable", LAN: "Reachable"}
    assert TAILNET in bench.reachable.message
    assert bench.book.failures == 0
    assert bench.book.last_check is not None
    assert bench.book.last_start is not None
    assert bench.book.last_check >= bench.book.last_start
    assert bench.node.status.ingress_port == 9443
    assert bench.node.status.ingress_spki == pin_text()
    assert all(c.checked_at for c in bench.node.status.candidates)


def test_when_no_address_answers_the_message_lists_each_with_its_outcome_and_what_to_do() -> None:
    bench = Bench()
    bench.verify(PinMismatch=TAILNET, Refused=LAN)
    assert bench.state == FAILED
    message = bench.reachable.message
    assert f"{TAILNET}: PinMismatch" in message
    assert f"{LAN}: Refused" in message
    assert "see whether the agent runs there" in message
    assert bench.book.failures == 1


def test_what_only_the_check_knew_stays_in_the_message() -> None:
    bench = Bench()
    bench.settle()
    asked = bench.request()
    results = [
        {"address": a, "result": "Error", "detail": "no route to host"} for a in asked.addresses
    ]
    bench.answer(
        message=json.dumps({"version": 1, "inputHash": asked.input_hash, "results": results})
    )
    bench.settle()
    told = bench.reachable.message
    assert "no route to host" in told
    bench.restart()
    bench.clock.advance(second(5))
    bench.settle()
    assert bench.reachable.message == told


def test_a_true_stays_while_it_is_re_checked_and_moves_to_what_the_check_finds() -> None:
    bench = verified()
    bench.wait(MINUTE * 12)
    assert len(bench.starts) == 2
    assert bench.state == VERIFIED
    bench.answer(Reachable=LAN)
    bench.settle()
    assert bench.state == ("True", "Verified", LAN)
    assert bench.results == {TAILNET: "Timeout", LAN: "Reachable"}


def test_a_true_ends_with_a_check_that_reaches_nothing() -> None:
    bench = verified()
    bench.wait(MINUTE * 12)
    bench.answer(others="Timeout")
    decision = bench.look()
    assert decision.confirm_live
    assert bench.state == FAILED


def test_a_new_address_is_pending_and_the_true_stays_until_it_is_tried() -> None:
    bench = verified()
    bench.edit(hostIP="10.1.1.1")
    bench.slots = False
    bench.settle()
    assert bench.state == VERIFIED
    assert bench.results["10.1.1.1"] == "Pending"
    bench.slots = True
    bench.wait(second(31))
    bench.answer(Reachable=f"10.1.1.1 {TAILNET}")
    bench.settle()
    assert bench.state == ("True", "Verified", "10.1.1.1")


def test_the_true_ends_at_once_when_the_verified_address_is_not_reported_any_more() -> None:
    bench = verified()
    bench.report = report_with(LAN)
    bench.settle()
    assert bench.state == PENDING
    assert bench.results == {LAN: "Reachable"}, "its last result carries over"


def test_a_rotated_key_ends_the_true_at_once_and_is_told_with_both_pins() -> None:
    bench = verified()
    bench.report, pin = rotated()
    decision = bench.look()
    assert bench.state == PENDING
    assert bench.node.status.ingress_spki == pin
    assert set(bench.results.values()) == {"Pending"}
    event = next(e for e in decision.events if e.reason == "IngressKeyChanged")
    assert event.type == "Warning"
    assert pin in event.note
    assert pin_text() in event.note
    bench.wait(second(31))
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED
    assert bench.events.count("IngressKeyChanged") == 1


def test_another_port_ends_the_true_at_once() -> None:
    bench = verified()
    bench.report = report_for(UID, ingressPort=9444)
    bench.settle()
    assert bench.state == PENDING
    assert set(bench.results.values()) == {"Pending"}


def test_another_certificate_of_the_same_key_starts_a_check_and_leaves_the_true() -> None:
    bench = verified()
    certificate = b64encode(make_certificate([f"urn:uuid:{UID}"], dns=["a"])).decode()
    bench.report = report_for(UID, ingressCertificate=certificate)
    bench.wait(second(31))
    assert bench.state == VERIFIED
    assert len(bench.starts) == 2


def test_a_changed_placement_starts_a_check() -> None:
    bench = verified()
    bench.edit(verifier={"nodeSelector": {"pool": "relay"}, "tolerations": [{"key": "x"}]})
    bench.wait(second(31))
    assert len(bench.starts) == 2
    assert bench.pod()["spec"]["nodeSelector"] == {"pool": "relay"}
    assert bench.pod()["spec"]["tolerations"] == [{"key": "x"}]


def test_a_bad_report_keeps_port_pin_and_candidates_so_that_a_theft_shows_later() -> None:
    bench = verified()
    kept = (bench.node.status.ingress_port, bench.node.status.ingress_spki, bench.results)
    bench.report = "{"
    bench.settle()
    assert bench.state == ("False", "InvalidReport", None)
    assert kept == (
        bench.node.status.ingress_port,
        bench.node.status.ingress_spki,
        bench.results,
    )
    bench.report, _ = rotated()
    bench.wait(second(31))
    assert "IngressKeyChanged" in bench.events


def test_a_silent_agent_clears_the_host_ip_and_is_verified_anew_when_it_is_back() -> None:
    bench = verified()
    bench.clock.advance(second(40))
    bench.connect("False")
    bench.settle()
    assert bench.state == ("Unknown", "AgentDisconnected", None)
    assert bench.results[TAILNET] == "Reachable", "last results stay to be seen"
    bench.clock.advance(second(60))
    bench.connect("True")
    bench.settle()
    assert bench.state == PENDING
    assert len(bench.starts) == 2, "due at once"
    bench.answer(Reachable=TAILNET)
    bench.settle()
    assert bench.state == VERIFIED


def test_a_policy_that_forbids_the_verified_address_ends_the_true() -> None:
    bench = verified()
    bench.policy = AddressPolicy(deny=[parse_network(f"{TAILNET}/32")])
    bench.restart()
    bench.settle()
    assert bench.state == PENDING
    assert bench.results[TAILNET] == "NotAllowed"
    bench.policy = POLICY
    bench.restart()
    bench.settle()
    assert bench.results[TAILNET] == "Pending"


def test_a_true_of_unknown_age_is_none() -> None:
    bench = verified()
    document = {"verification": {"podUID": "x"}, "hostIP": TAILNET, "ingressPort": 9443}
    conditions = [
        {"type": "Reachable", "status": "True", "reason": "Verified"},
        {"type": "AgentConnected", "status": "True"},
    ]
    bench.node = node_of(
        status={
            **document,
            "ingressSPKI": pin_text(),
            "candidates": [{"address": TAILNET, "result": "Reachable"}],
            "conditions": conditions,
        }
    )
    bench.restart()
    bench.slots = False
    bench.settle()
    assert bench.state == PENDING


# Answers that come after a change -----------------------------------------------------------------


def test_results_count_for_addresses_that_are_still_listed() -> None:
    bench = Bench()
    bench.settle()
    bench.report = report_with(LAN, "10.1.1.1")
    bench.clock.advance(second(31))
    bench.settle()
    bench.answer(Reachable=f"{TAILNET} {LAN}")
    bench.settle()
    assert bench.state == ("True", "Verified", LAN)
    assert bench.results == {LAN: "Reachable", "10.1.1.1": "Pending"}
    bench.wait(second(31))
    assert len(bench.starts) == 2, "the new list is due"


def test_results_for_another_pin_do_not_count() -> None:
    bench = Bench()
    bench.settle()
    asked = bench.request().input_hash
    bench.report, _ = rotated()
    bench.clock.advance(second(31))
    bench.settle()
    bench.answer(Reachable=TAILNET)
    bench.look()
    assert bench.state == PENDING
    assert set(bench.results.values()) == {"Pending"}
    assert bench.book.input_hash == asked, "what was checked is written down all the same"
    bench.settle()
    assert len(bench.starts) == 2
