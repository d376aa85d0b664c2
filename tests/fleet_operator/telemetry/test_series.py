"""What Prometheus answers becomes the readings that a scrape would have given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fleet_operator.names import FLEET, MANAGED_BY
from fleet_operator.render.port import ADMIN_PORT
from fleet_operator.telemetry.aggregate import METRICS
from fleet_operator.telemetry.parse import total
from fleet_operator.telemetry.series import by_pod, label_name, of_pod, query, quoted


def series(name: str, pod: str | None, *values: tuple[float, str], **labels: str) -> dict[str, object]:
    metric = {"__name__": name, **({"pod": pod} if pod else {}), **labels}
    return {"metric": metric, "values": [list(value) for value in values]}


def test_the_query_names_every_metric_and_one_fleet():
    asked = query("ml", "llama", 5.0)
    assert asked.endswith(',namespace="ml",inferencefleet_io_fleet="llama"}[60s]')
    assert all(name in asked for name in METRICS)


@pytest.mark.parametrize(("interval_s", "window"), [(1.0, "[60s]"), (15.0, "[60s]"), (15.1, "[61s]"), (60.0, "[240s]")])
def test_the_window_holds_several_scrapes(interval_s: float, window: str):
    assert query("ml", "llama", interval_s).endswith(window)


@pytest.mark.parametrize(("raw", "promql"), [("a", '"a"'), ('a"b', '"a\\"b"'), ("a\\", '"a\\\\"'), ("a\nb", '"a\\nb"')])
def test_nothing_escapes_from_a_label_value(raw: str, promql: str):
    assert quoted(raw) == promql


def test_label_names_are_those_of_service_discovery():
    assert label_name("inferencefleet.io/fleet") == "inferencefleet_io_fleet"


def test_first_and_last_scrape_of_a_pod_with_their_own_times():
    found = by_pod([series("a", "p", (10, "1"), (20, "2"), (30, "3")), series("b", "p", (10, "4"), (30, "5"), role="x")])["p"][0]
    assert (found.first.read_at, {s.name: s.value for s in found.first.samples}) == (10, {"a": 1, "b": 4})
    assert (found.last.read_at, {s.name: s.value for s in found.last.samples}) == (30, {"a": 3, "b": 5})
    assert found.last.samples[1].labels["role"] == "x"


def last(*rows: dict[str, object]) -> tuple[float, dict[str, float]]:
    """(when, value by metric) of the one target's last reading."""
    (target,) = by_pod(rows)["p"]
    assert len({sample.name for sample in target.last.samples}) == len(target.last.samples)
    return target.last.read_at, {sample.name: sample.value for sample in target.last.samples}


def test_a_series_that_ended_is_not_in_the_last_reading():
    assert last(series("a", "p", (10, "1")), series("b", "p", (10, "2"), (20, "3"), (30, "4"))) == (30, {"b": 4})


def test_a_scrape_of_which_a_part_has_come_is_not_the_whole():
    """Remote write sends a scrape in pieces, up to five seconds apart: what Mimir, Thanos Receive and VictoriaMetrics had not got
    yet was 0, of a router that all its requests had ended, of an engine that its KV counters began anew."""
    assert last(series("a", "p", (10, "1"), (20, "2")), series("b", "p", (10, "3"), (20, "4"), (30, "5"))) == (
        20,
        {"a": 2, "b": 5},
    )


def test_series_of_one_target_that_come_from_two_replicas_are_one_reading():
    """Thanos takes each series from the replica that had it first: one that is new was all that the last reading had."""
    old = [(float(at), str(at)) for at in range(10, 60, 10)]
    assert last(series("old", "p", *old), series("new", "p", (43, "1"), (53, "2"))) == (50, {"old": 50, "new": 2})


def test_the_same_series_of_two_replicas_counts_once():
    rows = [series("a", "p", *((at + late, f"{at}") for at in (10, 20)), prometheus=name) for late, name in ((0, "0"), (3, "1"))]
    assert last(*rows) == (23, {"a": 20})
    ranks = [series("a", "p", (10, "1"), (20, "2"), engine=rank) for rank in "01"]
    (target,) = by_pod(ranks)["p"]
    assert [sample.value for sample in target.last.samples] == [2, 2]


