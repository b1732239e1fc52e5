"""Options that many commands share, spelled as kubectl spells them, and `connect`.

Neighbour: `llmkube.cli.values`, which parses what is given to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from llmkube.cli.values import Format, parse_duration, parse_output_format

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

T = TypeVar("T")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)]
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
        parser=parse_duration,
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


def execute(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end."""
    return asyncio.run(work)
