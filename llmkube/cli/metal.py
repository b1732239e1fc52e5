"""`llmkube metal …`: connect Macs, list them, and find out why one is not reachable.

Thin: what the commands do is in `metal_credentials`, `metal_list`, `metal_describe` and
`metal_verify`, imported when needed so that `--help` stays fast.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmkube.api.names import METAL_ACCOUNT_PREFIX
from llmkube.cli import options as opt
from llmkube.cli.values import (
    Format,
    parse_duration,
    parse_ip,
    parse_node_selector,
    parse_tolerations,
)

if TYPE_CHECKING:
    from llmkube.cli.credentials import TokenOptions

app = typer.Typer(
    help="Connect Macs: credentials, listing, diagnosis.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)
token_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)
app.add_typer(token_app, name="token", help="Credentials of Macs.")

HostIp = Annotated[
    str | None,
    typer.Option(
        "--host-ip",
        metavar="IP",
        parser=parse_ip,
        help="Address at which you know the Mac is reached; tried first, and verified. "
        "'' clears it.",
    ),
]
NodeSelector = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier-node-selector",
        metavar="KEY=VALUE",
        help="Label of the nodes that the verifier pod runs on: those of your relay pods. "
        "Repeatable; replaces all earlier ones; '' clears them.",
        show_default=False,
    ),
]
Tolerations = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier-toleration",
        metavar="KEY[=VALUE][:EFFECT]",
        help="Taint that the verifier pod tolerates. Repeatable; replaces all earlier ones; '' "
        "clears them.",
        show_default=False,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the result of the check.")]
Timeout = Annotated[
    timedelta,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=parse_duration,
        help="How long --wait waits.",
        show_default="3m",
    ),
]


# Credentials -----------------------------------------------------------------------------------


@token_app.command("create")
def token_create(
    name: opt.MetalName,
    namespace: opt.Namespace = None,
    host_ip: HostIp = None,
    verifier_node_selector: NodeSelector = None,
    verifier_toleration: Tolerations = None,
    ttl: opt.TokenTtl = None,
    server: opt.Server = None,
    certificate_authority: opt.CertificateAuthority = None,
    output_file: opt.OutputFile = None,
    overwrite: opt.Overwrite = False,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Make the MetalNode NAME and a credential for the agent on that Mac.

    Safe to repeat: what exists is completed, options not given keep their values, and a new token
    is issued. Earlier tokens stay valid until they expire; `rotate` ends them.
    """
    from llmkube.cli.metal_credentials import MetalTokenOptions, create_metal_token

    selector = parse_node_selector(verifier_node_selector) if verifier_node_selector else None
    tolerations = parse_tolerations(verifier_toleration) if verifier_toleration else None
    token = _token_options(ttl, server, certificate_authority)
    destination = opt.destination(output_file, name, METAL_ACCOUNT_PREFIX + name, overwrite)

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            asked = MetalTokenOptions(
                name, session.namespace, host_ip, selector, tolerations, token
            )
            credentials = await create_metal_token(session.client, asked)
        destination.deliver(credentials, _next_steps(name, session.namespace))

    opt.execute(work())


