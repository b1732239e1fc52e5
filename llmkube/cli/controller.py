"""`llmkube controller`: flags in the ecosystem's spelling, then the process's life."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from llmkube import log
from llmkube.api.names import SYSTEM_NAMESPACE
from llmkube.cli.options import Context, Kubeconfig
from llmkube.clock import ZERO
from llmkube.controller import run as life
from llmkube.controller.options import DEFAULT_VERIFIER_IMAGE, ControllerName, Network, Options
from llmkube.controller.tuning import Tuning, load_tuning, parse_duration
from llmkube.health import BindAddress

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def parse_networks(texts: Sequence[str] | None) -> tuple[Network, ...]:
    """CIDRs as users write them. Raises ValueError."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts or ())
    except ValueError as error:
        raise ValueError(f"{error}: write it like 10.96.0.0/16") from error


def parse_positive_duration(text: str) -> timedelta:
    """A duration of more than nothing. Raises typer.BadParameter."""
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if duration <= ZERO:
        raise typer.BadParameter("must be longer than nothing")
    return duration


def parse_controllers(text: str) -> frozenset[ControllerName]:
    """A comma-separated choice of controllers. Raises typer.BadParameter."""
    words = {word.strip() for word in text.split(",") if word.strip()}
    known = {str(name) for name in ControllerName}
    if not words or words - known:
        raise typer.BadParameter(f"choose from {', '.join(sorted(known))}")
    return frozenset(ControllerName(word) for word in words)


@app.command()
def controller(
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Only MetalNodes of this namespace (repeatable); by default of all.",
        ),
    ] = None,
    controllers: Annotated[
        str, typer.Option("--controllers", metavar="LIST", help="Which reconcilers to run.")
    ] = ",".join(ControllerName),
    leader_elect: Annotated[
        bool, typer.Option("--leader-elect/--no-leader-elect", help="Elect one active replica.")
    ] = False,
    leader_elect_namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Namespace of the leader's Lease.")
    ] = SYSTEM_NAMESPACE,
    metrics_bind_address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to serve /metrics; 0 switches it off.")
    ] = ":8080",
    health_probe_bind_address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where to serve /healthz and /readyz; 0 switches them off."
        ),
    ] = ":8081",
    verifier_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image of the verifier pods.")
    ] = DEFAULT_VERIFIER_IMAGE,
    verifier_image_pull_secret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pull secret of the verifier pods, in each MetalNode's own namespace.",
        ),
    ] = None,
    allow_cidr: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-cidr",
            metavar="CIDR",
            help="Range that may be dialled although it is refused by default, such as loopback"
            " (repeatable; for tests and the demo).",
        ),
    ] = None,
    deny_cidr: Annotated[
        list[str] | None,
        typer.Option(
            "--deny-cidr",
            metavar="CIDR",
            help="Range that must never be dialled: name the service and the pod range of this"
            " cluster (repeatable).",
        ),
    ] = None,
    max_concurrent_checks: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Verifier pods at one time in the cluster (20)."),
    ] = None,
    check_timeout: Annotated[
        timedelta | None,
        typer.Option(
            metavar="DURATION",
            parser=parse_positive_duration,
            help="How long a verifier pod may take to answer (120s).",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="YAML file that changes any other duration or limit."
        ),
    ] = None,
    log_format: Annotated[
        log.LogFormat, typer.Option(help="Log records as JSON or for people.")
    ] = log.LogFormat.JSON,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Keep the status of MetalNodes and FederatedClusters true, until SIGTERM."""
    try:
        log.configure(log_format, log_level)
        options = Options(
            kubeconfig=kubeconfig,
            context=context,
            namespaces=tuple(namespace or ()),
            controllers=parse_controllers(controllers),
            leader_elect=leader_elect,
            leader_elect_namespace=leader_elect_namespace,
            metrics_bind_address=BindAddress.parse(metrics_bind_address),
            health_probe_bind_address=BindAddress.parse(health_probe_bind_address),
            verifier_image=verifier_image,
            verifier_image_pull_secret=verifier_image_pull_secret,
            allow_cidrs=parse_networks(allow_cidr),
            deny_cidrs=parse_networks(deny_cidr),
            tuning=_tuned(load_tuning(config), max_concurrent_checks, check_timeout),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    life.run(options)


def _tuned(tuning: Tuning, max_concurrent: int | None, timeout: timedelta | None) -> Tuning:
    """The flags win over the file."""
    checks = tuning.checks
    checks = replace(
        checks,
        max_concurrent=checks.max_concurrent if max_concurrent is None else max_concurrent,
        timeout=checks.timeout if timeout is None else timeout,
    )
    return replace(tuning, checks=checks)
