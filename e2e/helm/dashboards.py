"""The chart's Grafana dashboards, as rows of (title, unit, queries): `make chart` writes them to its files/dashboards.

Every query is asked of a real Prometheus over a real fleet in e2e/test_alerts.py.
"""

from __future__ import annotations

import json
from typing import Any, Final

Query = tuple[str, str]
"""PromQL, legend."""
Panel = tuple[str, str, tuple[Query, ...]]
"""Title, Grafana's unit, queries."""
Row = tuple[str, tuple[Panel, ...]]

OF = 'namespace="$namespace", inferencefleet_io_fleet="$fleet"'
"""Routers and workers of the fleet that was chosen."""
MINE = 'namespace="$namespace", fleet="$fleet"'
"""What the operator says of it."""
TIER = "inferencefleet_io_tier"
R = "$__rate_interval"
WIDTH, HEIGHT, PER_LINE = 8, 7, 3


def _p99(name: str, by: str = "") -> str:
    return f"histogram_quantile(0.99, sum by (le{by}) (rate({name}_bucket{{{OF}}}[{R}])))"


FLEET: Final[tuple[Row, ...]] = (
    (
        "Is it well?",
        (
            ("Conditions", "none", ((f"fleet_operator_fleet_condition{{{MINE}}}", "{{condition}} {{status}} {{reason}}"),)),
            ("Workers", "none", (
                (f'sum by (role, state) (fleet_operator_fleet_workers{{{MINE}}})', "{{role}} {{state}}"),
            )),
            ("Serving prefill per decode", "none", (
                (
                    f'sum(fleet_operator_fleet_workers{{{MINE}, role="prefill", state="serving"}}) / '
                    f'sum(fleet_operator_fleet_workers{{{MINE}, role="decode", state="serving"}})',
                    "prefill / decode",
                ),
            )),
        ),
    ),
    (
        "What clients see",
        (
            ("Requests by code", "reqps", ((f"sum by (code) (rate(fleet_router_requests_total{{{OF}}}[{R}]))", "{{code}}"),)),
            ("TTFT p99 and its objective", "s", (
                (_p99("fleet_router_ttft_seconds", ", tier"), "{{tier}}"),
                (f'fleet_operator_fleet_slo_seconds{{{MINE}, latency="ttft"}}', "objective"),
            )),
            ("Time between tokens p99 and its objective", "s", (
                (_p99("fleet_router_itl_seconds", ", tier"), "{{tier}}"),
                (f'fleet_operator_fleet_slo_seconds{{{MINE}, latency="itl"}}', "objective"),
            )),
            ("Waiting, and how many may", "none", (
                (f"sum by (class) (fleet_router_queue_length{{{OF}}})", "{{class}} waiting"),
                (f"sum by (class) (fleet_router_queue_bound{{{OF}}})", "{{class}} bound"),
                (f"sum(fleet_router_held{{{OF}}})", "held until workers wake"),
            )),
            ("Streams that broke, sent again, resumed", "cps", (
                (f"sum(rate(fleet_router_streams_broken_total{{{OF}}}[{R}]))", "broken"),
                (f"sum(rate(fleet_router_retries_total{{{OF}}}[{R}]))", "sent again"),
                (f"sum by (outcome) (rate(fleet_router_resumed_total{{{OF}}}[{R}]))", "resumed {{outcome}}"),
            )),
            ("Requests by tenant", "reqps", (
                (f"sum by (tenant, result) (rate(fleet_router_tenant_requests_total{{{OF}}}[{R}]))", "{{tenant}} {{result}}"),
            )),
        ),
    ),
    (
        "Does KV move?",
        (
            ("Prompts prefilled remotely and locally", "reqps", (
                (f"sum(rate(fleet_router_remote_prefill_total{{{OF}}}[{R}]))", "remote"),
                (f"sum(rate(fleet_router_local_prefill_total{{{OF}}}[{R}]))", "local"),
                (f"sum by (tier) (rate(fleet_router_handed_over_total{{{OF}}}[{R}]))", "handed over {{tier}}"),
            )),
            ("KV received", "Bps", (
                (f"sum by ({TIER}) (rate(vllm:nixl_bytes_transferred_sum{{{OF}}}[{R}]))", f"{{{{{TIER}}}}}"),
            )),
            ("Transfers that failed, leases that ended", "cps", (
                (f"sum(rate(vllm:nixl_num_failed_transfers_total{{{OF}}}[{R}]))", "failed"),
                (f"sum(rate(vllm:nixl_num_kv_expired_reqs_total{{{OF}}}[{R}]))", "expired"),
                (f"sum by (outcome) (rate(fleet_router_kv_releases_total{{{OF}}}[{R}]))", "released {{outcome}}"),
            )),
            ("Workers and pairs that are not asked", "none", (
                (f"sum by (role) (fleet_router_workers_out{{{OF}}})", "{{role}} workers"),
                (f"sum(fleet_router_pairs_out{{{OF}}})", "pairs"),
                (f"fleet_router_pair_failing{{{OF}}}", "{{prefill}} to {{decode}}"),
            )),
            ("Prefix hits of the engines", "percentunit", (
                (
                    f"sum by (inferencefleet_io_role) (rate(vllm:prefix_cache_hits_total{{{OF}}}[{R}])) / "
                    f"sum by (inferencefleet_io_role) (rate(vllm:prefix_cache_queries_total{{{OF}}}[{R}]))",
                    "{{inferencefleet_io_role}}",
                ),
            )),
            ("KV blocks in use", "percentunit", ((f"vllm:kv_cache_usage_perc{{{OF}}}", "{{pod}}"),)),
        ),
    ),
    (
        "Workers",
        (
            ("Running", "none", ((f"vllm:num_requests_running{{{OF}}}", "{{pod}}"),)),
            ("Waiting in engines", "none", ((f"vllm:num_requests_waiting{{{OF}}}", "{{pod}}"),)),
            ("Tokens", "none", (
                (f"sum(rate(vllm:prompt_tokens_total{{{OF}}}[{R}]))", "prompt"),
                (f"sum(rate(vllm:generation_tokens_total{{{OF}}}[{R}]))", "generated"),
            )),
            ("Preemptions", "cps", ((f"sum by (pod) (rate(vllm:num_preemptions_total{{{OF}}}[{R}]))", "{{pod}}"),)),
            ("Ready, draining, changing their role", "none", (
                (f"sum by (inferencefleet_io_role) (fleet_agent_ready{{{OF}}})", "{{inferencefleet_io_role}} ready"),
                (f"sum by (inferencefleet_io_role) (fleet_agent_draining{{{OF}}})", "{{inferencefleet_io_role}} draining"),
                (f"sum(fleet_agent_flipping{{{OF}}})", "changing"),
            )),
            ("Measured bandwidth between workers", "Gbits", ((f"fleet_agent_probe_gbps{{{OF}}}", "{{pod}}"),)),
        ),
    ),
)  # fmt: skip