@token_app.command("rotate")
def token_rotate(
    name: opt.MetalName,
    namespace: opt.Namespace = None,
    ttl: opt.TokenTtl = None,
    server: opt.Server = None,
    certificate_authority: opt.CertificateAuthority = None,
    output_file: opt.OutputFile = None,
    overwrite: opt.Overwrite = False,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """End every token of the Mac NAME and issue a new one.

    The account is made anew. The agent picks the new file up without a restart.
    """
    from llmkube.cli.metal_credentials import MetalTokenOptions, rotate_metal_token

    token = _token_options(ttl, server, certificate_authority)
    destination = opt.destination(output_file, name, METAL_ACCOUNT_PREFIX + name, overwrite)

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            asked = MetalTokenOptions(name, session.namespace, token=token)
            credentials = await rotate_metal_token(session.client, asked)
        destination.deliver(
            credentials,
            "Every earlier token is refused within about 10 seconds. Put this file in the place "
            "of the old one on the Mac: the agent reads it again by itself.",
        )

    opt.execute(work())


@token_app.command("revoke")
def token_revoke(
    name: opt.MetalName,
    namespace: opt.Namespace = None,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Cut the Mac NAME off: delete its account, which ends every token it ever had."""
    from llmkube.cli.metal_credentials import revoke_metal_token

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            change = await revoke_metal_token(session.client, name, session.namespace)
        if change is None:
            typer.echo(f"{name} was revoked already: it has no account")
            return
        typer.echo(str(change))
        typer.echo(
            "The API server refuses its tokens within about 10 seconds. The controller turns "
            "AgentConnected False (ServiceAccountNotFound) at once, whatever still beats. "
            f"`llmkube metal token create {name} -n {session.namespace}` lets the Mac in again; "
            f"`kubectl -n {session.namespace} delete metalnode {name}` removes it for good."
        )

    opt.execute(work())


@token_app.command("list")
def token_list(
    namespace: opt.Namespace = None,
    all_namespaces: opt.AllNamespaces = False,
    output: opt.Output = Format.TABLE,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """List the Macs' accounts: whether they are active, their age, and the last heartbeat."""
    from llmkube.cli.metal_list import show_accounts
    from llmkube.cli.output import show

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            where = None if all_namespaces else session.namespace
            show(await show_accounts(session.client, where, output, opt.now()))

    opt.execute(work())


def _token_options(
    ttl: timedelta | None, server: str | None, certificate_authority: Path | None
) -> TokenOptions:
    from llmkube.cli.credentials import TokenOptions, read_authority

    return TokenOptions(ttl, server, read_authority(certificate_authority))


def _next_steps(name: str, namespace: str) -> str:
    return (
        "Copy this file to the Mac over a safe channel, remove it here, and start there:\n"
        "  (umask 077; openssl rand -hex 32 > relay-token)   # once; for whoever may use the LLM\n"
        "  llmkube agent --kubeconfig FILE --upstream http://127.0.0.1:PORT "
        "--relay-token-file relay-token\n"
        f"Then see `llmkube metal describe {name} -n {namespace}`."
    )


# Looking ---------------------------------------------------------------------------------------


@app.command("list")
def list_nodes(
    namespace: opt.Namespace = None,
    all_namespaces: opt.AllNamespaces = False,
    output: opt.Output = Format.TABLE,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """List the Macs: connected, reachable, and where."""
    from llmkube.cli.metal_list import show_nodes
    from llmkube.cli.output import show

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            where = None if all_namespaces else session.namespace
            show(await show_nodes(session.client, where, output, opt.now()))

    opt.execute(work())


@app.command("describe")
def describe(
    name: opt.MetalName,
    namespace: opt.Namespace = None,
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """One screen: is the Mac NAME connected, is it reachable, why not, and what to do."""
    from llmkube.cli.metal_describe import observe, render

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            picture = await observe(session.client, name, session.namespace)
        typer.echo(render(picture, opt.now()))

    opt.execute(work())


@app.command("verify")
def verify(
    name: opt.MetalName,
    namespace: opt.Namespace = None,
    wait: Wait = False,
    timeout: Timeout = timedelta(minutes=3),
    kubeconfig: opt.Kubeconfig = None,
    context: opt.Context = None,
) -> None:
    """Ask for a check of the Mac NAME now, past any backoff.

    A check starts at least 30 seconds after the one before. With --wait, exit code 0 means the Mac
    was reached, 7 that it was not (or that no check can run).
    """
    from llmkube.cli.metal_verify import request_check, wait_for_check

    async def work() -> None:
        async with opt.connect(opt.Target(kubeconfig, context, namespace)) as session:
            asked = await request_check(session.client, name, session.namespace)
            typer.echo(asked.message)
            if wait:
                typer.echo(await wait_for_check(session.client, asked, timeout))

    opt.execute(work())
