"""Everything of a fleet that is not a worker pod: WorkerPools, the router's objects, the endpoints document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from fleet_api.v1alpha1 import InferenceFleet, SloClassSpec, TenantsSpec
from fleet_api.v1alpha1.routing import CascadeSpec, ExplainSpec, HedgeSpec, PrewarmSpec, RoutingSpec, TierRuleSpec, TracesSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.names import (
    FLEET,
    METRICS,
    PLANNED,
    REVISION,
    ROLE,
    ROUTER_ROLE,
    SIZE,
    TIER,
    WISH,
    WRITTEN,
    labels,
    owner_reference,
    router_name,
)
from fleet_operator.older import older, served_name
from fleet_operator.pool_sizes import Sizes, sealed
from fleet_operator.render.cascade import grown_into
from fleet_operator.render.kept_router import ROUTER_MADE, asked_of, template_and_note, with_account
from fleet_operator.render.network import PORTS, port_of
from fleet_operator.render.port import ADMIN_PORT, add_port, requests, router_pods, routers_of
from fleet_operator.render.template import security
from fleet_operator.render.worker import HUNG_GRACE_S, drain_timeout_s
from fleet_operator.settings import Platform
from fleet_planner.reconcile import Plan
from fleet_planner.wanted import PoolWanted, Target
from fleet_router import config as router_config
from fleet_router.config import (
    TTFT_BUDGET_S,
    AnswerCheck,
    Cascade,
    ExplainBounds,
    HedgeBounds,
    HoldBounds,
    PrewarmBounds,
    RouterConfig,
    SloClass,
    TierRule,
    TraceConfig,
)
from fleet_wire import endpoints as wire
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, AbsentWorker, AtZero, Endpoint, Endpoints, Split

API_VERSION = "inferencefleet.io/v1alpha1"
ROUTER_PORT = 8080
PICKER_PORT = 9002
"""Where the inference extension's own picker listens."""
ROUTER_SLACK_S = 5
"""From the end of a router's drain to its kill: what it then cut has to go out."""
ROUTER_LEAVING_S = 5
"""A stopping router closes its port at once: first the cluster's proxies must have learned that it goes."""
ROUTER_STARTUP_FAILURES = 60
ROUTER_LIVENESS_FAILURES = 10
ROUTER_HUNG_GRACE_S = ROUTER_LEAVING_S + 10
"""What a router gets whose probes failed, instead of the drain time. Who answers no /health for 20 s passes no token on, either:
there is nothing to drain, and a fleet with one router is away until it is restarted. One of several processes may hang alone;
then it is found out late, and the others get as long as a worker."""
ROUTER_MOUNT = "/etc/fleet"
TENANTS_MOUNT = "/etc/fleet-tenants"
TENANTS_FILE = "tenants.json"
UNREADY_MAY_GO = {"unhealthyPodEvictionPolicy": "AlwaysAllow"}
"""By default no pod that is not ready may be evicted while too few are: one that never gets ready would hold up a node's drain
for ever."""


def render_pool(fleet: InferenceFleet, pool: PoolWanted, owner: Object) -> Object:
    """One WorkerPool; the annotations let the operator see when somebody else changed replicas, and what it backed out of."""
    backed_out = {WISH: str(pool.wish)} if pool.wish is not None else {}
    written = sealed(fleet.metadata.namespace, pool.name, Sizes(pool.replicas, pool.size, pool.wish))
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkerPool",
        "metadata": {
            "name": pool.name,
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **{TIER: pool.tier, ROLE: pool.role, REVISION: pool.revision}),
            "annotations": {PLANNED: str(pool.replicas), SIZE: str(pool.size), WRITTEN: written, **backed_out},
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {
            "fleet": fleet.metadata.name, "tier": pool.tier, "role": pool.role, "revision": pool.revision,
            "replicas": pool.replicas,
        },
    }  # fmt: skip