def test_a_label_of_the_pod_that_has_the_name_of_one_of_ours_takes_nothing_from_it():
    """Prometheus' own example makes labels of all of a pod's (labelmap), and podTemplate may have a `tier`: ours is exported_tier
    then. Routers were taken to have sent nothing to any tier, and no canary was ever judged."""
    told = {"exported_tier": "t", "tier": "gpu", "exported_pod": "q", "role": "decode", "inferencefleet_io_role": "router"}
    (target,) = by_pod([series("fleet_router_inflight", "p", (10, "4"), **told)])["p"]
    assert total(target.last.samples, "fleet_router_inflight", role="decode", tier="t") == 4
    both = [series("fleet_router_inflight", "p", (10, "4"), **told | {"exported_tier": tier}) for tier in "tu"]
    assert [sample.labels["tier"] for sample in by_pod(both)["p"][0].last.samples] == ["t", "u"]


def test_nan_and_series_without_a_pod_are_left_out():
    assert by_pod([series("a", None, (10, "1")), series("a", "p", (10, "NaN"))]) == {}


@pytest.mark.parametrize(
    "answer", [[{"metric": {}}], [{"metric": {"pod": "p", "__name__": "a"}, "values": [[1]]}], [3], [{"metric": 3}]]
)
def test_an_answer_that_is_no_matrix_is_an_error(answer: list[object]):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        by_pod(answer)  # type: ignore[arg-type]


AGENT, ENGINE = {"job": "j", "instance": "p:8081"}, {"job": "j", "instance": "p:8000"}


def chosen(*rows: dict[str, object], created_at: float = 0.0) -> tuple[float, float] | None:
    """(sum of the samples, their time) of the target that speaks for the pod."""
    target = of_pod(by_pod(rows).get("p", ()), created_at)
    return None if target is None else (sum(sample.value for sample in target.last.samples), target.last.read_at)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([series("a", "p", (10, "1"), **AGENT), series("a", "p", (10, "1"), **ENGINE)], (1, 10)),
        (
            [series("a", "p", (10, "1"), **AGENT), series("b", "p", (10, "2"), **AGENT), series("a", "p", (11, "9"), **ENGINE)],
            (3, 10),
        ),
        ([series("a", "p", (10, "1"), **AGENT), series("a", "p", (20, "2"), **ENGINE)], (2, 20)),
        ([series("a", "q", (10, "1"), **AGENT)], None),
    ],
    ids=["never-counted-twice", "the-agent-shows-more", "else-the-newest", "another-pod"],
)
def test_one_target_speaks_for_a_pod(rows: list[dict[str, object]], expected: tuple[float, float] | None):
    assert chosen(*rows) == expected


def test_what_an_earlier_pod_of_that_name_measured_does_not_count():
    old = [series("a", "p", (10, "1"), job="j", instance="old"), series("b", "p", (10, "1"), job="j", instance="old")]
    assert chosen(*old, created_at=15.0) is None
    assert chosen(*old, series("a", "p", (20, "4"), job="j", instance="new"), created_at=15.0) == (4, 20)


def test_the_documented_configuration_is_the_tested_one():
    root = Path(__file__).parents[3]
    text = (root / "operator/README.md").read_text()
    (block,) = [part for part in text.split("```yaml\n")[1:] if part.startswith("scrape_configs:")]
    documented = yaml.safe_load(block.split("```")[0])
    tested = yaml.safe_load((root / "e2e/prometheus/scrape.yaml").read_text())
    for config in (documented, tested):
        del config["scrape_configs"][0]["scrape_interval"]
    assert documented == tested
    (ports,) = [
        rule["regex"] for rule in tested["scrape_configs"][0]["relabel_configs"] if len(rule.get("source_labels", ())) == 2
    ]
    # clients of a fleet with tenants or TLS are not told metrics: there routers tell them at the admin port alone
    for told in ("worker;agent", "router;http", f"router;{ADMIN_PORT}"):
        assert re.fullmatch(ports, told), told
    assert f"__meta_kubernetes_pod_label_{label_name(MANAGED_BY)}" in text
    assert label_name(FLEET).startswith("inferencefleet_io_")
