"""`make generate`, second part: the reference tables in docs/operations.md, written from the code.

A table stands between two marker comments; what is around it is written by hand. Flags, metrics,
settings and alerts are read from the program itself, so they cannot be wrong; what only people can
say (what a setting is for, what a reason means) is here in dictionaries, and a key that is missing
or superfluous there is an error. Run as `python -m hack.reference [FILE]`; tests/test_docs.py
checks that the committed file is what this writes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from llmkube.agent.metrics import AgentMetrics
from llmkube.api import names
from llmkube.api.candidates import CandidateResult
from llmkube.api.names import ConnectedReason, Phase, ReachableReason
from llmkube.cli import credentials
from llmkube.cli.errors import ExitCode
from llmkube.cli.main import DEBUG_VARIABLE, SUBCOMMANDS, load
from llmkube.clock import SystemClock
from llmkube.controller.sense import settings_of
from llmkube.controller.tuning import Tuning
from llmkube.edge.metrics import EdgeMetrics
from llmkube.metrics import Metrics
from llmkube.reconcilers.collectors import FEDERATEDCLUSTER_FAMILIES, METALNODE_FAMILIES
from llmkube.reconcilers.verification_metrics import VerificationMetrics

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "operations.md"
Table = Iterator[str]


class Undocumented(Exception):
    """The dictionaries below and the code do not name the same things."""


def documented(what: str, known: Iterable[str], described: Iterable[str]) -> None:
    """Raise Undocumented unless `described` has exactly the keys `known`."""
    known, described = set(known), set(described)
    if missing := known - described:
        raise Undocumented(f"hack/reference.py says nothing about {what} {sorted(missing)}")
    if surplus := described - known:
        raise Undocumented(
            f"hack/reference.py describes {what} that do not exist: {sorted(surplus)}"
        )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A Markdown table."""
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# Commands ---------------------------------------------------------------------------------------
def leaf_commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name."""
    for name in SUBCOMMANDS:
        yield from _leaves(load(name), f"llmkube {name}")


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, f"{path} {name}")


def options_of(command: Any) -> list[Any]:
    """The options that users see. Every command also has --help."""
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def commands() -> Table:
    for path, command in leaf_commands():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        operands = "".join(f" {p.metavar}" if p.required else f" [{p.metavar}]" for p in arguments)
        yield f"### {path}"
        yield ""
        yield code(f"{path}{operands} [flags]")
        yield ""
        yield _first_paragraph(command.help)
        yield ""
        yield from table(("flag", "default", "meaning"), map(_option_row, options_of(command)))
        yield ""


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _option_row(option: Any) -> tuple[str, str, str]:
    spellings = sorted([*option.opts, *option.secondary_opts], key=lambda s: len(s) == 2)
    value = "" if option.is_flag else f" {option.metavar or _values(option)}"
    env = f" Also {code(option.envvar)}." if option.envvar else ""
    return ", ".join(code(s + value) for s in spellings), _default(option), option.help + env


def _values(option: Any) -> str:
    """What a value without a metavar looks like."""
    default = option.default
    return "|".join(type(default)) if isinstance(default, StrEnum) else "N"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.is_flag:
        return "off"
    if isinstance(option.show_default, str):
        return code(option.show_default)
    default = option.default
    return "" if default is None else code(str(getattr(default, "value", default)))


EXIT_CODES = {
    ExitCode.OK: "Done.",
    ExitCode.FAILED: "The API server refused the request, or an unexpected error.",
    ExitCode.USAGE: "Wrong usage, or a configuration or kubeconfig that cannot be used.",
    ExitCode.NOT_FOUND: "The object does not exist, or the CRDs are not installed.",
    ExitCode.DENIED: "RBAC does not allow it, or the credential has expired or was revoked.",
    ExitCode.TAKEN: "The name is taken by an object that llmkube did not make for this owner, or "
    "the output file is something else.",
    ExitCode.UNREACHABLE: "The API server cannot be reached, or is overloaded.",
    ExitCode.NEGATIVE: "`metal verify --wait` has its answer, and it is no: the Mac was not "
    "reached, no check can run, or time is up.",
    ExitCode.INTERRUPTED: "Interrupted (Ctrl-C).",
}


def exit_codes() -> Table:
    documented("exit codes", map(str, ExitCode), map(str, EXIT_CODES))
    return table(("code", "meaning"), ((str(int(c)), text) for c, text in EXIT_CODES.items()))


ENVIRONMENT = {
    "KUBECONFIG": "Kubeconfig files, separated by colons, where `--kubeconfig` is not given. "
    "Then come the pod's own ServiceAccount and `~/.kube/config`.",
    DEBUG_VARIABLE: "`1` shows tracebacks of failures, as `--debug` does.",
    "LLMKUBE_KUBECONFIG": "The agent's `--kubeconfig`.",
    "NO_COLOR": "Switches colours off.",
    "STATE_DIRECTORY": "The agent's default `--state-dir`; systemd sets it.",
    "XDG_STATE_HOME": "Where the agent keeps its state for users other than root.",
    "KUBEBUILDER_ASSETS": "Folder with `etcd` and `kube-apiserver` for the demo and the tests.",
    "XDG_CACHE_HOME": "Where the built control plane is kept; by default `~/.cache`.",
}


def environment() -> Table:
    return table(("variable", "meaning"), ((code(n), text) for n, text in ENVIRONMENT.items()))


# Settings ---------------------------------------------------------------------------------------
SETTINGS = {
    "reflector.page_size": "Objects in one page of a list.",
    "reflector.inactivity_timeout": "A watch without an event or a bookmark for so long is dead. "
    "Longer than a minute (bookmarks), shorter than 75 s (history of the API server).",
    "reflector.shortest_server_timeout": "The API server ends each watch at a random time "
    "from here",
    "reflector.longest_server_timeout": "… to here.",
    "reflector.short_watch": "A watch that ends sooner without an event counts as a failure.",
    "reflector.backoff_base": "First pause after a failed list or watch.",
    "reflector.backoff_cap": "Longest such pause. Jitter adds up to as much again.",
    "reflector.backoff_reset": "After so long without a failure the pauses start from the first.",
    "reflector.longest_wait": "A longer Retry-After of the API server is cut to this.",
    "reflector.silent_streams": "After so many silent watches in a row the reflector lists again.",
    "reflector.catch_up": "How long a watch that resumes shows what it missed. What it shows then "
    "says nothing about clocks.",
    "reflector.long_silence": "A watch that was silent for longer counts as one that resumes.",
    "reflector.echo_limit": "So long after a write that the cache does not show, the object is "
    "read live.",
    "reflector.line_cap": "Longest line of a watch, in bytes.",
    "reflector.slice_size": "Objects handled before other work gets its turn.",
    "queue.backoff_base": "First pause after a failed reconcile of an object.",
    "queue.backoff_cap": "Longest such pause.",
    "queue.workers": "Reconciles at one time, of each controller.",
    "queue.run_limit": "A reconcile that takes longer is ended, and tried again.",
    "leader.lease_duration": "How long other replicas wait after the leader's last sign of life.",
    "leader.renew_deadline": "How long the leader goes on without a successful renewal. Shorter "
    "than `lease_duration`.",
    "leader.retry_period": "Pause between renewals, and between attempts to become the leader.",
    "leader.stop_timeout": "How long work may take to stop when leadership is lost; then the "
    "process ends.",
    "leader.release_timeout": "How long a leader that leaves tries to free the Lease; else it "
    "expires.",
    "heartbeat.default_timeout": "How long a renewal counts, where the Lease names no duration.",
    "heartbeat.least_timeout": "Least duration that a Lease may name; shorter ones are raised.",
    "heartbeat.most_timeout": "Longest duration that a Lease may name; longer ones are cut.",
    "heartbeat.mirror_after": "lastHeartbeatTime follows the Lease when it is further behind.",
    "heartbeat.write_interval": "Least pause between two status writes for one Mac, unless "
    "AgentConnected changes.",
    "heartbeat.second": "How long a second of leaseDurationSeconds lasts. For tests.",
    "heartbeat.trust.changes": "Renewals in a row that must have moved forward before a stamp "
    "with a wrong clock is believed.",
    "heartbeat.trust.tolerance": "A stamp that is less old than this is believed as it is.",
    "heartbeat.trust.skew_limit": "A clock that is further off causes a `ClockSkew` Event.",
    "phase.default_interval": "Interval of a site that names none.",
    "phase.stale_after": "Intervals without a push until Stale.",
    "phase.unreachable_after": "Intervals without a push until Unreachable.",
    "phase.second": "How long a second of heartbeatIntervalSeconds lasts. For tests.",
    "phase.trust.changes": "As for Macs; an old stamp of a site is believed at the third push.",
    "phase.trust.tolerance": "As for Macs.",
    "phase.trust.skew_limit": "As for Macs.",
    "checks.spacing": "Least time between two starts of a check of one Mac.",
    "checks.timeout": "How long a verifier pod may take to answer. `--check-timeout` wins.",
    "checks.backoff": "Pause after the first failed check; doubled with each further one.",
    "checks.backoff_cap": "Longest such pause.",
    "checks.reverify": "A verified Mac is checked again after this.",
    "checks.reverify_jitter": "Share of `reverify` by which Macs differ from each other.",
    "checks.true_lasts": "Reachable=True ends so long after the last success, if no later check "
    "gives an answer.",
    "checks.trouble": "How long a pod may be unschedulable or its image unpullable.",
    "checks.intake": "A new report is taken up at most once in this time.",
    "checks.connect_timeout": "TCP connect of the dial-back.",
    "checks.handshake_timeout": "TLS handshake of the dial-back.",
    "checks.max_concurrent": "Checks at one time in the cluster. `--max-concurrent-checks` wins.",
    "life.request_timeout": "One request to the API server.",
    "life.coalescing": "Events about Leases and MetalNodes are gathered for so long before they "
    "are read.",
    "life.no_attempt_limit": "`/healthz` fails when a reflector has no watch and has tried "
    "nothing for so long.",
    "life.filling_limit": "How long caches may fill at the start with the garbage collector off.",
    "life.loop_stall_limit": "`/healthz` fails when the event loop is stuck for so long.",
    "life.drain": "How long a stop waits for the reconciles in hand.",
    "life.last_events": "How long it then waits for Events that are not written yet.",
}


def settings() -> Table:
    known = dict(settings_of(Tuning()))
    documented("settings", known, SETTINGS)
    return table(
        ("setting", "default", "meaning"),
        ((code(name), code(_plain(known[name])), SETTINGS[name]) for name in known),
    )


def _plain(value: Any) -> str:
    """As one writes it in the file."""
    return format_duration(value) if isinstance(value, timedelta) else str(value)


def format_duration(duration: timedelta) -> str:
    """As Go and Kubernetes write it: 1h30m, 90s, 250ms."""
    if duration < timedelta(seconds=1):
        return f"{duration / timedelta(milliseconds=1):g}ms"
    seconds = int(duration.total_seconds())
    if duration != timedelta(seconds=seconds) or seconds < 120 or seconds % 60:
        return f"{duration.total_seconds():g}s"
    hours, minutes = divmod(seconds // 60, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


# Metrics ----------------------------------------------------------------------------------------
Metric = tuple[str, str, tuple[str, ...], str]
"""Name, type, labels, meaning."""


def controller_metrics() -> list[Metric]:
    metrics = Metrics()
    VerificationMetrics(metrics.registry)
    objects = [
        (family.name, "gauge", family.labels, family.help)
        for family in (*METALNODE_FAMILIES, *FEDERATEDCLUSTER_FAMILIES)
    ]
    return sorted([*objects, *_registered(metrics.registry)])


def edge_metrics() -> list[Metric]:
    """Of the shared families an edge fills those of its requests."""
    metrics = Metrics()
    EdgeMetrics(metrics)
    return [m for m in _registered(metrics.registry) if m[0].startswith(("llmkube_edge_", "rest_"))]


def agent_metrics() -> list[Metric]:
    return _registered(AgentMetrics(SystemClock())._registry)


def _registered(registry: CollectorRegistry) -> list[Metric]:
    found = []
    for collector in registry._collector_to_names:
        if isinstance(collector, ProcessCollector):
            continue  # the process_* family of every Prometheus client; depends on the machine
        one: Any = collector
        suffix = "_total" if one._type == "counter" else ""
        found.append((one._name + suffix, one._type, one._labelnames, one._documentation))
    return sorted(found)


def metrics_table(found: Callable[[], list[Metric]]) -> Callable[[], Table]:
    def build() -> Table:
        return table(
            ("metric", "type", "labels", "meaning"),
            (
                (code(name), kind, ", ".join(map(code, labels)), _sentence(text))
                for name, kind, labels, text in found()
            ),
        )

    return build


def _sentence(text: str) -> str:
    return text.rstrip(".").replace("<", "&lt;") + "."


# Events and reasons -----------------------------------------------------------------------------
CONNECTED_REASONS = {
    ConnectedReason.HEARTBEAT_RECEIVED: ("True", "The agent renews its Lease."),
    ConnectedReason.LEASE_NOT_FOUND: ("False", "The Lease does not exist."),
    ConnectedReason.NEVER_CONNECTED: ("False", "The agent has never renewed the Lease."),
    ConnectedReason.HEARTBEAT_EXPIRED: ("False", "The last renewal is too long ago."),
    ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND: ("False", "The account was deleted: revoked."),
}
REACHABLE_REASONS = {
    ReachableReason.VERIFIED: ("True", "A verifier pod reached the Mac at status.hostIP."),
    ReachableReason.INVALID_SPEC: ("False", "spec.hostIP is not one plain IP address."),
    ReachableReason.NO_REPORT: ("False", "The Lease carries no report."),
    ReachableReason.INVALID_REPORT: ("False", "The report breaks its contract."),
    ReachableReason.NO_CANDIDATES: ("False", "There is no address to try."),
    ReachableReason.NO_ALLOWED_ADDRESS: ("False", "The address policy refuses every address."),
    ReachableReason.VERIFICATION_FAILED: ("False", "No address answered as this Mac."),
    ReachableReason.CERTIFICATE_MISMATCH: ("False", "The certificate names another MetalNode."),
    ReachableReason.VERIFICATION_PENDING: ("Unknown", "A check is due or under way."),
    ReachableReason.AGENT_DISCONNECTED: ("Unknown", "AgentConnected is not True."),
    ReachableReason.VERIFIER_FAILED: ("Unknown", "The verifier pod gave no answer."),
}
OWN_EVENTS = {
    "IngressKeyChanged": ("Warning", "MetalNode", "The agent reports another key than before. "
                          "The note has both pins."),
    "PhaseChanged": ("Normal or Warning", "FederatedCluster", "The phase changed; Warning if it "
                     "got worse."),
    "ClockSkew": ("Warning", "MetalNode, FederatedCluster", "The sender's clock is more than 60 s "
                  "off."),
}  # fmt: skip
"""Events whose reason is no condition's reason."""
CALM_REASONS = (
    ConnectedReason.HEARTBEAT_RECEIVED,
    ReachableReason.VERIFIED,
    ReachableReason.VERIFICATION_PENDING,
)


