"""The chart's alerts and dashboards against a real Prometheus: each alert fires for what it is there for and is silent otherwise,
and every query of the dashboards is answered over a real fleet."""

from __future__ import annotations

import json
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from e2e.fleet import Fleet, manifest
from e2e.helm import dashboards
from e2e.helm.chart import CHART
from e2e.test_prometheus import FOLDER, PROMPT, URL, prometheus, targets
from fleet_cli.up.bundled import tiny_model

RULES = CHART / "files/alerts.yaml"
ALERTS = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
OF = 'namespace="ml", inferencefleet_io_fleet="f", pod="p"'
AFTER_S = 2_700


def condition(kind: str, status: str, reason: str = "R") -> str:
    wanted = f'namespace="ml", fleet="f", condition="{kind}", status="{status}", reason="{reason}"'
    return f"fleet_operator_fleet_condition{{{wanted}}}"


def buckets(name: str, slow: bool) -> list[tuple[str, str]]:
    """A thousand latencies a minute, below 1 s, and five of a tier of its own, below 1 s or above: all of these are slow, though
    99 of 100 of all are not."""
    tiers = (("large", "0+1000x60", "0+1000x60"), ("small", "0x60" if slow else "0+5x60", "0+5x60"))
    return [
        (f'{name}_bucket{{{OF}, tier="{tier}", le="{le}"}}', values)
        for tier, fast, every in tiers for le, values in (("1.0", fast), ("+Inf", every))
    ]  # fmt: skip


Series = list[tuple[str, str]]
GOAL = 'fleet_operator_fleet_slo_seconds{{namespace="ml", fleet="f", latency="{}"}}'
WORKERS = 'fleet_operator_fleet_workers{{namespace="ml", fleet="f", tier="t", role="decode", state="{}"}}'
NO_DECODE = f'fleet_router_endpoints{{{OF}, role="decode"}}'

UP, STARTED = f"fleet_agent_engine_up{{{OF}}}", f"fleet_agent_engine_start_seconds{{{OF}}}"


def requests(code: int) -> str:
    return f'fleet_router_requests_total{{{OF}, code="{code}"}}'


def grows(name: str, labels: str = "") -> tuple[Series, Series]:
    """A counter that grows by one a minute, and one that stays."""
    series = f"{name}{{{OF}{', ' + labels if labels else ''}}}"
    return [(series, "0+1x60")], [(series, "7x60")]


def above(name: str, fires: float, quiet: float, labels: str = "") -> tuple[Series, Series]:
    """A gauge at two values."""
    series = f"{name}{{{OF}{', ' + labels if labels else ''}}}"
    return [(series, f"{fires}x60")], [(series, f"{quiet}x60")]


def told(kind: str, status: str, reason: str = "R", instead: str = "") -> tuple[Series, Series]:
    """A condition, and the same with the other status, or the other reason."""
    other = {"True": "False", "False": "True"}[status] if not instead else status
    return [(condition(kind, status, reason), "1x60")], [(condition(kind, other, instead or reason), "1x60")]


def share(part: str, whole: str) -> tuple[Series, Series]:
    """A tenth of `whole`, and a thousandth."""
    return [(part, "0+10x60"), (whole, "0+100x60")], [(part, "0+1x60"), (whole, "0+1000x60")]


