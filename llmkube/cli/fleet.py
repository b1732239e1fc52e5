"""`llmkube fleet …`: register edge clusters in the datacenter, and see which of them are alive.

Thin: what the commands do is in `fleet_registration` and `fleet_status`, imported when needed so
that `--help` stays fast.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmkube.api.names import EDGE_ACCOUNT_PREFIX
from llmkube.cli import options as opt
from llmkube.cli.values import Format, parse_interval, parse_site_name

if TYPE_CHECKING:
    from llmkube.cli.credentials import TokenOptions

app = typer.Typer(
    help="Register edge clusters and see which are alive.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

AccountNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAME",
        help="Namespace of the site's account; by default where it is, at first llmkube-system.",
    ),
]
DisplayName = Annotated[
    str | None,
    typer.Option("--display-name", metavar="TEXT", help="Label for people. '' clears it."),
]
Tier = Annotated[
    str | None,
    typer.Option(
        "--tier",
        "--data-residency-tier",
        metavar="TEXT",
        help="Data residency tier, e.g. eu. '' clears it.",
    ),
]
Interval = Annotated[
    timedelta | None,
    typer.Option(
        "--heartbeat-interval",
        metavar="DURATION",
        parser=parse_interval,
        help="How often the edge pushes, at least 5s; 30s if it was never set. The site is Stale "
        "after 3 and Unreachable after 10 of them.",
        show_default=False,
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Go on, and show each change, until interrupted.")
]
OneSite = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", parser=parse_site_name, help="Only this site.", show_default=False
    ),
]


@app.command("register")
def register(
    name: opt.SiteName,
    namespace: AccountNamespace = None,
    display_name: DisplayName = None,
    tier: Tier = None,
    heartbeat_interval: Interval = None,
    ttl: opt.TokenTtl = None,
    server: opt.Server = None,
    certificate_authority: opt.CertificateAuthority = None,
    output_file: opt.OutputFile = None,
    overwrite: opt.Overwrite = False,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Make the FederatedCluster NAME and a credential for the edge there.

    Safe to repeat: what exists is completed, options not given keep their values, and a new token
    is issued. Earlier tokens stay valid until they expire; `rotate` ends them.
    """
    from llmkube.cli.fleet_registration import FleetOptions, register_site

    token = _token_options(ttl, server, certificate_authority)
    asked = FleetOptions(name, namespace, display_name, tier, heartbeat_interval, token)
    destination = opt.destination(output_file, name, EDGE_ACCOUNT_PREFIX + name, overwrite)

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context)) as session:
            credentials = await register_site(session.client, asked)
        destination.deliver(
            credentials,
            "Copy this file to the edge cluster over a safe channel, remove it here, and run "
            "there (config/edge has a deployment):\n"
            f"  llmkube edge --cluster-name {name} --datacenter-kubeconfig FILE "
            "--kubeconfig OWN-CLUSTER\n"
            "OWN-CLUSTER is the kubeconfig of the cluster that is reported (a pod there needs "
            "none).\n"
            f"Then see `llmkube fleet status {name}`.",
        )

    opt.execute(work())


@app.command("rotate")
def rotate(
    name: opt.SiteName,
    namespace: AccountNamespace = None,
    ttl: opt.TokenTtl = None,
    server: opt.Server = None,
    certificate_authority: opt.CertificateAuthority = None,
    output_file: opt.OutputFile = None,
    overwrite: opt.Overwrite = False,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """End every token of the site NAME and issue a new one.

    The account is made anew. The edge picks the new file up without a restart.
    """
    from llmkube.cli.fleet_registration import FleetOptions, rotate_site

    token = _token_options(ttl, server, certificate_authority)
    asked = FleetOptions(name, namespace, token=token)
    destination = opt.destination(output_file, name, EDGE_ACCOUNT_PREFIX + name, overwrite)

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context)) as session:
            credentials = await rotate_site(session.client, asked)
        destination.deliver(
            credentials,
            "Every earlier token is refused within about 10 seconds. Put this file in the place "
            "of the old one at the edge: it is read again by itself.",
        )

    opt.execute(work())


@app.command("unregister")
def unregister(
    name: opt.SiteName,
    namespace: AccountNamespace = None,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Delete the site NAME with its account and rights; its tokens end with them."""
    from llmkube.cli.fleet_registration import unregister_site

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context)) as session:
            changes = await unregister_site(session.client, name, namespace)
        typer.echo("\n".join(str(change) for change in changes))
        typer.echo("The API server refuses its tokens within about 10 seconds. Stop the edge.")

    opt.execute(work())


@app.command("status")
def status(
    name: OneSite = None,
    watch: Watch = False,
    output: opt.Output = Format.TABLE,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Show the sites, which of them are alive, and totals.

    GPUS are allocatable/total, SERVICES ready/total, as the site said last.

    With --watch a terminal is redrawn; otherwise each changed site is printed as a line (with
    -o json: as one document a line).
    """
    from llmkube.cli.fleet_status import read_sites, watch_sites
    from llmkube.cli.output import show

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context)) as session:
            if watch:
                await watch_sites(session.client, name, output, opt.now)
            else:
                show(await read_sites(session.client, name, output, opt.now()))

    opt.execute(work())


def _token_options(
    ttl: timedelta | None, server: str | None, certificate_authority: Path | None
) -> TokenOptions:
    from llmkube.cli.credentials import TokenOptions, read_authority

    return TokenOptions(ttl, server, read_authority(certificate_authority))
