"""The dial-back against real sockets: SPEC 3.4, issue 7."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from llmkube.clock import SystemClock
from llmkube.verifier.dialback import GRACE, connect_failure, run_check
from llmkube.verifier.handshake import MAX_RECEIVED, Handshake, Identity, client_context
from llmkube.verifier.policy import parse_network
from llmkube.verifier.protocol import (
    MAX_REPORT_BYTES,
    AddressResult,
    CheckRequest,
    Outcome,
    decode_report,
    encode_report,
    encode_request,
)
from tests.support import ingresses
from tests.support.ingresses import Credential, Handler, Peer, issue, listening, tls

LOOPBACK = (parse_network("127.0.0.0/8"), parse_network("::1/128"))
MS = timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def mac() -> Credential:
    return issue(uid="6f1c2a0e-0000-4000-8000-000000000001")


def request_for(mac: Credential, *addresses: str, port: int, seconds: float = 5) -> CheckRequest:
    timeout = timedelta(seconds=seconds)
    return CheckRequest(
        input_hash="hash",
        spki=mac.spki,
        certificate=mac.der,
        port=port,
        addresses=addresses,
        allow=LOOPBACK,
        connect_timeout=timeout,
        handshake_timeout=timeout,
    )


def dial(mac: Credential, peer: Peer, seconds: float = 5) -> AddressResult:
    request = request_for(mac, peer.address, port=peer.port, seconds=seconds)
    return run_check(request, SystemClock()).results[0]


def found(mac: Credential, handler: Handler, seconds: float = 5) -> AddressResult:
    with listening(handler) as peer:
        return dial(mac, peer, seconds)


# Who answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("make_key", [ingresses.ec_key, ingresses.rsa_key, ingresses.ed25519_key])
def test_the_correct_agent_is_reachable_with_any_common_key(make_key) -> None:
    mac = issue(make_key())
    assert found(mac, tls(mac.server_context())).result is Outcome.REACHABLE


def test_another_key_is_a_pin_mismatch_and_tls_never_completes(mac: Credential) -> None:
    with listening(tls(issue().server_context())) as peer:
        assert dial(mac, peer).result is Outcome.PIN_MISMATCH
        assert peer.seen.served.acquire(timeout=10)
        assert peer.seen.handshakes == 0


def test_the_same_key_with_another_certificate_is_a_certificate_mismatch(mac: Credential) -> None:
    twin = issue(mac.key)
    with listening(tls(twin.server_context())) as peer:
        assert dial(mac, peer).result is Outcome.CERTIFICATE_MISMATCH
        assert peer.seen.served.acquire(timeout=10)
        assert peer.seen.handshakes == 0


def test_a_certificate_naming_another_uid_is_judged_by_the_reported_one(mac: Credential) -> None:
    other = issue(mac.key, uid="6f1c2a0e-0000-4000-8000-000000000002")
    assert found(mac, tls(other.server_context())).result is Outcome.CERTIFICATE_MISMATCH
    assert found(other, tls(other.server_context())).result is Outcome.REACHABLE


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (ingresses.EPOCH - timedelta(days=900), ingresses.EPOCH - timedelta(days=800)),
        (ingresses.EPOCH + timedelta(days=30000), ingresses.EPOCH + timedelta(days=31000)),
    ],
    ids=["expired", "not yet valid"],
)
def test_dates_are_not_judged(start, end) -> None:
    mac = issue(start=start, end=end)
    assert found(mac, tls(mac.server_context())).result is Outcome.REACHABLE


@pytest.mark.parametrize("mode", [ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED])
def test_a_request_for_a_client_certificate_changes_nothing(mac: Credential, mode) -> None:
    context = mac.server_context()
    context.verify_mode = mode
    assert found(mac, tls(context)).result is Outcome.REACHABLE


def test_a_peer_that_asks_for_another_curve_is_reachable(mac: Credential) -> None:
    """HelloRetryRequest: one round trip more before the key is proved."""
    context = mac.server_context()
    context.set_ecdh_curve("secp384r1")
    assert found(mac, tls(context)).result is Outcome.REACHABLE


def test_ipv6(mac: Credential) -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with listening(tls(mac.server_context()), "::1") as peer:
        assert dial(mac, peer).result is Outcome.REACHABLE


def test_no_application_data_no_sni_and_a_clean_end(mac: Credential) -> None:
    with listening(tls(mac.server_context())) as peer:
        assert dial(mac, peer).result is Outcome.REACHABLE
        assert peer.seen.served.acquire(timeout=10)
        seen = peer.seen
    assert (seen.handshakes, seen.clean_ends) == (1, 1)
    assert seen.application_data == []
    assert seen.server_names == [None]


# Who does not ------------------------------------------------------------------------------------
def test_tls_1_2_only(mac: Credential) -> None:
    context = mac.server_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    result = found(mac, tls(context))
    assert result.result is Outcome.ERROR
    assert "TLS 1.3" in result.detail


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\0" * 64, b"\x16"],
    ids=["http", "ssh", "zeros", "one byte"],
)
def test_what_is_not_tls_is_an_error(mac: Credential, answer: bytes) -> None:
    assert found(mac, ingresses.plain(answer)).result is Outcome.ERROR


def test_plain_http_is_named(mac: Credential) -> None:
    result = found(mac, ingresses.plain(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert "does not speak TLS" in result.detail


def test_an_alert_is_an_error(mac: Credential) -> None:
    alert = bytes.fromhex("15030300020228")  # fatal, handshake_failure
    result = found(mac, ingresses.plain(alert))
    assert result.result is Outcome.ERROR
    assert "refused the handshake" in result.detail


def test_silence_after_accept_is_a_timeout(mac: Credential) -> None:
    assert found(mac, ingresses.silent, seconds=0.3).result is Outcome.TIMEOUT


def test_dripping_bytes_do_not_extend_the_handshake(mac: Credential) -> None:
    handler = ingresses.dripping(mac.server_context(), 50 * MS)
    clock = SystemClock()
    start = clock.monotonic()
    assert found(mac, handler, seconds=1).result is Outcome.TIMEOUT
    assert clock.monotonic() - start < timedelta(seconds=20)  # about 1,000 bytes: 50 s if it waited


@pytest.mark.parametrize(
    "handler",
    [ingresses.hang_up, ingresses.reset],
    ids=["closes", "resets"],
)
def test_an_end_within_the_handshake_is_an_error(mac: Credential, handler: Handler) -> None:
    assert found(mac, handler).result is Outcome.ERROR


@pytest.mark.parametrize("then", [ingresses.silent, ingresses.reset, ingresses.hang_up])
def test_a_certificate_without_the_proof_of_its_key_is_never_reachable(
    mac: Credential, then: Handler
) -> None:
    """All but the end of a true flight: certificate and pin are right, Finished is missing."""
    handler = ingresses.cut_short(mac.server_context(), keep=-10, then=then)
    assert found(mac, handler, seconds=1).result in (Outcome.TIMEOUT, Outcome.ERROR)


def test_a_forged_flight_is_an_error(mac: Credential) -> None:
    assert found(mac, ingresses.corrupted(mac.server_context())).result is Outcome.ERROR


def test_a_closed_port_is_refused(mac: Credential) -> None:
    request = request_for(mac, "127.0.0.1", port=ingresses.closed_port())
    assert run_check(request, SystemClock()).results[0].result is Outcome.REFUSED


def test_a_dropped_syn_is_a_timeout(mac: Credential) -> None:
    with ingresses.deaf() as peer:
        result = dial(mac, peer, seconds=0.5)
    assert result.result is Outcome.TIMEOUT
    assert "TCP" in result.detail


def test_an_address_without_a_route_is_an_error(mac: Credential) -> None:
    """TCP to a multicast address: the kernel has no route for it, on any machine."""
    timeout = timedelta(seconds=1)
    request = CheckRequest(
        input_hash="hash",
        spki=mac.spki,
        certificate=mac.der,
        port=9443,
        addresses=("224.0.0.1",),
        allow=(parse_network("224.0.0.0/4"),),
        connect_timeout=timeout,
        handshake_timeout=timeout,
    )
    result = run_check(request, SystemClock()).results[0]
    assert result.result is Outcome.ERROR
    assert "no route" in result.detail


def test_an_unroutable_address_costs_no_more_than_its_time(mac: Credential) -> None:
    request = request_for(mac, "192.0.2.1", "2001:db8::1", port=9443, seconds=0.5)
    for result in run_check(request, SystemClock()).results:
        assert result.result in (Outcome.ERROR, Outcome.TIMEOUT, Outcome.REFUSED)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), Outcome.REFUSED),
        (TimeoutError("timed out"), Outcome.TIMEOUT),
        (OSError(errno.ETIMEDOUT, ""), Outcome.TIMEOUT),
        (OSError(errno.EHOSTUNREACH, ""), Outcome.ERROR),
        (OSError(errno.ENETUNREACH, ""), Outcome.ERROR),
        (OSError(errno.EAFNOSUPPORT, ""), Outcome.ERROR),
        (OSError(errno.EPERM, ""), Outcome.ERROR),
        (ConnectionResetError(errno.ECONNRESET, ""), Outcome.ERROR),
        (OSError(), Outcome.ERROR),
    ],
)
def test_each_failure_of_a_connect_has_its_outcome(error: OSError, outcome: Outcome) -> None:
    assert connect_failure(error).outcome is outcome


# Bounds ------------------------------------------------------------------------------------------
def _chain(certificates: int) -> bytes:
    link = issue(padding=3000).certificate.public_bytes(Encoding.PEM)
    return link * certificates


def test_a_chain_beside_the_right_certificate_is_ignored(mac: Credential) -> None:
    assert found(mac, tls(mac.server_context(_chain(2)))).result is Outcome.REACHABLE


def test_a_huge_chain_is_an_error_though_key_and_certificate_are_right(mac: Credential) -> None:
    result = found(mac, tls(mac.server_context(_chain(100))))
    assert result.result is Outcome.ERROR
    assert str(MAX_RECEIVED) in result.detail or "excessive" in result.detail


@pytest.mark.parametrize("header", [bytes.fromhex("1603034000"), bytes.fromhex("160303004002")])
def test_a_flood_is_cut_off(mac: Credential, header: bytes) -> None:
    assert found(mac, ingresses.flooding(header)).result is Outcome.ERROR


def test_the_handshake_takes_no_more_than_its_bound(mac: Credential) -> None:
    handshake = Handshake(client_context(), Identity(mac.spki, mac.der))
    assert handshake.start()
    record = bytes.fromhex("160303") + (16384).to_bytes(2) + b"\x02\xff\xff\xff" + bytes(16380)
    taken = 0
    while handshake.finding is None:
        handshake.receive(record)
        taken += len(record)
    assert handshake.finding.outcome is Outcome.ERROR
    assert taken <= MAX_RECEIVED + len(record)


def test_seventeen_candidates_of_which_sixteen_hang(mac: Credential) -> None:
    """With the timeouts of production: done in 10 s, and the one that answers is found."""
    addresses = [f"127.0.0.{host}" for host in range(2, 19)]
    with ExitStack() as stack:
        good = stack.enter_context(listening(tls(mac.server_context()), addresses[9]))
        for index, address in enumerate(addresses):
            if index == 9:
                continue
            hanging = (
                ingresses.deaf(address, good.port)
                if index % 2
                else listening(ingresses.silent, address, good.port)
            )
            stack.enter_context(hanging)
        clock = SystemClock()
        start = clock.monotonic()
        report = run_check(request_for(mac, *addresses, port=good.port), clock)
        assert clock.monotonic() - start <= timedelta(seconds=10) + GRACE * 4
    assert [result.address for result in report.results] == addresses
    outcomes = [result.result for result in report.results]
    assert outcomes.pop(9) is Outcome.REACHABLE
    assert set(outcomes) == {Outcome.TIMEOUT}
    assert len(encode_report(report)) <= MAX_REPORT_BYTES


def test_a_refused_address_is_not_touched(mac: Credential) -> None:
    with listening(tls(mac.server_context())) as peer:
        request = request_for(mac, "127.0.0.1", port=peer.port)
        closed = CheckRequest("hash", mac.spki, mac.der, peer.port, request.addresses)
        result = run_check(closed, SystemClock()).results[0]
        assert peer.seen.connections == 0
    assert result.result is Outcome.NOT_ALLOWED
    assert "loopback" in result.detail


def test_a_request_whose_certificate_lacks_the_pin_is_refused(mac: Credential) -> None:
    request = CheckRequest("hash", bytes(32), mac.der, 9443, ("192.0.2.1",))
    with pytest.raises(ValueError, match="pinned key"):
        run_check(request, SystemClock())


# The program -------------------------------------------------------------------------------------
@pytest.fixture
def program(tmp_path: Path) -> Iterator[object]:
    def run(check: str | None, log: str = "report") -> tuple[int, str]:
        path = tmp_path / log
        env = {**os.environ, "LLMKUBE_TERMINATION_LOG": str(path)}
        env.pop("LLMKUBE_CHECK", None)
        if check is not None:
            env["LLMKUBE_CHECK"] = check
        done = subprocess.run(
            [sys.executable, "-m", "llmkube.verifier"], env=env, timeout=60, capture_output=True
        )
        return done.returncode, path.read_text() if path.exists() else done.stderr.decode()

    return run


def test_the_program_reports_through_its_termination_log(program, mac: Credential) -> None:
    with listening(tls(mac.server_context())) as peer:
        request = request_for(mac, "127.0.0.1", "10.0.0.1", port=peer.port, seconds=1)
        status, text = program(encode_request(request))
    report = decode_report(text)
    assert (status, report.input_hash) == (0, "hash")
    assert report.results[0] == AddressResult("127.0.0.1", Outcome.REACHABLE)


@pytest.mark.parametrize("check", [None, "", "{}", '{"version":2}', "[]"])
def test_a_bad_request_leaves_a_sentence_for_the_admin(program, check: str | None) -> None:
    status, text = program(check)
    assert status == 2
    assert text.startswith("The verifier cannot use LLMKUBE_CHECK: ")
    with pytest.raises(ValueError, match=r".+"):
        decode_report(text)


def test_an_unwritable_log_is_a_failure(program, mac: Credential) -> None:
    request = request_for(mac, "127.0.0.1", port=ingresses.closed_port())
    status, text = program(encode_request(request), log="missing/report")
    assert status == 3
    assert "cannot write" in text


def test_it_loads_neither_an_event_loop_nor_the_controller() -> None:
    code = (
        "import sys, llmkube.verifier.__main__\n"
        "heavy = {'asyncio', 'logging', 'aiohttp', 'pydantic', 'msgspec', 'llmkube.api'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
