"""The `llmkube` command: one name for every program of the project.

Subcommands are imported only when they are called, so that `llmkube --help`, completion and short
commands like `metal list` do not pay for the controller. Each lives in a module of this package
that holds a Typer object named `app`: a group, or a single command.

Every failure is one line on stderr that says what to do, and an exit code that scripts can rely
on (`llmkube.cli.errors`). `--debug`, or LLMKUBE_DEBUG=1, shows the traceback as well.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import typer.core

import llmkube
from llmkube.cli.errors import EXIT_CODES_HELP, ExitCode, Failure, describe_failure

DEBUG_VARIABLE = "LLMKUBE_DEBUG"


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand as the help shows it, and the module that holds it."""

    module: str
    summary: str


SUBCOMMANDS = {
    "metal": Subcommand("llmkube.cli.metal", "Connect Macs: credentials, listing, diagnosis."),
    "fleet": Subcommand("llmkube.cli.fleet", "Register edge clusters and see which are alive."),
    "controller": Subcommand("llmkube.cli.controller", "Run the controller (in the cluster)."),
    "agent": Subcommand("llmkube.cli.agent", "Run the agent (on the Mac)."),
    "edge": Subcommand("llmkube.cli.edge", "Push this cluster's status to the datacenter."),
    "demo": Subcommand("llmkube.cli.demo", "Try all of it on this machine."),
}


class LazyGroup(typer.core.TyperGroup):
    """A group whose subcommands are imported when they are called, not when they are listed."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**{**attrs, "commands": [_listed(name) for name in SUBCOMMANDS]})

    def resolve_command(  # type: ignore[override]
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, Any, list[str]]:
        """What is called: the real command."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        return name, load(name), rest


def _listed(name: str) -> typer.core.TyperCommand:
    """What a listing shows: name and summary, without the import."""
    summary = SUBCOMMANDS[name].summary
    return typer.core.TyperCommand(name, callback=None, help=summary, rich_markup_mode=None)


def load(name: str) -> Any:
    """Import a subcommand."""
    gc.disable()  # imports leave next to no garbage, and looking for it takes a tenth of their time
    try:
        module = importlib.import_module(SUBCOMMANDS[name].module)
    finally:
        gc.enable()
    command = typer.main.get_command(module.app)
    command.name = name
    return command


app = typer.Typer(
    name="llmkube",
    cls=LazyGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmkube {llmkube.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help=f"Show tracebacks of failures; as {DEBUG_VARIABLE}=1."),
    ] = False,
) -> None:
    """The truth about Macs and edge clusters that serve LLMs outside the main cluster."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: Sequence[str]) -> int:
    """Run the command and return its exit code; a failure is told on stderr."""
    command = typer.main.get_command(app)
    given = [argument for argument in args if argument != "--debug"]  # wherever it stands
    if len(given) < len(args):
        os.environ[DEBUG_VARIABLE] = "1"
    try:
        result = command.main(given, prog_name="llmkube", standalone_mode=False)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except (KeyboardInterrupt, Exception) as error:
        _show_traceback_if_wanted()
        return _report(describe_failure(error))
    return result if isinstance(result, int) else ExitCode.OK


def _show_traceback_if_wanted() -> None:
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0", "false"):
        traceback.print_exc()


def _report(failure: Failure) -> int:
    if failure.message:
        typer.echo(failure.message, err=True)
    return failure.exit_code
