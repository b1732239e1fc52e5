"""The command: watch and press keys, let the script play, or assert it without a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from llmkube import log
from llmkube.cli.demo.acts import ACTS, EVERYTHING_IS_WELL, Act, Missed, play, wait_for
from llmkube.cli.demo.stage import Settings, Stage, set_up
from llmkube.cli.demo.view import Picture
from llmkube.cli.errors import CliError
from llmkube.cli.options import Context
from llmkube.kube.errors import ApiError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_REFRESH = 0.5  # seconds


@app.command()
def demo(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="Play in this cluster (as its admin) instead of a local control plane.",
        ),
    ] = None,
    context: Context = None,
    script: Annotated[
        bool, typer.Option("--script", help="Play the faults one after the other.")
    ] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Play the script without a terminal; exit 1 if a state does not follow."
        ),
    ] = False,
    verifier_image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="With --kubeconfig: the verifier image to use."),
    ] = None,
    audit_log: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Three Macs, two sites and a controller on a real API server, and what happens to them."""
    log.configure(log.LogFormat.CONSOLE, "error")
    settings = Settings(kubeconfig, context, verifier_image, audit_log)
    with asyncio.Runner() as runner:
        runner.run(_demo(settings, script=script or once, interactive=not once))


async def _demo(settings: Settings, *, script: bool, interactive: bool) -> None:
    console = Console(stderr=False)
    on_screen = interactive and console.is_terminal
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    where = "a control plane" if settings.kubeconfig is None else f"in {settings.kubeconfig}"
    console.print(f"Starting {where}: the controller, three Macs and two sites …")
    with contextlib.suppress(asyncio.CancelledError):
        async with set_up(settings) as stage:
            picture = Picture(str(stage.installation.kubeconfig))
            console.print(f"export KUBECONFIG={picture.kubeconfig}", soft_wrap=True)
            if on_screen:
                async with _live(console, picture, stage):
                    await _by_key(stage, picture, script=script)
            else:
                await _told(console, stage, script=script)
        return
    console.print("Everything is stopped and removed.")


# Without a terminal -------------------------------------------------------------------------------


async def _told(console: Console, stage: Stage, *, script: bool) -> None:
    """Tell each step in a line; the script ends the demo, without it a signal does."""
    await _step(console, stage, None)
    if not script:
        await asyncio.Event().wait()
    for act in ACTS:
        await _step(console, stage, act)
    console.print(f"ok   all {len(ACTS)} acts went as they should")


async def _step(console: Console, stage: Stage, act: Act | None) -> None:
    title = act.title if act else "Everything comes up"
    if act:
        console.print(f"     {act.title}: {act.story}")
    try:
        if act:
            await play(stage, act)
        else:
            await wait_for(stage, title, EVERYTHING_IS_WELL)
    except Missed as error:
        for name, process in stage.processes.items():
            console.print(f"--- {name}\n{process.tail()}", markup=False, highlight=False)
        raise CliError(str(error)) from error
    console.print(f"ok   {title}")


# On a terminal ------------------------------------------------------------------------------------


@asynccontextmanager
async def _live(console: Console, picture: Picture, stage: Stage) -> AsyncIterator[None]:
    """Keep the picture on the screen while the block runs."""
    first = picture.render(console.height)
    with Live(first, console=console, screen=True, auto_refresh=False) as screen:

        async def refresh() -> None:
            while True:
                try:
                    await picture.look(stage)
                except ApiError as error:
                    picture.tell(error.message)
                screen.update(picture.render(console.height), refresh=True)
                await asyncio.sleep(_REFRESH)

        async with asyncio.TaskGroup() as tasks:
            refreshing = tasks.create_task(refresh())
            yield
            refreshing.cancel()


async def _by_key(stage: Stage, picture: Picture, *, script: bool) -> None:
    """Play what the keys ask for, one thing at a time, until q."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    known: dict[str, list[Act | None]] = {act.key: [act] for act in ACTS}
    known["s"] = list(ACTS)
    beginning: list[Act | None] = [None, *(ACTS if script else ())]
    with _keyboard(keys):
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(_play_all(stage, picture, beginning))
            while (key := await keys.get()) != "q":
                if key not in known:
                    continue
                if playing.done():
                    playing = tasks.create_task(_play_all(stage, picture, known[key]))
                else:
                    picture.tell("  busy: one thing at a time (q quits)")
            playing.cancel()


async def _play_all(stage: Stage, picture: Picture, acts: list[Act | None]) -> None:
    for act in acts:
        await _narrated(stage, picture, act)


async def _narrated(stage: Stage, picture: Picture, act: Act | None) -> None:
    """Play an act, or wait for the beginning; whatever goes wrong is told, and ends nothing."""
    title = act.title if act else "Everything comes up"
    picture.tell(f"… {title}: {act.story}" if act else f"… {title}")
    try:
        if act:
            await play(stage, act)
        else:
            await wait_for(stage, title, EVERYTHING_IS_WELL)
        picture.tell(f"✓ {title}")
    except (Missed, ApiError, CliError, RuntimeError, OSError) as error:
        picture.tell(f"✗ {' '.join(str(error).split())}")


@contextmanager
def _keyboard(keys: asyncio.Queue[str]) -> Iterator[None]:
    """Put each key pressed on the queue, without waiting for Enter."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        for key in os.read(descriptor, 64).decode("ascii", "ignore"):
            keys.put_nowait(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