CASES: dict[str, tuple[Series, Series]] = {
    "InferenceFleetNotReady": told("Ready", "False", "WorkersLate", "Deleting"),
    "InferenceFleetRoutersFailing": told("Available", "True", "RoutersFailing", "Serving"),
    "InferenceFleetKeptDeleted": told("Ready", "False", "HeldByFinalizer", "WorkersLate"),
    "InferenceFleetKvNotMoving": told("Disaggregating", "False", "KvFailing", "PairFailing"),
    "InferenceFleetKvReadLate": told("Disaggregating", "False", "KvReadLate", "KvFailing"),
    "InferenceFleetKvPathsFail": told("Disaggregating", "False", "WorkerPoisoned", "KvNotMoving"),
    "InferenceFleetTransportNotVerified": told("TransportVerified", "False"),
    "InferenceFleetOutOfRatio": (
        [(condition("WithinRatio", "False"), "1x60"), (condition("Available", "True"), "1x60")],
        [(condition("WithinRatio", "False"), "1x60"), (condition("Available", "False", "WorkersStarting"), "1x60")],
    ),
    "InferenceFleetDevicesSuspected": told("WithinRatio", "True", "DevicesSuspected", "DevicesFailing"),
    "InferenceFleetCapacityLimited": told("CapacityLimited", "True"),
    "InferenceFleetRolloutStuck": told("RollingOut", "True", "Stuck", "Progressing"),
    "InferenceFleetRolledBack": told("RollingOut", "False", "RolledBack", "Complete"),
    "InferenceFleetRefused": told("Accepted", "False"),
    "InferenceFleetNotProvisioned": told("Provisioned", "False"),
    "InferenceFleetAdapterFailed": told("AdaptersLoaded", "False", "AdapterFailed", "Loading"),
    "InferenceFleetPrefetchFailed": told("ModelCached", "False", "PrefetchFailed", "Prefetching"),
    "InferenceFleetTelemetryStale": (
        [(condition("TelemetryFresh", "Unknown", "SourceFailed"), "1x60"), (condition("Available", "True"), "1x60")],
        [(condition("TelemetryFresh", "Unknown", "NoData"), "1x60"),
         (condition("Available", "False", "WorkersStarting"), "1x60")],
    ),
    "InferenceFleetNoOperator": (
        [('fleet_operator_leader{namespace="a", job="o", pod="1"}', "0x60"),
         ('fleet_operator_leader{namespace="another", job="o", pod="1"}', "1x60")],
        [('fleet_operator_leader{namespace="a", job="o", pod="1"}', "0x60"),
         ('fleet_operator_leader{namespace="a", job="o", pod="2"}', "1x60")],
    ),
    "InferenceFleetUnattended": (
        [(NO_DECODE, "2x60"), ('fleet_operator_fleet_condition{namespace="ml", fleet="of-another", condition="Ready"}', "1x60")],
        [(NO_DECODE, "2x60"), (condition("Ready", "False"), "1x60")],
    ),
    "InferenceFleetWritesFail": (
        grows("fleet_operator_errors_total", 'reason="Forbidden"')[0],
        grows("fleet_operator_errors_total", 'reason="Conflict"')[0],
    ),
    "InferenceFleetPassesCrash": grows("fleet_operator_reconciles_total", 'outcome="error"'),
    "InferenceFleetWritesRefused": (
        grows("fleet_operator_api_writes_total", 'verb="create", kind="Pod", outcome="Forbidden"')[0],
        grows("fleet_operator_api_writes_total", 'verb="create", kind="Pod", outcome="ok"')[0],
    ),
    "InferenceFleetKvPathLost": grows("fleet_operator_events_total", 'type="Warning", reason="FabricSuspected"'),
    "InferenceFleetOwnerlessPods": above("fleet_operator_ownerless_pods", 2, 0),
    "InferenceFleetOperatorBehind": above("fleet_operator_queue_oldest_seconds", 90, 3),
    "InferenceFleetWatchSilent": above("fleet_operator_watch_age_seconds", 200, 60, 'kind="pods"'),
    "InferenceFleetNamespaceClosed": above("fleet_operator_namespaces_closed", 1, 0),
    "InferenceFleetNamespaceOfAnother": (
        above("fleet_operator_namespaces", 1, 0, 'owner="other"')[0], above("fleet_operator_namespaces", 1, 0, 'owner="this"')[0],
    ),
    "InferenceFleetRequestsFail": share(requests(500), requests(200)),
    "InferenceFleetRoleAway": tuple(
        [(NO_DECODE, "0x60"), (WORKERS.format("desired"), "2x60"), (WORKERS.format("serving"), f"{serving}x60")]
        for serving in (2, 0)  # none: they start, and NotReady speaks when they take long
    ),  # type: ignore[dict-item]
    "InferenceFleetEndpointsOld": above("fleet_router_endpoints_age_seconds", 130, 3),
    "InferenceFleetFollowErrors": grows("fleet_router_follow_errors_total"),
    "InferenceFleetWorkersOut": above("fleet_router_workers_out", 1, 0, 'role="decode"'),
    "InferenceFleetPairsOut": above("fleet_router_pairs_out", 1, 0),
    "InferenceFleetPairFailing": (above("fleet_router_pair_failing", 1, 0, 'prefill="a", decode="b"')[0], []),
    "InferenceFleetPrewarmsFail": grows("fleet_router_prewarms_total", 'outcome="failed"'),
    "InferenceFleetPrewarmsLeft": above("fleet_router_prewarms_left", 1, 0),
    "InferenceFleetWorkersStrange": above("fleet_router_workers_strange", 1, 0),
    "InferenceFleetStreamsBreak": grows("fleet_router_streams_broken_total"),
    "InferenceFleetPrefillStalls": share(
        f'fleet_router_hedges_total{{{OF}, event="started"}}', f"fleet_router_remote_prefill_total{{{OF}}}"
    ),
    "InferenceFleetRetries": share(f"fleet_router_retries_total{{{OF}}}", requests(200)),
    "InferenceFleetRouterFaults": grows("fleet_router_request_faults_total"),
    "InferenceFleetRevisionFails": share(
        f'fleet_router_revision_errors_total{{{OF}, tier="t", revision="r"}}',
        f'fleet_router_revision_requests_total{{{OF}, tier="t", revision="r"}}',
    ),
    "InferenceFleetTtftMissed": (
        [*buckets("fleet_router_ttft_seconds", slow=True), (GOAL.format("ttft"), "0.995x60")],
        [*buckets("fleet_router_ttft_seconds", slow=False), (GOAL.format("ttft"), "1x60")],
    ),
    "InferenceFleetItlMissed": (
        [*buckets("fleet_router_itl_seconds", slow=True), (GOAL.format("itl"), "0.995x60")],
        [*buckets("fleet_router_itl_seconds", slow=False), (GOAL.format("itl"), "1x60")],
    ),
    "InferenceFleetQueueNearlyFull": tuple(
        [(f'fleet_router_queue_length{{{OF}, class="c"}}', f"{n}x60"), (f'fleet_router_queue_bound{{{OF}, class="c"}}', "10x60")]
        for n in (9, 2)
    ),  # type: ignore[dict-item]
    "InferenceFleetRequestsHeld": (
        [(f"fleet_router_held{{{OF}}}", "1x60"), (condition("Ready", "False", "WorkersLate"), "1x60")],
        [(f"fleet_router_held{{{OF}}}", "1x60"), (condition("Ready", "False", "Waking"), "1x60")],  # a large model loads
    ),
    "InferenceFleetKeysRefused": (
        [(f"fleet_router_refused_keys_total{{{OF}}}", "0+600x60")], [(f"fleet_router_refused_keys_total{{{OF}}}", "0+6x60")],
    ),
    "InferenceFleetBodiesRefused": grows("fleet_router_receiving_refused_total"),
    "InferenceFleetAnswersUnread": grows("fleet_router_unread_refused_total"),
    "InferenceFleetCertificateEnds": above(
        "fleet_router_certificate_expires_timestamp_seconds", 6 * 86_400, 9 * 86_400
    ),
    "InferenceFleetCertificateOutdated": above("fleet_router_certificate_outdated", 1, 0),
    "InferenceFleetLeasesNotReleased": (
        grows("fleet_router_kv_releases_total", 'outcome="late"')[0],
        grows("fleet_router_kv_releases_total", 'outcome="done"')[0],
    ),
    "InferenceFleetGossipKeyOutdated": above("fleet_router_gossip_key_outdated", 1, 0),
    "InferenceFleetGossipRefused": grows("fleet_router_gossip_refused_total"),
    "InferenceFleetEngineDown": (
        [(UP, "1x20 0x40"), (STARTED, "90x60"), (condition("Available", "True"), "1x60")],
        [(UP, "_x5 0x50"), (condition("Available", "True"), "1x60")],  # its model loads for forty minutes
    ),
    "InferenceFleetWorkerNotReady": tuple(
        [(condition("Available", status), "1x60"),
         *((f"fleet_agent_{name}{{{OF}, role=\"{role}\"}}", f"{value}x60")
           for role, draining, up in workers for name, value in (("ready", 0), ("draining", draining), ("engine_up", up)))]
        for status, workers in (("True", [("decode", 0, 1)]), ("True", [("prefill", 1, 1), ("decode", 0, 0)]))
    ),  # type: ignore[dict-item]  # of the latter EngineDown speaks
    "InferenceFleetLogLinesLost": grows("fleet_agent_log_dropped_total"),
    "InferenceFleetMemlockTooSmall": (above("fleet_agent_memlock_bytes", 65_536, 0)[0], []),
    "InferenceFleetSlowNic": tuple(
        [(f'fleet_agent_probe_gbps{{namespace="ml", inferencefleet_io_fleet="f", inferencefleet_io_tier="{tier}", pod="{pod}"}}',
          f"{gbps}x60")
         for tier, pod, gbps in (("t", "a", 400), (of, "b", 40), ("t", "c", 390))]
        for of in ("t", "with-other-nics")
    ),  # type: ignore[dict-item]
    "InferenceFleetSeedRefused": above("fleet_agent_seed_refused_blocks", 1, 0),
    "InferenceFleetSeedStrangers": grows("fleet:kv_seed_strangers_total", 'reason="wrong"'),
    "InferenceFleetHandOffStrangers": grows("fleet:kv_handoff_strangers_total", 'reason="wrong"'),
    "InferenceFleetHandOffOpen": above("fleet:kv_handoff_guarded", 0, 1),
}  # fmt: skip
"""Of each alert: series that it is for, and series of which it must not speak. A minute from value to value."""