OPERATOR: Final[tuple[Row, ...]] = (
    (
        "Fleets",
        (
            ("Fleets by Ready", "none", (("sum by (ready) (fleet_operator_fleets)", "{{ready}}"),)),
            ("Not Ready", "none", (
                ('fleet_operator_fleet_condition{condition="Ready", status!="True"}', "{{namespace}}/{{fleet}} {{reason}}"),
            )),
            ("Cost an hour", "none", (("sum(fleet_operator_cost_per_hour)", "all that say it"),)),
            ("What users were told", "cps", (
                (f"sum by (type, reason) (rate(fleet_operator_events_total[{R}]))", "{{type}} {{reason}}"),
            )),
            ("Problems by reason", "cps", ((f"sum by (reason) (rate(fleet_operator_errors_total[{R}]))", "{{reason}}"),)),
            ("Pods that nobody owns", "none", (("sum(fleet_operator_ownerless_pods)", "pods"),)),
        ),
    ),
    (
        "The operator itself",
        (
            ("Who reconciles", "none", (("fleet_operator_leader", "{{pod}}"),)),
            ("Passes", "cps", ((f"sum by (outcome) (rate(fleet_operator_reconciles_total[{R}]))", "{{outcome}}"),)),
            ("Length of a pass p99", "s", (
                (f"histogram_quantile(0.99, sum by (le) (rate(fleet_operator_reconcile_seconds_bucket[{R}])))", "p99"),
            )),
            ("Fleets that wait, the first one's wait", "none", (
                ("max(fleet_operator_queue_depth)", "fleets"), ("max(fleet_operator_queue_oldest_seconds)", "seconds"),
            )),
            ("Writes", "cps", (
                (f"sum by (verb, kind, outcome) (rate(fleet_operator_api_writes_total[{R}]))", "{{verb}} {{kind}} {{outcome}}"),
            )),
            ("Silence of watches", "s", (("max by (kind) (fleet_operator_watch_age_seconds)", "{{kind}}"),)),
            ("CPU", "none", (
                (f"rate(fleet_operator_process_cpu_seconds_total[{R}])", "{{pod}}"),
                (f"rate(fleet_operator_reconcile_cpu_seconds_total[{R}])", "{{pod}} passes"),
            )),
            ("Memory", "bytes", (("fleet_operator_process_resident_memory_bytes", "{{pod}}"),)),
            ("Namespaces", "none", (
                ("max by (owner) (fleet_operator_namespaces)", "{{owner}}"), ("max(fleet_operator_namespaces_closed)", "closed"),
            )),
        ),
    ),
)  # fmt: skip