def render_documents(fleet: InferenceFleet, plan: Plan, owner: Object, live: Mapping[tuple[str, str], Object]) -> Object:
    """The ConfigMap that the router follows. `live`: (kind, name) → object, for the ports that pods really have."""

    def port(target: Target, name: str, default: int) -> int:
        return port_of(live.get(("Pod", target.name), {}), name, default)

    stored = older(plan, live)

    def model(target: Target) -> str:
        name = served_name(fleet, (target.tier, target.revision), stored)
        return name if name != fleet.served_name else ""

    workers = tuple(
        Endpoint(
            name=target.name, uid=target.uid, address=target.address,
            http_port=port(target, "http", PORTS.http), agent_port=port(target, "agent", PORTS.agent),
            events_port=port(target, "kv-events", PORTS.kv_events), replay_port=port(target, "kv-replay", PORTS.kv_replay),
            role=target.role, tier=target.tier, revision=target.revision, compat=target.compat, state=target.state,
            adapters=dict(target.adapters), model=model(target),
        )
        for target in plan.targets
        if target.state != "absent"
    )  # fmt: skip
    absent = tuple(
        AbsentWorker(uid=target.uid, tier=target.tier, adapters=dict(target.adapters))
        for target in plan.targets
        if target.state == "absent"
    )
    splits = tuple(Split(tier=split.tier, revision=split.revision, percent=split.percent) for split in plan.splits)
    at_zero = tuple(AtZero(tier=zero.tier, limited=zero.limited) for zero in plan.zero)
    name, namespace = fleet.metadata.name, fleet.metadata.namespace
    document = Endpoints(
        fleet=name, namespace=namespace, workers=workers, splits=splits, at_zero=at_zero, routers=routers_of(fleet, live),
        absent=absent,
    )  # fmt: skip
    config = grown_into(_router_config(fleet), plan.targets, live, router_name(name))
    data = {ROUTER_CONFIG_KEY: router_config.encode(config), ENDPOINTS_KEY: wire.encode(document).decode()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(fleet, owner), "data": data}


def _router_config(fleet: InferenceFleet) -> RouterConfig:
    spec = fleet.spec
    budget_s = TTFT_BUDGET_S if spec.slo.ttft is None else spec.slo.ttft.p99_s
    return RouterConfig(
        fleet=fleet.metadata.name,
        served_name=fleet.served_name,
        adapters=tuple(sorted(adapter.name for adapter in fleet.spec.model.adapters)),
        policy=spec.routing.policy,
        load_bound=spec.routing.load.bound,
        min_uncached_tokens=spec.routing.remote_prefill.min_uncached_tokens,
        decide=spec.routing.remote_prefill.decide,
        hedge=_hedge(spec.routing.hedge),
        slow_start_s=spec.routing.slow_start_s,
        return_wait_s=spec.routing.return_wait_s,
        prewarm=_prewarm(spec.routing.prewarm),
        session_header=spec.routing.session_header or "",
        tier_rules=tuple(_tier_rule(rule) for rule in spec.routing.tier_rules),
        cascade=_cascade(spec.routing.cascade),
        prefix_index=spec.routing.prefix_index,
        max_input_tokens=spec.max_input_tokens,
        max_output_tokens=spec.limits.max_output_tokens,
        max_model_len=spec.engine.max_model_len,
        worker_slots=spec.engine.max_batch,
        queue_per_slot=spec.limits.queue.per_slot,
        ttft_budget_s=budget_s,
        classes=tuple(_slo_class(one, budget_s) for one in spec.classes),
        hold=HoldBounds(requests=spec.limits.hold.requests, bytes=spec.limits.hold.size_bytes, time_s=spec.limits.hold.time_s),
        runaway=spec.limits.runaway_patterns != "none",
        explain=_explain(spec.routing.explain),
        traces=_traces(spec.telemetry.traces),
        # vLLM's seeded draws depend on how many were made before: its streams are only carried on from their beginning
        resume="prefill" if spec.engine.type == "torch" else "replay",
    )


def _cascade(spec: CascadeSpec | None) -> Cascade | None:
    if spec is None:
        return None
    check = AnswerCheck(
        finish_reasons=spec.check.finish_reasons,
        phrases=spec.check.phrases,
        least_mean_logprob=spec.check.min_mean_logprob,
    )
    return Cascade(tiers=spec.tiers, check=check, held_bytes=spec.held_bytes)


def _prewarm(spec: PrewarmSpec) -> PrewarmBounds:
    return PrewarmBounds(pairs=spec.pairs, parallel=spec.parallel, timeout_s=spec.timeout_s)


def _hedge(spec: HedgeSpec | None) -> HedgeBounds | None:
    return None if spec is None else HedgeBounds(after=spec.after, least_s=spec.at_least_s, share=spec.budget)


