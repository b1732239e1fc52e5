"""`llmkube agent`: run the agent on the machine that serves the LLM.

Flags become `AgentOptions`; everything else is `llmkube.agent`. `--check` prints what would be
reported, and what is wrong, without writing or sending anything.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated

import typer

from llmkube.agent.agent import AgentOptions, run_agent
from llmkube.agent.check import check_agent
from llmkube.agent.httprules import Upstream
from llmkube.agent.settings import AgentSettings, HeartbeatSettings
from llmkube.agent.statedir import StateError
from llmkube.agent.target import Wanted
from llmkube.api.report import PORTS
from llmkube.cli.errors import CliError, ExitCode
from llmkube.cli.values import parse_duration
from llmkube.clock import SystemClock
from llmkube.health import BadAddress, BindAddress
from llmkube.log import LogFormat, configure
from llmkube.verifier.policy import parse_address

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_SHORTEST_INTERVAL = timedelta(seconds=1)
_LONGEST_INTERVAL = timedelta(minutes=3)


def default_state_dir() -> Path:
    """Where the platform keeps a program's state: a service's folder, or the user's own."""
    if systemd := os.environ.get("STATE_DIRECTORY"):
        return Path(systemd.partition(":")[0])
    if sys.platform == "darwin":
        root = Path("/") if os.geteuid() == 0 else Path.home()
        return root / "Library" / "Application Support" / "LLMKube Agent"
    if os.geteuid() == 0:
        return Path("/var/lib/llmkube-agent")
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home) / "llmkube-agent"


def _address(text: str) -> IPv4Address | IPv6Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} {error}; write one plain address, for example 192.168.1.20"
        ) from None


def _upstream(text: str | Upstream) -> Upstream:
    if isinstance(text, Upstream):
        return text
    try:
        return Upstream.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _bind_address(text: str | BindAddress) -> BindAddress | None:
    if isinstance(text, BindAddress):
        return text
    try:
        return BindAddress.parse(text)
    except BadAddress as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def agent(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="LLMKUBE_KUBECONFIG",
            help="The credential that `llmkube metal token create` wrote; by default "
            "kubeconfig in --state-dir. The agent renews the token in it.",
            show_default=False,
        ),
    ] = None,
    upstream: Annotated[
        Upstream,
        typer.Option(
            metavar="URL",
            parser=_upstream,
            help="The local LLM server, http://127.0.0.1:PORT.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
    relay_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Who sends its content as X-LLMKube-Relay-Token may use the LLM; read again "
            "when it changes. Without it, nobody may.",
        ),
    ] = None,
    insecure_no_auth: Annotated[
        bool,
        typer.Option(
            "--insecure-no-auth",
            help="Let everybody who reaches the ingress port use the LLM, without a token.",
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="MetalNode; by default the one the credential was made for."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="NAME", help="Its namespace; by default the kubeconfig's."
        ),
    ] = None,
    ingress_port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=PORTS.start, max=PORTS.stop - 1, help="TLS port to serve on."
        ),
    ] = 9443,
    ingress_bind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; repeatable; by default all of them."
        ),
    ] = None,
    host_ip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address at which the cluster reaches this machine, tried before those found; "
            "repeatable. For port forwarding, Docker hosts and the like.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="This machine's key and certificate; by default where the platform keeps state.",
            show_default=False,
        ),
    ] = None,
    heartbeat_interval: Annotated[
        timedelta,
        typer.Option(
            metavar="DURATION",
            parser=parse_duration,
            help="Pause between two heartbeats, 1s to 3m.",
            show_default="30s",
        ),
    ] = HeartbeatSettings().interval,
    lease_duration: Annotated[
        timedelta,
        typer.Option(
            metavar="DURATION",
            parser=parse_duration,
            help="Silence after which the cluster calls this machine disconnected, 15s to 10m.",
            show_default="2m",
        ),
    ] = HeartbeatSettings().lease_duration,
    metrics_bind_address: Annotated[
        BindAddress | None,
        typer.Option(
            metavar="ADDRESS",
            parser=_bind_address,
            help="Serve /metrics, /healthz and /readyz at HOST:PORT, unencrypted.",
            show_default="off",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Print what would be reported and what is wrong, then end."),
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Log lines.")] = LogFormat.CONSOLE,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Tell the cluster that this machine is alive and where it serves, and serve it there.

    Renews the machine's Lease, reports its addresses and hardware, and serves the local LLM over
    TLS to those who hold the relay token. Stops cleanly on SIGTERM.
    """
    if insecure_no_auth and relay_token_file is not None:
        raise typer.BadParameter("--insecure-no-auth and --relay-token-file exclude each other")
    _check_rhythm(heartbeat_interval, lease_duration)
    try:
        configure(log_format, log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    folder = state_dir or default_state_dir()
    settings = AgentSettings()
    beat = replace(settings.heartbeat, interval=heartbeat_interval, lease_duration=lease_duration)
    options = AgentOptions(
        kubeconfig=kubeconfig or folder / "kubeconfig",
        state_dir=folder,
        upstream=upstream,
        ingress_port=ingress_port,
        ingress_bind=tuple(_address(text) for text in ingress_bind or ()),
        host_ips=tuple(_address(text) for text in host_ip or ()),
        relay_token_file=relay_token_file,
        insecure_no_auth=insecure_no_auth,
        metrics_bind=metrics_bind_address,
        wanted=Wanted(namespace, name),
        settings=replace(settings, heartbeat=beat),
    )
    _run(options, check=check)


def _check_rhythm(interval: timedelta, duration: timedelta) -> None:
    if not _SHORTEST_INTERVAL <= interval <= _LONGEST_INTERVAL:
        raise typer.BadParameter("--heartbeat-interval must be 1s to 3m; 30s is usual")
    if not timedelta(seconds=15) <= duration <= timedelta(minutes=10):
        raise typer.BadParameter("--lease-duration must be 15s to 10m; 2m is usual")
    if duration < 2 * interval:
        raise typer.BadParameter("--lease-duration must be at least two heartbeat intervals")


def _run(options: AgentOptions, *, check: bool) -> None:
    try:
        if check:
            report = asyncio.run(check_agent(options, SystemClock()))
            typer.echo(report.text)
            raise typer.Exit(ExitCode.OK if report.good else ExitCode.FAILED)
        asyncio.run(run_agent(options, SystemClock()))
    except StateError as error:
        raise CliError(str(error)) from None
    except asyncio.CancelledError:  # a second signal
        raise typer.Exit(ExitCode.INTERRUPTED) from None
