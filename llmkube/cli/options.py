"""Options that many commands share, spelled as kubectl spells them, and `connect`.

Neighbour: `llmkube.cli.values`, which parses what is given to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from llmkube.cli.values import (
    Format,
    parse_metal_name,
    parse_output_format,
    parse_server,
    parse_site_name,
    parse_ttl,
)

if TYPE_CHECKING:
    from llmkube.cli.credentials import Credentials
    from llmkube.kube.client import KubeClient

T = TypeVar("T")

MetalName = Annotated[
    str, typer.Argument(metavar="NAME", parser=parse_metal_name, help="Name of the MetalNode.")
]
SiteName = Annotated[
    str,
    typer.Argument(metavar="NAME", parser=parse_site_name, help="Name of the FederatedCluster."),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        help="Kubeconfig to use instead of $KUBECONFIG, the pod's own account or ~/.kube/config.",
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Namespace; by default the context's own."
    ),
]
AllNamespaces = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="All namespaces, not only one.")
]
Output = Annotated[
    Format,
    typer.Option(
        "--output",
        "-o",
        metavar="json|yaml|wide|name",
        parser=parse_output_format,
        help="Output format.",
        show_default=False,
    ),
]
TokenTtl = Annotated[
    timedelta | None,
    typer.Option(
        "--ttl",
        metavar="DURATION",
        parser=parse_ttl,
        help="Life of the token, e.g. 30d or 12h; at first 30d, then what was asked before. "
        "The API server may give less, and what it gave is reported.",
        show_default=False,
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        parser=parse_server,
        help="API server's URL as it is reached from there; at first the one you use, then what "
        "was given before.",
    ),
]
CertificateAuthority = Annotated[
    Path | None,
    typer.Option(
        "--certificate-authority",
        metavar="FILE",
        help="CA bundle (PEM) for --server where it is not the one you use.",
    ),
]
OutputFile = Annotated[
    str | None,
    typer.Option(
        "--output-file",
        "-o",
        metavar="FILE",
        help="Kubeconfig to write (mode 0600); by default NAME.kubeconfig in the current folder. "
        "'-' means stdout: whoever reads it holds the credential.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the output file even if it is something else."),
]


@dataclass(frozen=True, slots=True)
class Target:
    """Which cluster and namespace a command speaks to, as the user gave it."""

    kubeconfig: Path | None
    context: str | None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """An open client, and the namespace to use."""

    client: KubeClient
    namespace: str
    server: str


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Session]:
    """A client for the target. Raises ConfigError."""
    from llmkube.clock import SystemClock
    from llmkube.kube.client import KubeClient
    from llmkube.kube.config import load_access

    access = await load_access(target.kubeconfig, target.context)
    async with KubeClient(access, clock=SystemClock()) as client:
        yield Session(client, target.namespace or access.namespace, access.server)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a credential goes, and how the user is told. `path` None: stdout."""

    path: Path | None

    def deliver(self, credentials: Credentials, advice: str) -> None:
        """Write the kubeconfig; say so on stdout, or on stderr if the kubeconfig went there."""
        from llmkube.cli.credentials import summary, write

        write(credentials, self.path)
        typer.echo(summary(credentials, self.path, advice, now()), err=self.path is None)


def destination(given: str | None, name: str, user: str, overwrite: bool) -> Destination:
    """The place for a credential, checked before anything is made. Raises CliError."""
    from llmkube.cli.credentials import choose_path

    return Destination(choose_path(given, name, user, overwrite=overwrite))


def now() -> datetime:
    """The wall clock, for ages on the screen."""
    from llmkube.clock import SystemClock

    return SystemClock().now().wall


def execute(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end."""
    return asyncio.run(work)
