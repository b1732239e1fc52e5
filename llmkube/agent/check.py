"""`llmkube agent --check`: what would be reported, and what stands in the way.

Reads only: no key is made, no Lease renewed, no port opened. Each line is a finding; the first
word says whether it is good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from llmkube.agent.agent import AgentOptions, require_kubeconfig
from llmkube.agent.discovery import choose
from llmkube.agent.gate import TokenGate
from llmkube.agent.hardware import read_capacity
from llmkube.agent.heartbeat import advise
from llmkube.agent.identity import load_certificate, load_identity
from llmkube.agent.interfaces import InterfacesUnreadable, read_interfaces
from llmkube.agent.statedir import StateError
from llmkube.api.spki import SpkiPin
from llmkube.clock import Clock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError, ConfigError
from llmkube.kube.resources import LEASES, METALNODES

UPSTREAM_TIMEOUT_SECONDS: Final = 5.0


class Level(StrEnum):
    """How a line of the check begins. Only FAIL makes the check fail."""

    OK = "ok"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All of it."""

    findings: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        return all(finding.level is not Level.FAIL for finding in self.findings)

    @property
    def text(self) -> str:
        return "\n".join(f"{f.level:<4} {f.text}" for f in self.findings)


async def check_agent(options: AgentOptions, clock: Clock) -> CheckReport:
    """Look at everything the agent needs."""
    parts: tuple[Callable[[], Awaitable[list[Finding]]], ...] = (
        lambda: _identity(options),
        lambda: _addresses(options),
        _hardware,
        lambda: _upstream(options),
        lambda: _access(options),
        lambda: _cluster(options, clock),
    )
    return CheckReport(tuple([finding for part in parts for finding in await part()]))


def _good(text: str) -> list[Finding]:
    return [Finding(Level.OK, text)]


def _doubtful(text: str) -> list[Finding]:
    return [Finding(Level.WARN, text)]


def _bad(text: str) -> list[Finding]:
    return [Finding(Level.FAIL, text)]


async def _identity(options: AgentOptions) -> list[Finding]:
    try:
        identity = load_identity(options.state_dir)
        if identity is None:
            return _good(f"identity: none yet in {options.state_dir}; made at the first start")
        certificate = load_certificate(options.state_dir, identity)
    except StateError as error:
        return _bad(f"identity: {error}")
    uid = certificate.uid if certificate is not None else "none yet"
    pin = SpkiPin(identity.spki)
    return _good(f"identity: pin {pin}, holder {identity.holder}, certificate for UID {uid}")


async def _addresses(options: AgentOptions) -> list[Finding]:
    try:
        found = await read_interfaces()
    except InterfacesUnreadable as error:
        return _bad(f"addresses: {error}")
    discovery = choose(found, options.host_ips, options.ingress_bind)
    lines = [
        Finding(Level.OK, f"address: {candidate.address} ({candidate.source})")
        for candidate in discovery.candidates
    ] or _bad("addresses: none to offer; connect a network, or name one with --host-ip")
    rejected = [Finding(Level.OK, f"address not offered: {item}") for item in discovery.rejected]
    return lines + rejected


async def _hardware() -> list[Finding]:
    capacity = await read_capacity()
    memory = f"{capacity.memory_bytes / 2**30:.1f} GiB" if capacity.memory_bytes else "unknown"
    return _good(
        f"hardware: {capacity.chip or 'unknown chip'}, memory {memory}, "
        f"GPU cores {capacity.gpu_cores or 'unknown'}, {capacity.metal_version or 'no Metal'}"
    )


async def _upstream(options: AgentOptions) -> list[Finding]:
    host, _, port = options.upstream.authority.rpartition(":")
    try:
        async with asyncio.timeout(UPSTREAM_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        return _bad(
            f"LLM server: nothing answers at {options.upstream} ({error}): start it, or correct "
            "--upstream"
        )
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    if options.upstream.local:
        return _good(f"LLM server: {options.upstream} answers")
    return _doubtful(
        f"LLM server: {options.upstream} answers, but it is not this machine's loopback: anybody "
        "on that network can pass the ingress by"
    )


async def _access(options: AgentOptions) -> list[Finding]:
    if options.insecure_no_auth:
        return _doubtful(
            "authentication: none (--insecure-no-auth): the port is open to everybody; give "
            "--relay-token-file instead"
        )
    if options.relay_token_file is None:
        return _doubtful(
            "authentication: no --relay-token-file, so every request gets 401: make one with "
            "`(umask 077; openssl rand -hex 32 > relay-token)`, and give it here"
        )
    if not TokenGate(options.relay_token_file).usable():
        return _bad(
            f"authentication: {options.relay_token_file} holds no usable token, so every request "
            "gets 401: put one line with the token there"
        )
    return _good(f"authentication: the token in {options.relay_token_file}")


async def _cluster(options: AgentOptions, clock: Clock) -> list[Finding]:
    try:
        require_kubeconfig(options)
        access = await load_access(options.kubeconfig)
        target = options.wanted.target(access)
        timeout = options.settings.heartbeat.attempt_timeout
        async with KubeClient(access, clock=clock, request_timeout=timeout) as client:
            node = await client.get(METALNODES, target.name, target.namespace)
            lease = await client.get(LEASES, node["spec"]["leaseName"], target.namespace)
    except ConfigError as error:
        return _bad(f"credential: {error}")
    except ApiError as error:
        todo = advise(error, options.wanted.describe(access))
        why = str(error) if access.server in str(error) else f"{access.server}: {error}"
        return _bad(f"cluster: {why}: {todo}")
    renewed = (lease.get("spec") or {}).get("renewTime", "never")
    return _good(
        f"cluster: MetalNode {target}, UID {node['metadata']['uid']}; its Lease was last "
        f"renewed: {renewed}"
    )