def promtool(*args: str) -> str:
    binary = subprocess.run([str(FOLDER / "get-prometheus")], check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run([f"{Path(binary).parent}/promtool", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def asked(alert: str, series: Series, count: int | None) -> dict[str, Any]:
    """A test of promtool's: how many of this alert fire after AFTER_S; None: none."""
    query = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [] if count is None else [{"labels": "{}", "value": count}]
    test = {"expr": query, "eval_time": f"{AFTER_S}s", "exp_samples": expected}
    found = [{"series": name, "values": values} for name, values in series]
    if alert != "InferenceFleetNoOperator":
        found.append({"series": 'fleet_operator_leader{pod="o"}', "values": "1x60"})
    return {
        "name": f"{alert} {'fires' if count else 'is silent'}",
        "interval": "1m",
        "input_series": found,
        "promql_expr_test": [test],
    }


@pytest.mark.smoke
def test_each_alert_fires_for_what_it_is_there_for_and_for_nothing_else(tmp_path: Path):
    assert list(CASES) == ALERTS
    tests = [asked(name, series, count) for name, case in CASES.items() for series, count in zip(case, (1, None), strict=True)]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
def test_an_alert_without_any_operator_fires(tmp_path: Path):
    test = asked("InferenceFleetNoOperator", [("up", "1x60")], 1)
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
def test_an_operator_that_is_told_to_name_no_fleet_is_no_absent_one(tmp_path: Path):
    """With `metrics.fleets: false` nobody tells of any fleet by name, and each one was said to be unattended for ever. It counts
    them all the same; one that counts none, while routers run, is another installation's, and theirs is gone."""
    serves = (NO_DECODE, "2x60")
    named = ('fleet_operator_fleet_condition{namespace="its", fleet="other", condition="Ready"}', "1x60")
    tests = [
        asked("InferenceFleetUnattended", [serves, ('fleet_operator_fleets{pod="o"}', f"{counted}x60"), *others], count)
        for counted, others, count in ((1, [], None), (0, [], 1), (2, [named], None), (1, [named], 1))
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
def test_a_lack_of_nodes_is_told_though_its_reason_is_another_at_every_try(tmp_path: Path):
    """For five minutes workers find no node, for five it is backed out of, then they are tried again, with all well for a moment:
    each reason began anew before its quarter of an hour was over, and nobody was ever told."""
    reasons = ["Sufficient", *["Unschedulable"] * 5, *["BackedOut"] * 5] * 6
    series = [
        (condition("CapacityLimited", status, reason), " ".join(_scraped([there == reason for there in reasons])))
        for status, reason in (("True", "Unschedulable"), ("True", "BackedOut"), ("False", "Sufficient"))
    ]
    test = asked("InferenceFleetCapacityLimited", series, 1)
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("alert", "kind", "reasons"),
    [
        ("InferenceFleetAdapterFailed", "AdaptersLoaded", ["AdapterFailed"] * 4 + ["Loading"]),
        ("InferenceFleetPrefetchFailed", "ModelCached", ["PrefetchFailed"] * 2 + ["Prefetching"] * 6),
    ],
)
def test_what_fails_again_and_again_is_told_though_it_is_tried_in_between(
    tmp_path: Path, alert: str, kind: str, reasons: list[str]
):
    """Nobody was told of an adapter that clients could not get, or of a node that could not fetch the model."""
    series = [
        (condition(kind, "False", reason), " ".join(_scraped([there == reason for there in reasons * (60 // len(reasons))])))
        for reason in dict.fromkeys(reasons)
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [asked(alert, series, 1)]})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
def test_hot_prefixes_that_were_refused_are_told_for_an_hour(tmp_path: Path):
    """The worker says it as long as it lives: the alert ended when somebody deleted a worker that served well. One that
    starts again, and refuses some again, is told anew."""
    series = [(f"fleet_agent_seed_refused_blocks{{{OF}}}", "0x5 3x200 0x3 3x60")]
    test = asked("InferenceFleetSeedRefused", series, None)
    query = test["promql_expr_test"][0]
    fires = [{"labels": "{}", "value": 1}]
    at = [(4, []), (10, fires), (60, fires), (80, []), (200, []), (214, fires)]
    test["promql_expr_test"] = [{**query, "eval_time": f"{minute}m", "exp_samples": samples} for minute, samples in at]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def over_a_change_of_leader(alert: str, told: str, value: str, *others: tuple[str, str]) -> list[dict[str, Any]]:
    """It fires before, meanwhile and after: one leader goes after 30 minutes, another one tells for two minutes at the same time,
    and is gone, and after a minute in which nobody tells a third one does."""
    series = [
        (told.replace("}", ', pod="a"}'), f"{value}x31 stale"),
        (told.replace("}", ', pod="b"}'), f"_x29 {value}x1 stale"),
        (told.replace("}", ', pod="c"}'), f"_x33 {value}x60"),
    ]
    test = asked(alert, [*series, *others], 1)
    query = test["promql_expr_test"][0]
    return [{**test, "promql_expr_test": [{**query, "eval_time": f"{minute}m"} for minute in (29, 30, 31, 32, 33, 34, 36, 40)]}]


@pytest.mark.smoke
def test_who_leads_the_operator_is_no_news_of_a_fleet(tmp_path: Path):
    """b42: each restart of the operator ended every alert about a fleet, and woke somebody again ten minutes later; and while two
    processes told of a fleet's objectives nobody asked whether they were met."""
    slow = buckets("fleet_router_ttft_seconds", slow=True)
    tests = [
        *over_a_change_of_leader("InferenceFleetNotReady", condition("Available", "False", "WorkersFailing"), "1"),
        *over_a_change_of_leader("InferenceFleetTtftMissed", GOAL.format("ttft"), "0.995", *slow),
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


@pytest.mark.smoke
def test_workers_that_load_for_long_or_of_a_fleet_that_does_not_serve_are_no_alert_each(tmp_path: Path):
    """EngineDown spoke of each worker whose model loads for longer than a quarter of an hour, at every start; of one that ended
    again and again it never did; and of a fleet that did not serve it spoke once for each worker, beside NotReady."""
    serves, not_ready = [(condition("Available", "True"), "1x100")], f"fleet_agent_ready{{{OF}}}"
    lost = [(condition("Available", "False", "WorkersFailing"), "1x100")]
    draining = (f"fleet_agent_draining{{{OF}}}", "0x100")
    tests = [
        asked("InferenceFleetEngineDown", [(UP, "0x100"), *serves], 1),
        asked("InferenceFleetEngineDown", [(UP, "0x3 stale _x4 " * 12), *serves], 1),
        asked("InferenceFleetEngineDown", [(UP, "1x60 0x40"), (STARTED, "90x100"), *lost], None),
        asked("InferenceFleetEngineDown", [(UP, "0x100"), *lost], None),
        asked("InferenceFleetWorkerNotReady", [(UP, "1x100"), (not_ready, "0x100"), draining, *lost], None),
    ]
    for test in tests:
        test["promql_expr_test"][0]["eval_time"] = "90m"
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def _scraped(there: list[bool]) -> list[str]:
    """Samples of a series that comes and goes."""
    return ["1" if now else "stale" if before else "_" for before, now in pairwise([False, *there])]


EMPTY_WHEN_WELL = (
    "fleet_router_pair_failing", 'status!="True"', "fleet_operator_cost_per_hour", "fleet_router_tenant",
    "fleet_operator_errors_total", "fleet_agent_probe_gbps", "fleet_router_resumed",
)  # fmt: skip
"""Parts of queries that have no series in a fleet without tenants, price and trouble."""


def answered(query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{URL}/api/v1/query", params={"query": query}, trust_env=False)
    assert answer.status_code == 200, f"{query}: {answer.text}"
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


@pytest.mark.timeout(400)
def test_every_query_of_the_dashboards_is_answered_over_a_real_fleet(fleet: Fleet, operator_port: int, tmp_path: Path):
    """Only what a well fleet has nothing of is empty, and no alert speaks."""
    wish = manifest(fleet.namespace, tiny_model())
    wish["spec"]["slo"] = {"ttft": {"p99": "30s"}, "itl": {"p99": "10s"}}
    with prometheus(tmp_path, operator_port=operator_port, rules=RULES) as server:
        fleet.apply(wish)
        fleet.wait_serving(1, 2)
        (tmp_path / "targets.json").write_text(json.dumps(targets(fleet.objects("pods"))))
        client = OpenAI(base_url=f"{fleet.router()}/v1", api_key="none", max_retries=0)
        until = time.monotonic() + 90
        chosen = {"$namespace": fleet.namespace, "$fleet": "loop", dashboards.R: "30s"}
        lacking = dashboards.queries()
        while lacking and time.monotonic() < until:
            server.check()
            for i in range(4):
                stream = client.completions.create(
                    model="tiny", prompt=f"{until} {i} {PROMPT}", max_tokens=8, temperature=0, stream=True
                )
                assert [chunk for chunk in stream]
            lacking = [query for query in lacking if not answered(_with(query, chosen))]
        assert [query for query in lacking if not any(part in query for part in EMPTY_WHEN_WELL)] == []
        speaking = answered("ALERTS")
        assert [alert["metric"] for alert in speaking if alert["metric"]["alertstate"] == "firing"] == []
    fleet.delete_and_leave_nothing()


def _with(query: str, chosen: dict[str, str]) -> str:
    for name, value in chosen.items():
        query = query.replace(name, value)
    return query