def _explain(spec: ExplainSpec) -> ExplainBounds:
    return ExplainBounds(records=spec.records, troubled=spec.records // 2, refused=spec.records // 4, log=spec.log)


def _traces(spec: TracesSpec | None) -> TraceConfig:
    return TraceConfig() if spec is None else TraceConfig(endpoint=spec.endpoint, sample=spec.sample)


def _slo_class(spec: SloClassSpec, budget_s: float) -> SloClass:
    return SloClass(
        name=spec.name,
        priority=spec.priority,
        ttft_budget_s=budget_s if spec.slo is None else spec.slo.ttft.p99_s,
        max_input_tokens=spec.max_input_tokens,
        max_output_tokens=spec.max_output_tokens,
    )


def _tier_rule(rule: TierRuleSpec) -> TierRule:
    tokens = rule.when.input_tokens
    return TierRule(
        tier=rule.tier,
        tokens_lt=tokens.lt if tokens is not None else None,
        tokens_ge=tokens.ge if tokens is not None else None,
        headers={name.lower(): value for name, value in (rule.when.header or {}).items()},
    )


def render_router(
    fleet: InferenceFleet, owner: Object, platform: Platform, live: Mapping[tuple[str, str], Object] = MappingProxyType({})
) -> list[Object]:
    """Rights, Service and Deployment of the router. `live`: (kind, name) → object; pods of the one there stay as they are."""
    name, selector = router_name(fleet.metadata.name), {FLEET: fleet.metadata.name, ROLE: ROUTER_ROLE}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(fleet, owner)}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _meta(fleet, owner),
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get", "list", "watch"]}],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _meta(fleet, owner),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": fleet.metadata.namespace}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(fleet, owner),
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": _service_ports(fleet.spec.routing),
        },
    }
    return [account, role, binding, service, _deployment(fleet, owner, platform, selector, live)]


def _service_ports(routing: RoutingSpec) -> list[Object]:
    ports: list[Object] = [{"name": "http", "port": ROUTER_PORT, "targetPort": "http", "protocol": "TCP"}]
    if routing.endpoint_picker is not None:
        port = {"name": "grpc-ext-proc", "port": PICKER_PORT, "targetPort": "grpc-ext-proc", "protocol": "TCP"}
        # with TLS the name alone tells that it is gRPC: `https`, to Istio, is HTTP/1.1
        ports.append({**port, "appProtocol": "kubernetes.io/h2c"} if routing.tls is None else port)
    return ports


def render_budgets(fleet: InferenceFleet, plan: Plan, owner: Object) -> list[Object]:
    """One disruption budget per tier and role, and one of the routers when there are several. An eviction is allowed when the
    worker's replacement is ready, never before, so a node drain waits for the operator, which sees the cordoned node and starts
    the replacement at once. One eviction ends a worker of several pods: of a replacement's pods all but one count as needed."""
    sizes = dict[tuple[str, str], int]()
    for pool in plan.pools:  # while workers of two shapes are there, as if all were of the larger one
        at = pool.tier, pool.role
        sizes[at] = max(sizes.get(at, 0), pool.size * pool.nodes + pool.nodes - 1)
    budgets = []
    for (tier, role), size in sizes.items():
        meta = {**_meta(fleet, owner), "name": f"{fleet.metadata.name}-{tier}-{role}"}
        meta["labels"] = labels(fleet.metadata.name, **{TIER: tier, ROLE: role})
        selector = {FLEET: fleet.metadata.name, TIER: tier, ROLE: role}
        spec = {"minAvailable": size, "selector": {"matchLabels": selector}, **UNREADY_MAY_GO}
        budgets.append({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec})
    if fleet.spec.routing.replicas > 1:  # "at most one of one" would guard nothing
        selector = {FLEET: fleet.metadata.name, ROLE: ROUTER_ROLE}
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector}, **UNREADY_MAY_GO}
        meta = _meta(fleet, owner)
        budgets.append({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec})
    return budgets


def _meta(fleet: InferenceFleet, owner: Object) -> Object:
    return {
        "name": router_name(fleet.metadata.name),
        "namespace": fleet.metadata.namespace,
        "labels": labels(fleet.metadata.name, **{ROLE: ROUTER_ROLE}),
        "ownerReferences": [owner_reference(owner)],
    }


def _deployment(
    fleet: InferenceFleet, owner: Object, platform: Platform, selector: dict[str, str], live: Mapping[tuple[str, str], Object]
) -> Object:
    name = router_name(fleet.metadata.name)
    found, account = live.get(("Deployment", name)), live.get(("ServiceAccount", name))

    def template() -> Object:
        pod, marks = _router_pod(fleet, platform), labels(fleet.metadata.name, **{ROLE: ROUTER_ROLE})
        if any(port["name"] == ADMIN_PORT for port in pod["containers"][0]["ports"]):
            marks[METRICS] = ADMIN_PORT  # a PodMonitor cannot see that a pod has two ports, and only one of them answers
        return {"metadata": {"labels": marks}, "spec": pod}

    kept, note = template_and_note(None if platform.renew_routers else found, asked_of(fleet), template)
    if platform.follow == "kube":
        kept, note = with_account(kept, note, account, router_pods(fleet, live))
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_meta(fleet, owner), "annotations": {ROUTER_MADE: note}},
        "spec": {
            "replicas": fleet.spec.routing.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": kept,
        },
    }


