"""The dial-back: is this Mac, with this key, at any of these addresses?

All addresses are dialled at once, one thread each (at most 17, and threads cost a verifier pod
less start-up time than an event loop). Each has `connect_timeout` for TCP and then
`handshake_timeout` for TLS, however slowly the peer drips, so that the whole check is over after
the sum of both. An address that the policy refuses is not touched.

Next: `handshake.py` for what counts as an answer, `policy.py` for what may be dialled.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from datetime import timedelta
from ipaddress import IPv6Address

from llmkube.clock import ZERO, Clock
from llmkube.verifier.handshake import Finding, Handshake, Identity, client_context
from llmkube.verifier.policy import Address, AddressPolicy, parse_address
from llmkube.verifier.protocol import AddressResult, CheckReport, CheckRequest, Outcome

GRACE = timedelta(milliseconds=500)
"""For a machine so busy that a thread is late to notice its own timeout."""

_CHUNK = 16 * 1024
_NO_ROUTE = (
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
    errno.EACCES,
    errno.EPERM,
)


def run_check(request: CheckRequest, clock: Clock) -> CheckReport:
    """Dial every address of `request`; blocks until all have an outcome.

    Returns within connect_timeout + handshake_timeout + GRACE. Raises ValueError where the
    request contradicts itself (its certificate does not carry its pin).
    """
    dialler = _Dialler(request, clock)
    policy = AddressPolicy(request.allow, request.deny)
    findings: dict[str, Finding] = {}
    threads: list[threading.Thread] = []
    for text in request.addresses:
        verdict = policy.verdict(text)
        if not verdict.allowed:
            findings[text] = Finding(Outcome.NOT_ALLOWED, verdict.why)
            continue
        threads.append(threading.Thread(target=dialler.dial, args=(text, findings), daemon=True))
    for thread in threads:
        thread.start()
    _join(threads, request.connect_timeout + request.handshake_timeout + GRACE, clock)
    return CheckReport(
        request.input_hash, tuple(_result(text, findings.get(text)) for text in request.addresses)
    )


def _result(text: str, finding: Finding | None) -> AddressResult:
    found = finding or Finding(Outcome.TIMEOUT, "no answer in time")
    return AddressResult(text, found.outcome, found.detail)


def _join(threads: list[threading.Thread], limit: timedelta, clock: Clock) -> None:
    deadline = clock.monotonic() + limit
    for thread in threads:
        thread.join(max(ZERO, deadline - clock.monotonic()).total_seconds())


class _Dialler:
    """What all threads of one check share; nothing of it changes."""

    def __init__(self, request: CheckRequest, clock: Clock) -> None:
        self._request = request
        self._clock = clock
        self._identity = Identity(request.spki, request.certificate)
        self._context = client_context()

    def dial(self, text: str, findings: dict[str, Finding]) -> None:
        try:
            findings[text] = self._find(parse_address(text))
        except Exception as error:  # one odd peer must not cost the other addresses their result
            findings[text] = Finding(Outcome.ERROR, f"{type(error).__name__}: {error}")

    def _find(self, address: Address) -> Finding:
        family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(self._request.connect_timeout.total_seconds())
                sock.connect((str(address), self._request.port))
                return self._shake_hands(sock)
        except OSError as error:
            return connect_failure(error)

    def _shake_hands(self, sock: socket.socket) -> Finding:
        deadline = self._clock.monotonic() + self._request.handshake_timeout
        handshake = Handshake(self._context, self._identity)
        try:
            sock.sendall(handshake.start())
            while handshake.finding is None:
                left = deadline - self._clock.monotonic()
                if left <= ZERO:
                    raise TimeoutError
                sock.settimeout(left.total_seconds())
                data = sock.recv(_CHUNK)
                if not data:
                    return Finding(Outcome.ERROR, "the peer hung up within the TLS handshake")
                sock.sendall(handshake.receive(data))
        except TimeoutError:
            return Finding(Outcome.TIMEOUT, "TCP connects, but the TLS handshake does not finish")
        except ssl.SSLError as error:
            return Finding(Outcome.ERROR, f"the TLS handshake failed ({error.reason})")
        except OSError as error:
            return Finding(Outcome.ERROR, f"the TLS handshake broke off ({_name(error)})")
        return handshake.finding


def connect_failure(error: OSError) -> Finding:
    """What a failed TCP connect means."""
    if isinstance(error, ConnectionRefusedError):
        return Finding(Outcome.REFUSED, "nothing listens on the port, or a firewall rejects it")
    if isinstance(error, TimeoutError):
        return Finding(Outcome.TIMEOUT, "no answer to TCP connect")
    if error.errno in _NO_ROUTE:
        return Finding(Outcome.ERROR, f"no route from the pod network ({_name(error)})")
    return Finding(Outcome.ERROR, f"TCP connect failed ({_name(error)})")


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
