"""Alerts and dashboard: tested by promtool, and speaking of metrics that really exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmkube.edge.metrics import EdgeMetrics
from llmkube.metrics import Metrics
from llmkube.reconcilers.collectors import FEDERATEDCLUSTER_FAMILIES, METALNODE_FAMILIES
from llmkube.reconcilers.verification_metrics import VerificationMetrics
from llmkube.rules.check_progress import CheckResult

CONFIG = Path(__file__).resolve().parent.parent / "config"
RULES = CONFIG / "prometheus" / "rules.yaml"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)


def run_promtool(*args: str) -> str:
    result = subprocess.run(["promtool", *args], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@promtool
def test_the_rules_are_well_formed() -> None:
    assert "SUCCESS" in run_promtool("check", "rules", str(RULES))


@promtool
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", str(CONFIG / "prometheus/rules_test.yaml"))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_alert_has_a_test() -> None:
    tests = yaml.safe_load((CONFIG / "prometheus/rules_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in alerts()}


def test_each_alert_says_what_it_is_and_how_bad() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+m", alert["for"])


# Metrics that exist -----------------------------------------------------------------------------
def existing_metrics() -> set[str]:
    """Every series name that the controller or the edge can expose."""
    metrics = Metrics()
    VerificationMetrics(metrics.registry)
    EdgeMetrics(metrics)
    names = {family.name for family in (*METALNODE_FAMILIES, *FEDERATEDCLUSTER_FAMILIES)}
    for metric in metrics.registry.collect():
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(metric.type, ("",))
        names |= {metric.name + suffix for suffix in suffixes}
    return names


PREFIX = re.compile(
    r"\b(?:llmkube|workqueue|controller_runtime|rest_client|leader_election)_[a-z0-9_]+"
)


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads((CONFIG / "grafana/llmkube.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def used_metrics(expression: str) -> set[str]:
    return set(PREFIX.findall(expression))


def test_the_dashboard_shows_metrics_that_exist() -> None:
    expressions = list(dashboard_expressions())
    assert len(expressions) > 20
    for expression in expressions:
        assert used_metrics(expression), expression
        assert used_metrics(expression) <= existing_metrics(), expression


def test_the_alerts_watch_metrics_that_exist() -> None:
    for alert in alerts():
        words = used_metrics(alert["expr"]) | used_metrics(alert["annotations"]["description"])
        assert words, alert["alert"]
        assert words <= existing_metrics(), alert["alert"]


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = set().union(*map(used_metrics, dashboard_expressions()))
    ours = {
        name
        for name in existing_metrics()
        if name.startswith("llmkube_") and not name.startswith("llmkube_edge_")
    }
    assert ours <= shown


def test_labels_that_alerts_select_by_are_those_in_the_code() -> None:
    text = RULES.read_text()
    assert f'result="{CheckResult.NO_ANSWER}"' in text
    families = {f.name: set(f.labels) for f in (*METALNODE_FAMILIES, *FEDERATEDCLUSTER_FAMILIES)}
    for alert in alerts():
        for name, matchers in re.findall(r"(llmkube_\w+)\{([^}]*)\}", alert["expr"]):
            if name in families:
                assert set(re.findall(r"(\w+)=", matchers)) <= families[name], alert["alert"]


@promtool
def test_the_dashboard_is_well_formed(tmp_path: Path) -> None:
    """promtool reads each expression, as a recording rule."""
    rules = [
        {"record": f"dashboard:{number}", "expr": expression}
        for number, expression in enumerate(dashboard_expressions())
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_promtool("check", "rules", str(path))
    dashboard = json.loads((CONFIG / "grafana/llmkube.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