def _router_drain_s(fleet: InferenceFleet, platform: Platform) -> int:
    """Longest wait of a stopping router for its streams: what the longest answer of any tier takes, as for workers."""
    return math.ceil(max(drain_timeout_s(fleet, tier, platform) for tier in fleet.spec.tiers))


def _router_pod(fleet: InferenceFleet, platform: Platform) -> Object:
    name, in_cluster = router_name(fleet.metadata.name), platform.follow == "kube"
    follow = f"kube:{fleet.metadata.namespace}/{name}" if in_cluster else f"dir:{ROUTER_MOUNT}"
    drain_s = _router_drain_s(fleet, platform)
    grace_s = ROUTER_LEAVING_S + drain_s + ROUTER_SLACK_S
    hung_s = ROUTER_HUNG_GRACE_S if fleet.spec.routing.processes == 1 else HUNG_GRACE_S
    hung = {"terminationGracePeriodSeconds": min(grace_s, hung_s)}
    env: list[Object] = [
        {"name": "FLEET_PORT", "value": str(platform.router_port)},
        {"name": "FLEET_DRAIN_TIMEOUT_S", "value": str(drain_s)},
        *_trace_headers(fleet.spec.telemetry.traces),
    ]
    if platform.router_host is not None:
        env.append({"name": "FLEET_BIND_HOST", "value": platform.router_host})
    container: Object = {
        "name": "router",
        "image": platform.router_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["fleet-router", "--follow", follow],
        "env": env,
        "ports": [{"name": "http", "containerPort": platform.router_port, "protocol": "TCP"}],
        "startupProbe": {**_probe(platform, "/health", failures=ROUTER_STARTUP_FAILURES), **hung},
        "readinessProbe": _probe(platform, "/ready", failures=1),
        "livenessProbe": {**_probe(platform, "/health", failures=ROUTER_LIVENESS_FAILURES), **hung},
        "resources": {"requests": requests(fleet.spec.routing.processes)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
    }  # fmt: skip
    spec: Object = {
        "containers": [container],
        "serviceAccountName": name,
        "automountServiceAccountToken": in_cluster,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": security(None, shared_group=False),
        # for one router as well: another number of them must not change the template, and restart those that are there
        "topologySpreadConstraints": [
            {
                "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {FLEET: fleet.metadata.name, ROLE: ROUTER_ROLE}},
            }
        ],
    }  # fmt: skip
    if in_cluster:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": ROUTER_LEAVING_S}}}
    else:  # in a cluster nothing reads the files, and a router must start though its ConfigMap was just deleted
        container["volumeMounts"] = [{"name": "documents", "mountPath": ROUTER_MOUNT, "readOnly": True}]
        spec["volumes"] = [{"name": "documents", "configMap": {"name": name}}]
    if platform.router_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in platform.router_pull_secrets]
    if fleet.spec.routing.endpoint_picker is not None:
        mode = fleet.spec.routing.endpoint_picker.failure_mode
        container["command"] += ["--ext-proc-port", str(PICKER_PORT), "--failure-mode", mode]
        container["ports"].append({"name": "grpc-ext-proc", "containerPort": PICKER_PORT, "protocol": "TCP"})
    if fleet.spec.tenants is not None:
        _mount_tenants(fleet.spec.tenants, container, spec)
    add_port(fleet, platform, container, spec)
    return spec


def _trace_headers(spec: TracesSpec | None) -> list[Object]:
    """As every OpenTelemetry program gets them. A Secret that is missing costs spans, no router."""
    if spec is None or spec.headers_secret_ref is None:
        return []
    source = {**spec.headers_secret_ref.to_dict(), "optional": True}
    return [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": source}}]


def _mount_tenants(tenants: TenantsSpec, container: Object, spec: Object) -> None:
    """The Secret as a folder: the kubelet keeps it current, nobody needs the right to read Secrets. A Secret that is missing
    keeps new routers from starting, which is what it should do: nobody could be told from anybody."""
    container["command"] += ["--tenants", f"{TENANTS_MOUNT}/{TENANTS_FILE}"]
    mount = {"name": "tenants", "mountPath": TENANTS_MOUNT, "readOnly": True}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
    items = [{"key": tenants.secret_ref.key, "path": TENANTS_FILE}]
    volume = {"name": "tenants", "secret": {"secretName": tenants.secret_ref.name, "items": items, "defaultMode": 0o444}}
    spec["volumes"] = [*spec.get("volumes", []), volume]


def _probe(platform: Platform, path: str, *, failures: int) -> Object:
    get: Object = {"path": path, "port": "http", "scheme": "HTTP"}
    if platform.router_host is not None:
        get["host"] = platform.router_host
    return {"httpGet": get, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": failures}
