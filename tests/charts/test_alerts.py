"""Alerts and dashboards: every metric that they ask for is one that is told, and the runbook has a row for each alert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.helm import dashboards
from e2e.helm.chart import CHART, ROOT, objects, render
from tests.fleet_planner.test_reasons import CONDITIONS

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
RUNBOOK = (ROOT / "operator/RUNBOOK.md").read_text()
NOT_ALERTED = {"fleet_operator_cost_per_hour", "fleet_router_authentication", "fleet_agent_seed_info"}
"""Rows whose limit only the user knows, or that nobody is woken for."""
OF_THE_PROCESS = {"fleet_operator_process_cpu_seconds_total", "fleet_operator_process_resident_memory_bytes"}
"""What prometheus_client tells of every process."""
NAME = re.compile(r"\b(?:fleet_(?:router|operator|agent)_[a-z_]+|(?:fleet|vllm):[a-z_]+)")


def rows(heading: str) -> set[str]:
    """The names in the first column of the table below it."""
    table = RUNBOOK.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`{]+)[^|]*` \|", table, re.MULTILINE))


def told() -> set[str]:
    """Every metric of the runbook and of the engines."""
    engine = (ROOT / "worker/fleet_worker/engine/metrics.py").read_text()
    of_engines = set(re.findall(r'"((?:vllm|fleet):[a-z_]+)"', engine))
    of_ours = rows("Metrics to alert on") | rows("Metrics that explain") | OF_THE_PROCESS
    return of_ours | of_engines | {f"{name}_total" for name in of_engines}


def asked(query: str) -> set[str]:
    """Metrics of a query, without what a histogram adds."""
    known = told()
    return {name if name in known else re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(query)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_is_told_and_says_what_to_do(alert: dict[str, Any]):
    assert asked(alert["expr"])
    assert asked(alert["expr"]) <= told()
    assert alert["annotations"]["metric"] in asked(alert["expr"])
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() >= {"summary", "description", "metric"}


def test_names_are_given_once():
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names))
    assert all(name.startswith("InferenceFleet") for name in names)


def test_every_row_of_the_runbook_has_an_alert_and_no_other_metric_has():
    assert {alert["annotations"]["metric"] for alert in ALERTS} == rows("Metrics to alert on") - NOT_ALERTED


def test_conditions_and_reasons_of_alerts_are_those_of_the_runbook():
    """A condition or a reason with another spelling would never fire."""
    text = " ".join(alert["expr"] for alert in ALERTS)
    conditions = set(re.findall(r'condition="(\w+)"', text))
    reasons = {word for found in re.findall(r'reason=~?"([\w|]+)"', text) for word in found.split("|")}
    source = "".join(path.read_text() for path in Path(ROOT / "operator/fleet_planner").glob("*.py"))
    assert conditions <= set(re.findall(r'"([A-Z]\w+)"', source))
    assert reasons <= set(re.findall(r"`([A-Z]\w+)`", RUNBOOK))


@pytest.mark.parametrize("reason", ["signature", "clock"])
def test_why_routers_do_not_hear_each_other_is_told(reason: str):
    """Where a node's clock was wrong the alert said that there are strangers, or two keys."""
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "InferenceFleetGossipRefused"]
    (row,) = [line for line in RUNBOOK.splitlines() if line.startswith("| `fleet_router_gossip_refused_total`")]
    assert "{{ $labels.reason }}" in alert["annotations"]["summary"]
    assert f"{reason}: " in alert["annotations"]["description"]
    assert f"`{reason}`" in row


OF_FLEETS = re.compile(r"fleet_operator_fleet_(?:condition|slo_seconds|workers)")
ENDS_AT_ONCE = {"KeptDeleted", "KvReadLate", "RolledBack"}
"""Warnings of half an hour, or that begin again within a minute."""


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_what_is_told_of_fleets_may_be_told_by_another_process(alert: dict[str, Any]):
    """Nobody tells of them between two leaders (e2e/test_alerts.py)."""
    lasting = OF_FLEETS.search(alert["expr"]) and alert["alert"].removeprefix("InferenceFleet") not in ENDS_AT_ONCE
    assert not lasting or alert.get("keep_firing_for") == "5m"


