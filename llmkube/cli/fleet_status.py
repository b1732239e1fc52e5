"""`llmkube fleet status`: which edge clusters are alive, and what they have, in total.

A site that has no phase yet is counted, too: it was registered and nobody has judged it. GPUs and
services of sites that are not Connected are their last word, so totals of what can be *used* take
Connected sites only. Neighbour: `follow`, which keeps --watch going through every outage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from llmkube.api.names import Phase
from llmkube.api.times import parse_time
from llmkube.cli.errors import CliError, ExitCode
from llmkube.cli.follow import Selection, State, follow
from llmkube.cli.output import Hint, age, as_list, document, names, plain, table, tidy
from llmkube.cli.ownership import find
from llmkube.cli.values import Format
from llmkube.kube.resources import FEDERATEDCLUSTERS

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Object = dict[str, Any]
NO_PHASE = "none yet"
_COLUMNS = ("NAME", "TIER", "PHASE", "LAST-HEARTBEAT", "GPUS", "SERVICES")
_WIDE = ("NODES", "MODELS", "INTERVAL", "VERSION", "DISPLAY-NAME", "AGE")
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_REDRAW_EVERY = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class Totals:
    """The fleet in numbers."""

    sites: int
    connected: int
    stale: int
    unreachable: int
    without_phase: int
    nodes: int
    gpus_total: int
    gpus_allocatable: int
    """Of Connected sites."""
    services_ready: int
    """Of Connected sites."""
    services_total: int

    def __str__(self) -> str:
        phases = (
            f"{self.connected} Connected, {self.stale} Stale, {self.unreachable} Unreachable, "
            f"{self.without_phase} without phase"
        )
        return (
            f"{_plural(self.sites, 'site')}: {phases}. {_plural(self.nodes, 'node')}, "
            f"{_plural(self.gpus_total, 'GPU')}, {_plural(self.services_total, 'service')}; on "
            f"Connected sites {_plural(self.gpus_allocatable, 'GPU')} allocatable, "
            f"{_plural(self.services_ready, 'service')} ready."
        )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def totals(sites: Sequence[Mapping[str, Any]]) -> Totals:
    """Count the fleet. A phase that this version does not know counts as none."""
    phases = Counter(_phase(site) for site in sites)
    alive = [site for site in sites if _phase(site) == Phase.CONNECTED]
    return Totals(
        sites=len(sites),
        connected=phases[Phase.CONNECTED],
        stale=phases[Phase.STALE],
        unreachable=phases[Phase.UNREACHABLE],
        without_phase=len(sites) - sum(phases[phase] for phase in Phase),
        nodes=_sum(sites, "capacity", "nodes"),
        gpus_total=_sum(sites, "capacity", "gpusTotal"),
        gpus_allocatable=_sum(alive, "capacity", "gpusAllocatable"),
        services_ready=_sum(alive, "inference", "servicesReady"),
        services_total=_sum(sites, "inference", "servicesTotal"),
    )


def _phase(site: Mapping[str, Any]) -> str:
    return str(_status(site).get("phase") or "")


def _status(site: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = site.get("status") or {}
    return found


def _sum(sites: Iterable[Mapping[str, Any]], part: str, name: str) -> int:
    return sum((_status(site).get(part) or {}).get(name) or 0 for site in sites)


# Once ------------------------------------------------------------------------------------------


async def read_sites(client: KubeClient, name: str | None, output: Format, now: datetime) -> str:
    """The fleet, or one site of it, in the format asked for. Raises CliError if there is none."""
    if name is None:
        sites = await client.list(FEDERATEDCLUSTERS)
    else:
        site = await find(client, FEDERATEDCLUSTERS, name)
        if site is None:
            raise CliError(
                f"there is no FederatedCluster {name}; see `llmkube fleet status`",
                ExitCode.NOT_FOUND,
            )
        sites = [site]
    return render(sites, output, now)


def render(sites: Sequence[Object], output: Format, now: datetime) -> str:
    """The fleet in the format asked for."""
    match output:
        case Format.JSON | Format.YAML:
            return document(as_list(sites, totals=_camel(totals(sites))), output)
        case Format.NAME:
            return names(FEDERATEDCLUSTERS, sites)
        case _ if not sites:
            return Hint("No sites. Register one with `llmkube fleet register NAME`.")
        case _:
            wide = output is Format.WIDE
            rows = [row(site, now, wide=wide) for site in sites]
            return table(headers(wide=wide), rows) + f"\n\n{totals(sites)}"


def _camel(counted: Totals) -> dict[str, int]:
    def camel(name: str) -> str:
        first, *rest = name.split("_")
        return first + "".join(part.capitalize() for part in rest)

    return {camel(name): value for name, value in asdict(counted).items()}


def headers(*, wide: bool) -> tuple[str, ...]:
    return (*_COLUMNS, *(_WIDE if wide else ()))


def row(site: Mapping[str, Any], now: datetime, *, wide: bool) -> list[object]:
    """One site as a line of the table."""
    spec, status = site.get("spec") or {}, _status(site)
    capacity, inference = status.get("capacity") or {}, status.get("inference") or {}
    cells: list[object] = [
        site["metadata"]["name"],
        spec.get("dataResidencyTier"),
        _phase(site) or NO_PHASE,
        age(parse_time(status.get("lastHeartbeatTime")), now) or "never",
        _share(capacity, "gpusAllocatable", "gpusTotal"),
        _share(inference, "servicesReady", "servicesTotal"),
    ]
    return cells + (_wide(site, now) if wide else [])


def _wide(site: Mapping[str, Any], now: datetime) -> list[object]:
    spec, status = site.get("spec") or {}, _status(site)
    return [
        (status.get("capacity") or {}).get("nodes"),
        (status.get("inference") or {}).get("models"),
        f"{spec.get('heartbeatIntervalSeconds') or 30}s",
        status.get("observedVersion"),
        spec.get("displayName"),
        age(parse_time(site["metadata"].get("creationTimestamp")), now),
    ]


def _share(part: Mapping[str, Any], usable: str, total: str) -> str | None:
    return f"{part.get(usable)}/{part.get(total)}" if part else None


# For ever --------------------------------------------------------------------------------------


async def watch_sites(
    client: KubeClient, name: str | None, output: Format, now: Callable[[], datetime]
) -> None:
    """Show the fleet, and each change of it, until cancelled."""
    states = follow(client, Selection(FEDERATEDCLUSTERS, name=name))
    if sys.stdout.isatty() and output in (Format.TABLE, Format.WIDE):
        await _redraw(states, output, now)
    before: State | None = None
    async for state in states:
        for line in changed_lines(before, state, output, now()):
            typer.echo(line)
        sys.stdout.flush()
        before = state


async def _redraw(
    states: AsyncIterator[State], output: Format, now: Callable[[], datetime]
) -> None:
    """Draw the screen at each change, and every other second, because ages grow."""
    latest: State | None = None
    changed = asyncio.Event()

    async def draw() -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REDRAW_EVERY.total_seconds()):
                    await changed.wait()
            changed.clear()
            if latest is not None:
                sites = [latest[key] for key in sorted(latest)]
                typer.echo(_HOME_AND_CLEAR + render(sites, output, now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(draw())
        async for state in states:
            latest = state
            changed.set()


def changed_lines(before: State | None, state: State, output: Format, now: datetime) -> list[str]:
    """What a pipe gets: headers first, then a line for each site that is new, changed or gone."""
    earlier = before or {}
    fresh = [site for key, site in sorted(state.items()) if earlier.get(key) != site]
    gone = [site for key, site in sorted(earlier.items()) if key not in state]
    match output:
        case Format.JSON:
            return [json.dumps(tidy(site)) for site in fresh]
        case Format.YAML:
            return [f"---\n{document(tidy(site), output)}" for site in fresh]
        case Format.NAME:
            return [names(FEDERATEDCLUSTERS, [site]) for site in fresh]
    wide = output is Format.WIDE
    heading = ["\t".join(headers(wide=wide))] if before is None else []
    lines = [_tabbed(row(site, now, wide=wide)) for site in fresh]
    return [*heading, *lines, *(f"{site['metadata']['name']}\tdeleted" for site in gone)]


def _tabbed(cells: Sequence[object]) -> str:
    return "\t".join(plain(cell) for cell in cells)
