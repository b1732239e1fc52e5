"""`llmkube edge`: push this cluster's status to the datacenter. The work is in `llmkube.edge`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from llmkube.cli import options as opt
from llmkube.cli.values import parse_site_name
from llmkube.clock import SystemClock
from llmkube.edge.edge import EdgeOptions, run_edge
from llmkube.health import BadAddress, BindAddress
from llmkube.log import LogFormat, configure

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _address(text: str) -> BindAddress | None:
    try:
        return BindAddress.parse(text)
    except BadAddress as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def edge(
    cluster_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            parser=parse_site_name,
            help="Name of this site's FederatedCluster in the datacenter.",
            show_default=False,
        ),
    ],
    datacenter_kubeconfig: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The credential that `llmkube fleet register` wrote. The edge renews the token "
            "in it, or in a copy in --state-dir.",
            show_default=False,
        ),
    ],
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where a working copy of the credential lives, if the file itself cannot be "
            "written (a mounted Secret). It must outlive this process.",
        ),
    ] = None,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
    metrics_bind_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve metrics; 0: nowhere.")
    ] = ":8080",
    health_probe_bind_address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where to serve /healthz and /readyz; 0: nowhere."),
    ] = ":8081",
    log_format: Annotated[LogFormat, typer.Option(help="Log lines.")] = LogFormat.JSON,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Push this cluster's nodes, GPUs and inference services to the datacenter.

    Outbound connections only: at once, and then at the interval that the datacenter asks for.
    --kubeconfig is the local cluster's. Stops cleanly on SIGTERM.
    """
    try:
        configure(log_format, log_level)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = EdgeOptions(
        cluster_name=cluster_name,
        datacenter_kubeconfig=datacenter_kubeconfig,
        kubeconfig=kubeconfig,
        context=context,
        state_dir=state_dir,
        metrics_bind_address=_address(metrics_bind_address),
        health_probe_bind_address=_address(health_probe_bind_address),
    )
    asyncio.run(run_edge(options, SystemClock()))