SELECTOR = re.compile(r"fleet_operator_fleet_condition\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def selects(selector: str, labels: dict[str, str]) -> bool:
    """As Prometheus compares a series with what stands inside the braces."""

    def one(name: str, how: str, text: str) -> bool:
        same = re.fullmatch(text, labels[name]) is not None if "~" in how else labels[name] == text
        return same != how.startswith("!")

    return all(one(*found) for found in MATCHER.findall(selector))


def series(reason: str) -> list[dict[str, str]]:
    """Of the conditions with this reason: Ready has those of Available."""
    kind, status, *_ = CONDITIONS[reason]
    kinds = ("Available", "Ready") if kind == "Available" else (kind,)
    return [{"condition": each, "status": status, "reason": reason} for each in kinds]


@pytest.mark.parametrize("selector", sorted({found for alert in ALERTS for found in SELECTOR.findall(alert["expr"])}))
def test_an_alert_asks_for_a_condition_with_a_status_and_a_reason_that_the_planner_gives(selector: str):
    """b42: TelemetryFresh is Unknown when it is not True, and the alert waited for False."""
    assert any(selects(selector, labels) for reason in CONDITIONS for labels in series(reason))


SAID: dict[str, tuple[str, ...]] = {
    # reason: alerts
    "Deleting": (),  # as it should be, for as long as spec.deletion.wait
    "DeletionLate": (),  # it is gone in a moment
    "DevicesSuspected": ("DevicesSuspected",),
    "FabricSuspected": ("KvPathsFail",),
    "HealingBudgetSpent": ("KvPathsFail",),
    "HeldByFinalizer": ("KeptDeleted",),
    "KvFailing": ("KvNotMoving",),
    "KvNotMoving": ("KvNotMoving",),
    "KvReadLate": ("KvReadLate",),
    "NoData": ("TelemetryStale",),
    "NotAccepted": (),  # it may serve: Refused, of Accepted, and NotReady where Available says so
    "NotProvisioned": (),  # it may serve: NotProvisioned, of Provisioned
    "NoRouter": ("NotReady",),
    "PairFailing": ("KvPathsFail",),
    "RoutersFailing": ("RoutersFailing",),
    "SourceFailed": ("TelemetryStale",),
    "Waking": (),  # for as long as it may take: then it is late
    "WorkerPoisoned": ("KvPathsFail",),
    "WorkersFailing": ("NotReady",),
    "WorkersLate": ("NotReady",),
    "WorkersLost": ("NotReady",),
    "WorkersPending": ("NotReady",),
    "WorkersStarting": (),  # as of Waking
}


@pytest.mark.parametrize("reason", sorted(SAID))
def test_who_speaks_of_a_condition_with_this_reason(reason: str):
    """b42: of one pair, or of KV that was read late, it was said that no KV moved and every prompt was computed twice; and who
    deleted a fleet woke somebody because it did not serve; so did who made one, where the model
    takes more than ten minutes. Of a fleet that served, and that a quota let not grow, it was said that it did not serve."""
    speaking = [(alert["alert"], SELECTOR.findall(re.split(r"\bunless\b", alert["expr"])[0])) for alert in ALERTS]
    asking = [(name, selectors[0]) for name, selectors in speaking if selectors]
    found = [name for name, selector in asking if any(selects(selector, labels) for labels in series(reason))]
    assert found == [f"InferenceFleet{name}" for name in SAID[reason]]


@pytest.mark.parametrize("query", dashboards.queries())
def test_a_dashboard_asks_for_what_is_told(query: str):
    assert asked(query)
    assert asked(query) <= told()


OF_LEADERS = re.compile(r"(\w+)\s*(?:by \([^)]*\) )?\(fleet_operator_(?:cost_per_hour|ownerless_pods|fleets)\b")


@pytest.mark.parametrize("query", [*dashboards.queries(), *(alert["expr"] for alert in ALERTS)])
def test_what_each_installation_counts_of_its_own_is_added_up(query: str):
    """b42: of two installations the dearer one's cost stood for all. One process of each tells it, the one that leads."""
    assert set(OF_LEADERS.findall(query)) <= {"sum"}


def test_dashboards_are_what_grafana_imports():
    for name, text in dashboards.generated().items():
        made = json.loads(text)
        identifiers = [panel["id"] for panel in made["panels"]]
        assert len(identifiers) == len(set(identifiers)), name
        cells = [
            (x, y) for panel in made["panels"] for at in [panel["gridPos"]]
            for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        ]  # fmt: skip
        assert len(cells) == len(set(cells)), f"{name}: panels lie on each other"
        variables = {one["name"] for one in made["templating"]["list"]} | {"__rate_interval"}
        assert set(re.findall(r"\$\{?(\w+)", text)) <= variables, name


def test_the_chart_takes_them_as_they_are():
    """Helm's own braces must not eat those of the alerts."""
    runbook = "https://wiki/runbook"
    on = {"prometheusRule": {"enabled": True, "runbookUrl": runbook}, "dashboards": {"enabled": True}}
    made = objects(render({"metrics": on}))
    (rule,) = [found for found in made if found["kind"] == "PrometheusRule"]
    rendered = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    assert rendered == [{**one, "annotations": {**one["annotations"], "runbook_url": runbook}} for one in ALERTS]
    maps = {name: text for found in made if found["kind"] == "ConfigMap" for name, text in found["data"].items()}
    assert maps == dashboards.generated()
