"""The candidate list: order, canonical form, duplicates, the cap, and what carries over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.api.cached import CachedCandidate
from llmkube.api.candidates import MAX_CANDIDATES, CandidateSource
from llmkube.api.report import ReportedCandidate
from llmkube.rules.candidates import (
    CandidateList,
    InvalidHostIP,
    Listed,
    list_candidates,
    read_host_ip,
    with_results,
)
from llmkube.verifier.policy import Address, AddressPolicy, parse_network

OPEN = AddressPolicy()
Source = CandidateSource


def reported(*pairs: tuple[str, str]) -> tuple[ReportedCandidate, ...]:
    return tuple(ReportedCandidate(address, Source(source)) for address, source in pairs)


def addresses(listing: CandidateList) -> list[str]:
    return [entry.address for entry in listing.entries]


# The list -----------------------------------------------------------------------------------------
def test_the_admins_address_comes_first_then_each_source_in_the_macs_own_order() -> None:
    listing = list_candidates(
        "10.9.9.9",
        reported(
            ("10.0.0.5", "unknown"),
            ("172.17.0.1", "docker-host"),
            ("10.0.0.4", "lan"),
            ("100.64.0.2", "tailnet"),
            ("10.0.0.3", "lan"),
            ("100.64.0.1", "tailnet"),
            ("10.0.0.1", "override"),
        ),
        OPEN,
    )
    assert [(e.address, e.source) for e in listing.entries] == [
        ("10.9.9.9", Source.OVERRIDE),
        ("10.0.0.1", Source.OVERRIDE),
        ("100.64.0.2", Source.TAILNET),
        ("100.64.0.1", Source.TAILNET),
        ("10.0.0.4", Source.LAN),
        ("10.0.0.3", Source.LAN),
        ("172.17.0.1", Source.DOCKER_HOST),
        ("10.0.0.5", Source.UNKNOWN),
    ]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:0001", "10.0.0.1"),
        ("FD00:0:0:0::1", "fd00::1"),
        ("fd00:0000:0000:0000:0000:0000:0000:0001", "fd00::1"),
    ],
)
def test_addresses_are_brought_to_canonical_form(text: str, canonical: str) -> None:
    assert addresses(list_candidates(None, reported((text, "lan")), OPEN)) == [canonical]
    assert read_host_ip(text) == canonical


def test_of_duplicates_the_first_in_order_wins_in_whatever_form() -> None:
    listing = list_candidates(
        "10.0.0.1", reported(("::ffff:10.0.0.1", "tailnet"), ("10.0.0.1", "lan")), OPEN
    )
    assert listing == CandidateList((Listed("10.0.0.1", Source.OVERRIDE),))


def test_what_is_no_address_is_dropped_and_counted() -> None:
    listing = list_candidates(
        None,
        reported(("mac.local", "lan"), ("10.0.0.1", "lan"), ("10.0.0.01", "lan"), ("", "lan")),
        OPEN,
    )
    assert addresses(listing) == ["10.0.0.1"]
    assert (listing.unreadable, listing.surplus) == (3, 0)


def test_there_are_17_at_most_and_the_rest_is_counted() -> None:
    many = reported(*((f"10.0.0.{n}", "lan") for n in range(1, 21)))
    listing = list_candidates("10.1.1.1", many + many, OPEN)
    assert len(listing.entries) == MAX_CANDIDATES
    assert listing.entries[0].address == "10.1.1.1"
    assert listing.surplus == 4


def test_no_more_addresses_are_judged_than_are_listed() -> None:
    """A hostile report names 600 of them, and judging takes most of the time."""

    class Counting(AddressPolicy):
        judged = 0

        def refusal(self, address: Address) -> str | None:
            Counting.judged += 1
            return super().refusal(address)

    many = reported(*((f"2002:a::{n:x}", "lan") for n in range(600)))
    listing = list_candidates(None, many, Counting())
    assert (len(listing.entries), listing.surplus) == (MAX_CANDIDATES, 600 - MAX_CANDIDATES)
    assert Counting.judged == MAX_CANDIDATES


def test_a_refused_address_keeps_its_place_with_the_reason_and_is_not_dialled() -> None:
    policy = AddressPolicy(deny=[parse_network("10.0.0.0/24")])
    listing = list_candidates(
        "127.0.0.1", reported(("10.0.0.1", "lan"), ("10.0.1.1", "lan")), policy
    )
    assert [e.refusal for e in listing.entries] == [
        "a loopback address",
        "denied by 10.0.0.0/24",
        "",
    ]
    assert listing.allowed == ("10.0.1.1",)


@pytest.mark.parametrize("text", [None, ""])
def test_no_host_ip(text: str | None) -> None:
    assert read_host_ip(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "mac.example",
        "10.0.0.0/8",
        "fe80::1%en0",
        "10.0.0.1:80",
        "[fd00::1]",
        "[fd00::1]:80",
        "010.0.0.1",
        "10.0.0.1 ",
        "10.0.0",
        "1",
        "0x7f.1",
        "١٠.٠.٠.١",
        "10.0.0.1\n",
        "::1::",
        "https://10.0.0.1",
        "1" * 45,
    ],
)
def test_a_host_ip_that_is_not_one_plain_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidHostIP):
        read_host_ip(text)


PIECES = st.lists(
    st.tuples(
        st.one_of(
            st.ip_addresses().map(str),
            st.sampled_from(["10.0.0.1", "::ffff:10.0.0.1", "nonsense", "fd00::1%en0"]),
            st.text(max_size=50),
        ),
        st.sampled_from([source.value for source in Source]),
    ),
    max_size=40,
)


@given(PIECES)
def test_whatever_a_mac_reports(pairs: Sequence[tuple[str, str]]) -> None:
    """Each address once, canonical, in rank order, at most 17; nothing is lost uncounted."""
    listing = list_candidates(None, reported(*pairs), OPEN)
    found = addresses(listing)
    assert len(found) == len(set(found)) <= MAX_CANDIDATES
    ranks = [list(Source).index(entry.source) for entry in listing.entries]
    assert ranks == sorted(ranks)
    again = list_candidates(None, reported(*((a, "lan") for a in found)), OPEN)
    assert addresses(again) == found
    assert listing.unreadable <= len(pairs)
    if listing.surplus:
        assert len(found) == MAX_CANDIDATES


# Results ------------------------------------------------------------------------------------------
ENTRIES = (Listed("10.0.0.1", Source.LAN), Listed("10.0.0.2", Source.LAN))
CHECKED = "2026-01-01T00:00:00Z"


def test_results_carry_over_while_pin_and_port_are_the_same() -> None:
    before = (CachedCandidate("10.0.0.2", "Refused", "tailnet", CHECKED),)
    assert with_results(ENTRIES, before, same_ingress=True) == (
        CachedCandidate("10.0.0.1", "Pending", "lan"),
        CachedCandidate("10.0.0.2", "Refused", "lan", CHECKED),
    )


def test_another_pin_or_port_makes_all_pending() -> None:
    before = (CachedCandidate("10.0.0.2", "Reachable", "lan", CHECKED),)
    results = [c.result for c in with_results(ENTRIES, before, same_ingress=False)]
    assert results == ["Pending", "Pending"]


def test_what_the_policy_refuses_now_is_not_allowed_whatever_was_found() -> None:
    before = (CachedCandidate("10.0.0.1", "Reachable", "lan", CHECKED),)
    refused = (Listed("10.0.0.1", Source.LAN, "denied"),)
    assert with_results(refused, before, same_ingress=True) == (
        CachedCandidate("10.0.0.1", "NotAllowed", "lan"),
    )


def test_what_the_policy_allows_again_is_pending() -> None:
    before = (CachedCandidate("10.0.0.1", "NotAllowed", "lan"),)
    assert with_results(ENTRIES[:1], before, same_ingress=True)[0].result == "Pending"


def test_a_result_that_nobody_knows_is_none() -> None:
    before = (CachedCandidate("10.0.0.1", "Splendid", "lan", CHECKED),)
    assert with_results(ENTRIES[:1], before, same_ingress=True)[0].result == "Pending"
