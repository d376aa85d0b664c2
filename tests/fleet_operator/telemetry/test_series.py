"""What Prometheus answers becomes the readings that a scrape would have given."""

from __future__ import annotations

import pytest

from fleet_operator.telemetry.aggregate import METRICS
from fleet_operator.telemetry.series import by_pod, label_name, query, quoted


def series(name: str, pod: str | None, *values: tuple[float, str], **labels: str) -> dict[str, object]:
    metric = {"__name__": name, **({"pod": pod} if pod else {}), **labels}
    return {"metric": metric, "values": [list(value) for value in values]}


def test_the_query_names_every_metric_and_one_fleet():
    asked = query("ml", "llama")
    assert asked.endswith(',namespace="ml",inferencefleet_io_fleet="llama"}[60s]')
    assert all(name in asked for name in METRICS)


@pytest.mark.parametrize(("raw", "promql"), [("a", '"a"'), ('a"b', '"a\\"b"'), ("a\\", '"a\\\\"'), ("a\nb", '"a\\nb"')])
def test_nothing_escapes_from_a_label_value(raw: str, promql: str):
    assert quoted(raw) == promql


def test_label_names_are_those_of_service_discovery():
    assert label_name("inferencefleet.io/fleet") == "inferencefleet_io_fleet"


def test_first_and_last_scrape_of_a_pod_with_their_own_times():
    found = by_pod([series("a", "p", (10, "1"), (20, "2"), (30, "3")), series("b", "p", (10, "4"), (30, "5"), role="x")])["p"]
    assert (found.first.read_at, {s.name: s.value for s in found.first.samples}) == (10, {"a": 1, "b": 4})
    assert (found.last.read_at, {s.name: s.value for s in found.last.samples}) == (30, {"a": 3, "b": 5})
    assert found.last.samples[1].labels["role"] == "x"


def test_a_series_that_ended_is_not_in_the_last_reading():
    found = by_pod([series("a", "p", (10, "1")), series("b", "p", (10, "2"), (20, "3"))])["p"]
    assert [s.name for s in found.last.samples] == ["b"]


def test_nan_and_series_without_a_pod_are_left_out():
    assert by_pod([series("a", None, (10, "1")), series("a", "p", (10, "NaN"))]) == {}


@pytest.mark.parametrize("answer", [[{"metric": {}}], [{"metric": {"pod": "p", "__name__": "a"}, "values": [[1]]}], [3]])
def test_an_answer_that_is_no_matrix_is_an_error(answer: list[object]):
    with pytest.raises((ValueError, KeyError, TypeError)):
        by_pod(answer)  # type: ignore[arg-type]
