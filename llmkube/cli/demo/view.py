"""The live picture: MetalNodes, FederatedClusters, recent Events, and what can be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from llmkube.api.times import parse_time
from llmkube.cli.demo.acts import ACTS
from llmkube.cli.demo.stage import NAMESPACE, SITES, Stage
from llmkube.cli.output import age
from llmkube.clock import SystemClock
from llmkube.kube.resources import EVENTS, FEDERATEDCLUSTERS, METALNODES

_COLOURS = {
    "True": "green",
    "False": "red",
    "Unknown": "yellow",
    "Connected": "green",
    "Stale": "yellow",
    "Unreachable": "red",
}
_EVENTS_SHOWN = 30
_STORY_LINES = 5
_HELP_LINES = 9
_TABLE_LINES = 5
"""Of a table without rows: title, header, borders."""

Object = Mapping[str, Any]


@dataclass(slots=True)
class Picture:
    """What is known of the cluster, and the last lines of the story."""

    kubeconfig: str
    nodes: list[Object] = field(default_factory=list)
    sites: list[Object] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    async def look(self, stage: Stage) -> None:
        """Read the objects anew. Raises ApiError."""
        self.nodes = [*await stage.client.list(METALNODES, NAMESPACE)]
        self.sites = [*await stage.client.list(FEDERATEDCLUSTERS)]
        ours = await stage.client.list(EVENTS, NAMESPACE)
        fleet = [
            event
            for event in await stage.client.list(EVENTS, "default")
            if event.get("regarding", {}).get("name") in SITES
        ]
        events: list[Object] = [*ours, *fleet]
        self.events = sorted(events, key=_event_time)[-_EVENTS_SHOWN:]

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.story.append(line)

    def render(self, height: int) -> RenderableType:
        """The whole screen, cut to the window's height: what is newest stays in sight."""
        rows = len(self.nodes) + len(self.sites)
        spare = height - rows - _TABLE_LINES * 2
        roomy = spare > _STORY_LINES + _HELP_LINES
        story = self.story[-_STORY_LINES:] if roomy else self.story[-2:]
        spare -= len(story) + 2 + (_HELP_LINES if roomy else 2)
        parts: list[RenderableType] = [
            _help(self.kubeconfig, roomy=roomy),
            Panel(_lines(story), title="Story", title_align="left"),
            _nodes_table(self.nodes),
            _sites_table(self.sites),
        ]
        if spare > _TABLE_LINES:
            newest = list(reversed(self.events))[: spare - _TABLE_LINES]
            parts.append(_events_table(newest))
        return Group(*parts)


def _lines(lines: list[str]) -> Text:
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _nodes_table(nodes: list[Object]) -> Table:
    table = Table(
        "Name",
        "Chip",
        "Host IP",
        "Connected",
        "Reachable",
        Column("Why", ratio=1, no_wrap=True, overflow="ellipsis"),
        title=f"MetalNodes in {NAMESPACE}",
        title_justify="left",
        expand=True,
    )
    for node in nodes:
        status = node.get("status") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        connected = conditions.get("AgentConnected") or {}
        reachable = conditions.get("Reachable") or {}
        why = connected if connected.get("status") != "True" else reachable
        table.add_row(
            node["metadata"]["name"],
            (status.get("capacity") or {}).get("chip", ""),
            status.get("hostIP", ""),
            _coloured(connected.get("status", "")),
            _coloured(reachable.get("status", "")),
            f"{why['reason']}: {why['message']}" if why else "",
        )
    return table


def _sites_table(sites: list[Object]) -> Table:
    table = Table(
        "Name",
        "Phase",
        "Nodes",
        "GPUs",
        "Last heartbeat",
        title="FederatedClusters",
        title_justify="left",
        expand=True,
    )
    now = SystemClock().now().wall
    for site in sites:
        status = site.get("status") or {}
        capacity = status.get("capacity") or {}
        heartbeat = parse_time(status.get("lastHeartbeatTime"))
        table.add_row(
            site["metadata"]["name"],
            _coloured(status.get("phase", "")),
            str(capacity.get("nodes", "")),
            str(capacity.get("gpusTotal", "")),
            f"{age(heartbeat, now)} ago" if heartbeat else "never",
        )
    return table


def _events_table(events: list[Object]) -> Table:
    table = Table(
        "Time",
        "About",
        "Reason",
        Column("Note", ratio=1, no_wrap=True, overflow="ellipsis"),
        title="Events, newest first",
        title_justify="left",
        expand=True,
    )
    for event in events:
        when = parse_time(_event_time(event))
        style = "yellow" if event.get("type") == "Warning" else None
        table.add_row(
            f"{when:%H:%M:%S}" if when else "",
            event.get("regarding", {}).get("name", ""),
            event.get("reason", ""),
            event.get("note", ""),
            style=style,
        )
    return table


def _help(kubeconfig: str, *, roomy: bool) -> RenderableType:
    keys = "  ".join(f"[{act.key}] {act.title}" for act in ACTS)
    keys = f"{keys}  [s] play all  [q] quit"
    if not roomy:
        short = " ".join(act.key for act in ACTS)
        return _lines([f"keys: {short}  s: play all  q: quit  (a taller window shows more)"])
    text = Text(
        f"{keys}\n"
        f"export KUBECONFIG={kubeconfig}\n"
        f"kubectl get mn,fc -A -o wide      llmkube metal describe studio -n {NAMESPACE}\n"
        f"kubectl get events -n {NAMESPACE}   llmkube fleet status"
    )
    return Panel(text, title="Try", title_align="left")


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, ""))


def _event_time(event: Object) -> str:
    series = event.get("series") or {}
    when = series.get("lastObservedTime") or event.get("eventTime")
    return str(when or event.get("metadata", {}).get("creationTimestamp", ""))