def reasons() -> Table:
    documented("reasons", ConnectedReason, CONNECTED_REASONS)
    documented("reasons", ReachableReason, REACHABLE_REASONS)
    rows = [
        (condition, reason, status, meaning)
        for condition, described in (
            (names.ConditionType.AGENT_CONNECTED, CONNECTED_REASONS),
            (names.ConditionType.REACHABLE, REACHABLE_REASONS),
        )
        for reason, (status, meaning) in described.items()
    ]
    return table(
        ("condition", "reason", "status", "meaning"),
        ((code(c), code(r), s, m) for c, r, s, m in rows),
    )


def events() -> Table:
    changes = [
        (reason, "Normal" if reason in CALM_REASONS else "Warning", "MetalNode",
         f"{condition} changed to this reason.")
        for condition, described in (
            (names.ConditionType.AGENT_CONNECTED, ConnectedReason),
            (names.ConditionType.REACHABLE, ReachableReason),
        )
        for reason in described
    ]  # fmt: skip
    own = [(reason, *rest) for reason, rest in OWN_EVENTS.items()]
    return table(
        ("reason", "type", "about", "when"),
        ((code(r), kind, about, when) for r, kind, about, when in [*own, *changes]),
    )


# Alerts, labels and annotations -----------------------------------------------------------------
def alerts() -> Table:
    document = yaml.safe_load((ROOT / "config/prometheus/rules.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    return table(
        ("alert", "severity", "after", "meaning"),
        (
            (
                code(rule["alert"]),
                rule["labels"]["severity"],
                rule["for"],
                _without_templates(rule["annotations"]["summary"]) + ".",
            )
            for rule in rules
        ),
    )


def _without_templates(text: str) -> str:
    """The summary with the names that Prometheus fills in as placeholders."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: match[1].upper(), text)


KEYS = {
    names.REPORT_ANNOTATION: ("annotation", "Lease", "agent", "The report."),
    names.VERIFY_ANNOTATION: ("annotation", "MetalNode", "`llmkube metal verify`",
                              "Asks for a check; the lastStartTime that was seen."),
    names.INPUT_HASH_ANNOTATION: ("annotation", "verifier pod", "controller",
                                  "Hash of what the pod checks."),
    names.ADDRESSES_ANNOTATION: ("annotation", "verifier pod", "controller",
                                 "The addresses it dials."),
    names.METALNODE_UID_LABEL: ("label", "verifier pod", "controller", "UID of its MetalNode."),
    names.COMPONENT_LABEL: ("label", "all objects of LLMKube", "all",
                            "`verifier` on verifier pods."),
    names.MANAGED_BY_LABEL: ("label", "objects made at run time", "controller, command line",
                             "`llmkube`."),
    credentials.SERVER_ANNOTATION: ("annotation", "MetalNode, FederatedCluster", "command line",
                                    "`--server` of the credential, for the next run."),
    credentials.TTL_ANNOTATION: ("annotation", "MetalNode, FederatedCluster", "command line",
                                 "`--ttl` of the credential, for the next run."),
    credentials.AUTHORITY_ANNOTATION: ("annotation", "MetalNode, FederatedCluster", "command line",
                                       "`--certificate-authority`, for the next run."),
}  # fmt: skip


def known_keys() -> set[str]:
    """Every label and annotation key that the code has a name for."""
    return {
        str(value)
        for module in (names, credentials)
        for name, value in vars(module).items()
        if name.endswith(("_ANNOTATION", "_LABEL"))
    }


def keys() -> Table:
    documented("labels and annotations", known_keys(), KEYS)
    return table(
        ("key", "kind", "on", "written by", "meaning"),
        ((code(key), *rest) for key, rest in KEYS.items()),
    )


def words(enum: Iterable[str]) -> str:
    return ", ".join(code(word) for word in enum)


def word_lists() -> Table:
    yield f"- Results of a candidate address: {words(CandidateResult)}."
    yield f"- Phases of a FederatedCluster: {words(Phase)}."
    yield f"- Field managers: {words(names.FieldManager)}."


# The file ---------------------------------------------------------------------------------------
SECTIONS: Mapping[str, Callable[[], Table]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "environment": environment,
    "settings": settings,
    "controller metrics": metrics_table(controller_metrics),
    "edge metrics": metrics_table(edge_metrics),
    "agent metrics": metrics_table(agent_metrics),
    "reasons": reasons,
    "events": events,
    "alerts": alerts,
    "keys": keys,
    "words": word_lists,
}
_MARK = re.compile(
    r"(<!-- begin generated: ([a-z ]+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL
)


def rendered(text: str) -> str:
    """The text with every generated section written anew. Raises Undocumented."""
    present = [match[2] for match in _MARK.finditer(text)]
    documented("sections of docs/operations.md", SECTIONS, present)

    def section(match: re.Match[str]) -> str:
        body = "\n".join(SECTIONS[match[2]]()).strip()
        return f"{match[1]}\n{body}\n\n{match[4]}"

    return _MARK.sub(section, text)


def main(path: Path) -> None:
    path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
