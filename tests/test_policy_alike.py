"""One policy, two appliers: controller and verifier judge every address alike (SPEC 3.3)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from llmkube.api.candidates import CandidateSource
from llmkube.api.report import ReportedCandidate
from llmkube.clock import SystemClock
from llmkube.rules.candidates import list_candidates
from llmkube.verifier.dialback import run_check
from llmkube.verifier.policy import AddressPolicy, parse_network
from llmkube.verifier.protocol import AddressResult, CheckRequest, Outcome
from tests.support.ingresses import Credential, closed_port, issue
from tests.test_policy_addresses import ALLOWED, REFUSED

READABLE = sorted({row[2] for row in REFUSED if row[2] is not None})
UNREADABLE = [row[1] for row in REFUSED if row[2] is None]
DENIED = (parse_network("10.96.0.0/12"), parse_network("fd00:10:96::/112"))


def reported(*texts: str) -> tuple[ReportedCandidate, ...]:
    return tuple(ReportedCandidate(text, CandidateSource.LAN) for text in texts)


@pytest.fixture(scope="module")
def mac() -> Credential:
    return issue()


def verified(mac: Credential, *texts: str) -> tuple[AddressResult, ...]:
    """What the verifier makes of addresses."""
    moment = timedelta(seconds=0.2)
    request = CheckRequest(
        "hash", mac.spki, mac.der, closed_port(), texts, (), DENIED, moment, moment
    )
    return run_check(request, SystemClock()).results


@pytest.mark.parametrize("text", READABLE)
def test_both_refuse_for_the_same_reason(mac: Credential, text: str) -> None:
    policy = AddressPolicy(deny=DENIED)
    (listed,) = list_candidates(None, reported(text), policy).entries
    (result,) = verified(mac, text)
    assert listed.refusal
    assert (result.result, result.detail) == (Outcome.NOT_ALLOWED, listed.refusal)


@pytest.mark.parametrize("text", ["10.96.0.1", "10.111.255.255", "2002:a60:1::1", "fd00:10:96::a"])
def test_both_know_the_denied_networks(mac: Credential, text: str) -> None:
    (listed,) = list_candidates(None, reported(text), AddressPolicy(deny=DENIED)).entries
    (result,) = verified(mac, text)
    assert listed.refusal.count("denied by") == 1
    assert (result.result, result.detail) == (Outcome.NOT_ALLOWED, listed.refusal)


def test_the_controller_drops_what_is_no_address() -> None:
    found = list_candidates(None, reported(*UNREADABLE), AddressPolicy())
    assert (found.entries, found.unreadable) == ((), len(UNREADABLE))


@pytest.mark.parametrize("row", ALLOWED, ids=[row[0] for row in ALLOWED])
def test_the_controller_lists_what_is_allowed(row: tuple[str, str, str]) -> None:
    (listed,) = list_candidates(None, reported(row[1]), AddressPolicy()).entries
    assert (listed.address, listed.refusal) == (row[2], "")
