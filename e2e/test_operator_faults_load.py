"""O16: load that is missing, stale, impossible or from another time holds the sizes and is told. Stage one: Prometheus was asked
and answered so. Stage two: nobody leaves though the scale-down window is long over; with a good low load, somebody does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from e2e.faultproxy.fixtures import FAMILY, Played
from e2e.faultproxy.lab import Lab, fleet_manifest
from e2e.faultproxy.prometheus import Prometheus, Series, prometheus

pytestmark = FAMILY
HIGH, LOW = 60.0, 1.0
HOUR_S = 3_600.0
WINDOW_S = 3
HELD_S = 8.0


def valued(text: str) -> Callable[[Series], Series]:
    """Every gauge says this."""

    def spoil(series: Series) -> Series:
        return [{**one, "values": [[at, text] for at, _ in one["values"]]} for one in series]

    return spoil


def moved(by_s: float) -> Callable[[Series], Series]:
    """Every sample is from another time."""

    def spoil(series: Series) -> Series:
        return [{**one, "values": [[at + by_s, value] for at, value in one["values"]]} for one in series]

    return spoil


def hang(series: Series) -> Any:
    time.sleep(20)
    return series


@dataclass(frozen=True)
class Row:
    name: str
    spoil: Callable[[Series], Any]
    status: int = 200


BAD = {
    row.name: row
    for row in (
        Row("missing", lambda series: []),
        Row("a-worker-missing", lambda series: [one for one in series if "-decode-" not in one["metric"]["pod"]
                                                and "router" not in one["metric"]["pod"]]),
        Row("NaN", valued("NaN")),
        Row("inf", valued("+Inf")),
        Row("negative", valued("-1")),
        Row("an-hour-old", moved(-HOUR_S)),
        Row("an-hour-ahead", moved(HOUR_S)),
        Row("error-500", lambda series: "no", status=500),
        Row("garbage", lambda series: "<html>"),
        Row("hangs", hang),
    )
}  # fmt: skip


def start(lab: Lab, source: Prometheus) -> None:
    """Load has made four decode workers."""
    lab.start()
    lab.apply(
        fleet_manifest(
            lab.namespace,
            telemetry={"interval": "1s", "prometheus": {"url": source.url}},
            scaling={"scaleDownWindow": f"{WINDOW_S}s", "targetInflight": {"prefill": 4, "decode": 16}},
        )
    )
    lab.until("load is followed", lambda: lab.serving(1, 4) and fresh(lab) == "True", 60)


def fresh(lab: Lab) -> str:
    return str(lab.condition("TelemetryFresh")["status"])


def shrinks(lab: Lab, source: Prometheus) -> None:
    source.spoil, source.status, source.decode = lambda series: series, 200, LOW
    lab.until("with a known low load somebody leaves", lambda: len(lab.pods("decode")) < 4 and fresh(lab) == "True", 60)


def held(lab: Lab, row: Row) -> None:
    with prometheus(lab, HIGH) as source:
        start(lab, source)
        pods, asked = lab.uids(), source.asked
        source.decode, source.spoil, source.status = LOW, row.spoil, row.status
        # a late answer alone may tell it, too: a busy machine's
        lab.until("it is told", lambda: source.asked > asked and fresh(lab) == "Unknown", 40)
        assert lab.condition("TelemetryFresh")["reason"] in ("NoData", "SourceFailed")
        time.sleep(HELD_S)
        assert lab.uids() == pods, "sizes changed though the load was not known"
        assert lab.serving(1, 4)
        shrinks(lab, source)


def reset(lab: Lab) -> None:
    """Counters that begin anew are no news about load."""
    with prometheus(lab, HIGH) as source:
        start(lab, source)
        pods = lab.uids()
        source.spoil = lambda series: [
            {**one, "values": [[at, "0" if "count" in one["metric"]["__name__"] else value] for at, value in one["values"]]}
            for one in series
        ]
        time.sleep(HELD_S)
        assert (lab.uids(), fresh(lab)) == (pods, "True")
        shrinks(lab, source)


PLAYS = {**{name: partial(held, row=row) for name, row in BAD.items()}, "counter-reset": reset}


@pytest.mark.parametrize("row", list(PLAYS))
def test_load_that_cannot_be_believed_moves_nobody(played: Played, row: str):
    played[row].result()
