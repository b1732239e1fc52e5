"""The documentation says what the code says: nothing is missing in it, nothing superfluous."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack import reference
from llmkube.api.candidates import CandidateResult, CandidateSource
from llmkube.api.names import ConnectedReason, Phase, ReachableReason
from llmkube.api.report import parse_report, render_report
from llmkube.cli.errors import ExitCode
from llmkube.cli.main import load
from llmkube.controller.tuning import parse_tuning
from llmkube.edge import metrics as edge_metrics
from llmkube.reconcilers import federatedcluster, heartbeat, verification
from llmkube.reconcilers.status import Ownership
from tests.support.markdown import PAGES, ROOT, blocks, page, relative, section, spans, table
from tests.support.reports import report_text

README = page("README.md")
METALNODE = page("docs/metalnode.md")
FEDERATION = page("docs/federation.md")
OPERATIONS = page("docs/operations.md")
ARCHITECTURE = page("docs/ARCHITECTURE.md")


# Generated --------------------------------------------------------------------------------------
def test_the_reference_tables_are_what_make_generate_writes() -> None:
    assert reference.rendered(OPERATIONS) == OPERATIONS, "run `make generate` and commit"


def test_generating_twice_changes_nothing() -> None:
    assert reference.rendered(reference.rendered(OPERATIONS)) == reference.rendered(OPERATIONS)


@pytest.mark.parametrize("name", ["SETTINGS", "CONNECTED_REASONS", "KEYS"])
def test_what_nobody_describes_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described: dict[Any, Any] = getattr(reference, name)
    first = next(iter(described))
    for changed in (
        {key: value for key, value in described.items() if key != first},
        {**described, "surplus": described[first]},
    ):
        monkeypatch.setattr(reference, name, changed)
        with pytest.raises(reference.Undocumented, match=r"surplus|" + re.escape(str(first))):
            reference.rendered(OPERATIONS)


def test_a_lost_mark_is_an_error() -> None:
    with pytest.raises(reference.Undocumented):
        reference.rendered(OPERATIONS.replace("<!-- begin generated: events -->", ""))


# Reasons, Events, words -------------------------------------------------------------------------
def words(text: str, column: str) -> list[str]:
    return [row[column] for row in table(text, column)]


def test_every_reason_of_agentconnected_is_explained() -> None:
    rows = table(section(METALNODE, "AgentConnected"), "reason")
    assert sorted(row["reason"] for row in rows) == sorted(ConnectedReason)
    for row in rows:
        assert row["status"] == reference.CONNECTED_REASONS[ConnectedReason(row["reason"])][0]
        assert row["what to do"]


def test_every_reason_of_reachable_is_explained() -> None:
    rows = table(section(METALNODE, "Reachable"), "reason")
    assert sorted(row["reason"] for row in rows) == sorted(ReachableReason)
    for row in rows:
        assert row["status"] == reference.REACHABLE_REASONS[ReachableReason(row["reason"])][0]
        assert row["what to do"]


def test_every_result_and_source_of_a_candidate_is_explained() -> None:
    text = section(METALNODE, "Candidate addresses")
    assert sorted(words(text, "result")) == sorted(CandidateResult)
    assert words(text, "source") == list(CandidateSource), "in order of preference"


def test_every_phase_and_every_result_of_a_push_is_explained() -> None:
    assert words(section(FEDERATION, "Phases"), "phase") == list(Phase)
    results = {edge_metrics.SUCCESS, edge_metrics.OTHER, *edge_metrics._RESULTS.values()}
    assert set(words(section(FEDERATION, "When a push fails"), "result")) == results


def event_reasons() -> set[str]:
    """Reasons that the code spells out where it makes an Event."""
    found = set()
    for path in (ROOT / "llmkube").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EventNote":
                reason = node.args[1]
                if isinstance(reason, ast.Constant):
                    found.add(str(reason.value))
                else:  # the reason of a condition
                    assert path.stem in ("heartbeat", "verification"), path
    return found


def test_every_event_reason_is_listed() -> None:
    assert event_reasons() == set(reference.OWN_EVENTS)
    listed = words(section(OPERATIONS, "Events"), "reason")
    assert sorted(listed) == sorted([*event_reasons(), *ConnectedReason, *ReachableReason])


def test_exit_codes_are_listed() -> None:
    listed = [int(row["code"]) for row in table(section(OPERATIONS, "Exit codes"), "code")]
    assert listed == list(ExitCode)
    told = re.findall(r"command ends with (\d+)", README)
    assert {int(code) for code in told} <= set(ExitCode)
    assert [int(row["exit code"]) for row in table(page("docs/cli.md"), "exit code")] == listed


def known_words() -> set[str]:
    alerts = yaml.safe_load((ROOT / "config/prometheus/rules.yaml").read_text(encoding="utf-8"))
    return {
        *(rule["alert"] for group in alerts["groups"] for rule in group["rules"]),
        *ConnectedReason,
        *ReachableReason,
        *CandidateResult,
        *Phase,
        *reference.OWN_EVENTS,
    }


def test_troubleshooting_speaks_of_reasons_that_exist() -> None:
    symptoms = " ".join(
        row["symptom"] for row in table(section(README, "Troubleshooting"), "symptom")
    )
    for word in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", symptoms):
        assert word in known_words() | {"MetalNode"}, word
    for reason in ConnectedReason:
        assert reason in symptoms or reason is ConnectedReason.HEARTBEAT_RECEIVED


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_metrics_and_alerts_that_are_named_exist(path: Path) -> None:
    known = {
        name
        for found in (
            reference.controller_metrics(),
            reference.edge_metrics(),
            reference.agent_metrics(),
        )
        for name, *_ in found
    }
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"\bllmkube_[a-z_]*[a-z]\b(?!_\*|\w|\.|/)", text):
        assert name in known or any(one.startswith(name) for one in known), name
    for name in re.findall(r"\bLLMKube[A-Z]\w+", text):
        assert name in known_words(), name


# The report -------------------------------------------------------------------------------------
def test_the_example_report_has_the_fields_of_a_report() -> None:
    (example,) = blocks(section(METALNODE, "The report"), "json")
    shown, real = json.loads(example), json.loads(render_report(parse_report(report_text())))
    assert list(shown) == list(real)
    assert list(shown["capacity"]) == list(real["capacity"])
    assert shown["candidates"][0].keys() == real["candidates"][0].keys()
    assert words(section(METALNODE, "The report"), "field") == list(shown)


# Ownership and layers ---------------------------------------------------------------------------
OWNERSHIPS = (heartbeat.OWNERSHIP, verification.OWNERSHIP, federatedcluster.OWNERSHIP)


@pytest.mark.parametrize("owner", OWNERSHIPS, ids=lambda one: str(one.manager))
def test_the_architecture_names_who_owns_which_field(owner: Ownership) -> None:
    rows = table(section(ARCHITECTURE, "Who owns which field"), "field manager")
    (row,) = [row for row in rows if row["field manager"] == owner.manager]
    assert row["object"] == owner.resource.kind
    named = set(spans(row["fields"])) or {row["fields"]}
    assert named == {*owner.fields, *owner.conditions}


def test_the_architecture_names_the_layers_that_are_enforced() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'type = "layers"\nlayers = \[(.*?)\]', text, re.DOTALL)
    assert match is not None
    enforced = [re.findall(r"llmkube\.(\w+)", line) for line in match[1].strip().splitlines()]
    listed = [re.findall(r"\w+", row["layer"]) for row in table(ARCHITECTURE, "layer")]
    assert [sorted(layer) for layer in listed] == [sorted(layer) for layer in enforced]


# Settings ---------------------------------------------------------------------------------------
def test_the_example_of_settings_is_accepted() -> None:
    (example,) = blocks(section(OPERATIONS, "Settings"), "yaml")
    assert parse_tuning(yaml.safe_load(example), "the example")


def test_flags_of_the_agent_are_the_ones_on_its_page() -> None:
    listed = {row["flag"].strip("`").split(" ")[0] for row in table(page("docs/agent.md"), "flag")}
    real = {max(option.opts, key=len) for option in reference.options_of(load("agent"))}
    assert listed == real


def test_keys_of_configmaps_that_are_named_exist() -> None:
    manifests = [
        document
        for path in sorted((ROOT / "config/admission").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    data = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}
    for text in (README, OPERATIONS):
        named = re.findall(r"ConfigMap `([\w-]+)`,? \(?keys? `(\w+)`(?:(?:,| and) `(\w+)`)?", text)
        assert named
        for name, *keys in named:
            assert {key for key in keys if key} <= set(data[name]), name