def generated() -> dict[str, str]:
    """File name → text."""
    of_fleets = [
        _variable("namespace", "label_values(fleet_operator_fleet_condition, namespace)"),
        _variable("fleet", 'label_values(fleet_operator_fleet_condition{namespace="$namespace"}, fleet)'),
    ]
    made = {
        "fleet.json": _dashboard("inferencefleet-fleet", "InferenceFleet: one fleet", FLEET, of_fleets),
        "operator.json": _dashboard("inferencefleet-operator", "InferenceFleet: operator", OPERATOR, []),
    }
    return {name: json.dumps(found, indent=1) + "\n" for name, found in made.items()}


def queries() -> list[str]:
    """Every query of every panel."""
    return [query for rows in (FLEET, OPERATOR) for _, panels in rows for _, _, asked in panels for query, _ in asked]


def _dashboard(uid: str, title: str, rows: tuple[Row, ...], variables: list[dict[str, Any]]) -> dict[str, Any]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0}
    return {
        "uid": uid, "title": title, "tags": ["inferencefleet"], "schemaVersion": 39, "editable": True, "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "30s", "timezone": "", "annotations": {"list": []}, "links": [],
        "templating": {"list": [source, *variables]}, "panels": _panels(rows),
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    asked = {"query": query, "refId": name}
    return {
        "name": name, "label": name, "type": "query", "datasource": _source(), "query": asked, "definition": query,
        "refresh": 2, "sort": 1, "includeAll": False, "multi": False, "hide": 0, "current": {},
    }  # fmt: skip


def _panels(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows:
        at = {"x": 0, "y": y, "w": WIDTH * PER_LINE, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []})
        y += 1
        for number, panel in enumerate(panels):
            at = {"x": number % PER_LINE * WIDTH, "y": y + number // PER_LINE * HEIGHT, "w": WIDTH, "h": HEIGHT}
            made.append(_panel(len(made) + 1, panel, at))
        y += -(-len(panels) // PER_LINE) * HEIGHT
    return made


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    title, unit, asked = panel
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": _source()}
        for place, (query, legend) in enumerate(asked)
    ]
    defaults = {"unit": unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {
        "id": number, "type": "timeseries", "title": title, "datasource": _source(), "gridPos": at, "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
    }  # fmt: skip


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}
