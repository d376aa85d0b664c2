"""Rules between fields, each once: as CEL for the API server and as a Python predicate for `fleet up`.

A predicate gets the raw (structurally valid) object at the rule's path, so that both sides see the same: what the user wrote,
without defaults. tests/fleet_api sends one table of manifests through both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from fleet_api.quantities import (
    DURATION_PATTERN,
    QUANTITY_PATTERN,
    RATIO_PATTERN,
    Ratio,
    parse_duration,
    parse_quantity,
    parse_ratio,
)
from fleet_api.rule import Raw, Rule, unless_absent
from fleet_api.rule import dig as _dig
from fleet_api.rule import either as _or
from fleet_api.rules_adapters import ADAPTER_RULES
from fleet_api.rules_model import MODEL_RULES
from fleet_api.rules_pod import POD_RULES
from fleet_api.rules_ranges import RANGE_RULES
from fleet_api.structure import go_match
from fleet_api.v1alpha1.model import EngineSpec
from fleet_api.v1alpha1.routing import LimitsSpec
from fleet_api.v1alpha1.tier import RatioSpec, RoleSpec

TWO_NAMES_MAX = 40
"""Fleet and tier name: a pod is called FLEET-TIER-prefill-REVISION8-ORDINAL and a host name has at most 63 characters."""


def _default(model: type[BaseModel], field: str) -> Any:
    return model.model_fields[field].default


MODEL_LEN = _default(EngineSpec, "max_model_len")
OUTPUT_TOKENS = _default(LimitsSpec, "max_output_tokens")
MIN_REPLICAS = _default(RoleSpec, "min_replicas")
MAX_REPLICAS = _default(RoleSpec, "max_replicas")
SHAPE = (_default(RatioSpec, "prefill"), _default(RatioSpec, "decode"))
RATIO_MIN = _default(RatioSpec, "min")
RATIO_MAX = _default(RatioSpec, "max")


def _part(path: str, default: str, index: int) -> str:
    """CEL: one side of a ratio as an int."""
    return f"int({_or(path, default)}.split(':')[{index}])"


def _bounds(raw: Raw, path: str) -> tuple[Ratio, Ratio] | None:
    """(min, max) of the ratio at `path` ("" or "ratio."); None when one is malformed, which the structure already reports."""
    low, high = _dig(raw, f"{path}min", RATIO_MIN), _dig(raw, f"{path}max", RATIO_MAX)
    return (parse_ratio(low), parse_ratio(high)) if go_match(RATIO_PATTERN, low) and go_match(RATIO_PATTERN, high) else None


def _malformed(path: str) -> str:
    """CEL of `_bounds(...) is None`: a rule about malformed text would fail to evaluate instead of saying something useful."""
    low, high = _or(f"{path}min", RATIO_MIN), _or(f"{path}max", RATIO_MAX)
    return f"!{low}.matches(r'{RATIO_PATTERN}') || !{high}.matches(r'{RATIO_PATTERN}')"


def _duration_between(path: str, field: str, low: str, high: str) -> Rule:
    def holds(raw: Raw) -> bool:
        if not go_match(DURATION_PATTERN, raw.get(field, "")):
            return True
        return parse_duration(low) <= parse_duration(raw[field]) <= parse_duration(high)

    text, value = f"self.{field}", f"duration(self.{field})"
    return Rule(
        path=path,
        cel=f"!has({text}) || !{text}.matches(r'{DURATION_PATTERN}') || "
        f"({value} >= duration('{low}') && {value} <= duration('{high}'))",
        message=f"{field} must be between {low} and {high}",
        holds=holds,
        field=f".{field}",
    )


def _class_limit(field: str, above: str, default: int) -> Rule:
    """A class's limit may only be lower than the fleet's."""

    def holds(raw: Raw) -> bool:
        most = min(_dig(raw, above, default), _dig(raw, f"limits.{field}", _dig(raw, above, default)))
        return all(one.get(field, 1) <= most for one in raw.get("classes", ()))

    both = f"[{_or(above, default)}, {_or(f'limits.{field}', 1_048_576)}].min()"
    return Rule(
        path="spec",
        cel=f"!has(self.classes) || self.classes.all(c, !has(c.{field}) || c.{field} <= {both})",
        message=f"{field} of a class must not be more than limits.{field} ({above} {default} by default)",
        holds=holds,
        field=".classes",
    )


def _quantity_between(path: str, field: str, low: str, high: str) -> Rule:
    def holds(raw: Raw) -> bool:
        if not go_match(QUANTITY_PATTERN, text := str(raw.get(field, ""))):
            return True
        return parse_quantity(low) <= parse_quantity(text) <= parse_quantity(high)

    text = f"string(self.{field})"  # of an integer, too
    return Rule(
        path=path,
        cel=f"!has(self.{field}) || !{text}.matches(r'{QUANTITY_PATTERN}') || "
        f"(quantity({text}).compareTo(quantity('{low}')) >= 0 && "
        f"quantity({text}).compareTo(quantity('{high}')) <= 0)",
        message=f"{field} must be between {low} and {high}",
        holds=holds,
        field=f".{field}",
    )


def _role_rules(path: str) -> list[Rule]:
    low, high = _or("minReplicas", MIN_REPLICAS), _or("maxReplicas", MAX_REPLICAS)

    def bounds(raw: Raw) -> tuple[int, int]:
        return _dig(raw, "minReplicas", MIN_REPLICAS), _dig(raw, "maxReplicas", MAX_REPLICAS)

    return [
        Rule(
            path=path,
            cel=f"{low} <= {high}",
            message=f"minReplicas (default {MIN_REPLICAS}) must not be more than maxReplicas (default {MAX_REPLICAS})",
            holds=lambda raw: bounds(raw)[0] <= bounds(raw)[1],
            field=".minReplicas",
        ),
        Rule(
            path=path,
            cel=f"!has(self.replicas) || ({low} <= self.replicas && self.replicas <= {high})",
            message=f"replicas must be between minReplicas (default {MIN_REPLICAS}) and maxReplicas (default {MAX_REPLICAS})",
            holds=lambda raw: "replicas" not in raw or bounds(raw)[0] <= raw["replicas"] <= bounds(raw)[1],
            field=".replicas",
        ),
        Rule(
            path=path,
            cel=f"{_or('warm', 0)} <= {high}",
            message=f"warm must not be more than maxReplicas (default {MAX_REPLICAS})",
            holds=lambda raw: bool(_dig(raw, "warm", 0) <= bounds(raw)[1]),
            field=".warm",
        ),
    ]


def _shape_inside(raw: Raw) -> bool:
    prefill, decode = _dig(raw, "prefill", SHAPE[0]), _dig(raw, "decode", SHAPE[1])
    bounds = _bounds(raw, "")
    return bounds is None or (bounds[0].allows(prefill, decode)[0] and bounds[1].allows(prefill, decode)[1])


def _ordered(raw: Raw) -> bool:
    bounds = _bounds(raw, "")
    return bounds is None or bounds[0].value <= bounds[1].value


def _ratio_rules(path: str) -> list[Rule]:
    low_p, low_d = _part("min", RATIO_MIN, 0), _part("min", RATIO_MIN, 1)
    high_p, high_d = _part("max", RATIO_MAX, 0), _part("max", RATIO_MAX, 1)
    prefill, decode = _or("prefill", SHAPE[0]), _or("decode", SHAPE[1])
    return [
        Rule(
            path=path,
            cel=unless_absent(("min", "max"), f"{_malformed('')} || {low_p} * {high_d} <= {high_p} * {low_d}"),
            message=f"min (default {RATIO_MIN}) must not be more than max (default {RATIO_MAX}); a ratio is prefill/decode",
            holds=_ordered,
            field=".min",
        ),
        Rule(
            path=path,
            cel=f"{_malformed('')} || ({low_p} * {decode} <= {prefill} * {low_d} && {prefill} * {high_d} <= {high_p} * {decode})",
            message=f"prefill:decode (default {SHAPE[0]}:{SHAPE[1]}) must lie between min (default {RATIO_MIN}) and max "
            f"(default {RATIO_MAX})",
            holds=_shape_inside,
        ),
    ]


def _satisfiable(raw: Raw) -> bool:
    """Some prefill and decode count inside the bounds has an allowed ratio.

    Only d in [low, high] can work, and d works when an integer lies in [d x min, d x max]; every multiple of min's decode part
    does, so that looking at that many values of d is enough.
    """
    ratio = _bounds(raw, "ratio.")
    if ratio is None:
        return True
    low_r, high_r = ratio
    p_min, p_max = _dig(raw, "prefill.minReplicas", MIN_REPLICAS), _dig(raw, "prefill.maxReplicas", MAX_REPLICAS)
    d_min, d_max = _dig(raw, "decode.minReplicas", MIN_REPLICAS), _dig(raw, "decode.maxReplicas", MAX_REPLICAS)
    low = max(d_min, -(-p_min * high_r.decode // high_r.prefill))
    high = min(d_max, p_max * low_r.decode // low_r.prefill)
    return any(
        -(-d * low_r.prefill // low_r.decode) <= d * high_r.prefill // high_r.decode for d in range(low, min(high, low + 99) + 1)
    )


_BOUNDS = (
    "ratio.min",
    "ratio.max",
    *(f"{role}.{most}" for role in ("prefill", "decode") for most in ("minReplicas", "maxReplicas")),
)


def _satisfiable_cel() -> str:
    a, b = _part("ratio.min", RATIO_MIN, 0), _part("ratio.min", RATIO_MIN, 1)
    c, e = _part("ratio.max", RATIO_MAX, 0), _part("ratio.max", RATIO_MAX, 1)
    p_min, p_max = _or("prefill.minReplicas", MIN_REPLICAS), _or("prefill.maxReplicas", MAX_REPLICAS)
    d_min, d_max = _or("decode.minReplicas", MIN_REPLICAS), _or("decode.maxReplicas", MAX_REPLICAS)
    digits = "[0,1,2,3,4,5,6,7,8,9]"
    # [x].exists(name, ...) binds a name: CEL in a CRD has no let.
    return unless_absent(
        _BOUNDS,
        f"{_malformed('ratio.')} || [{a}].exists(a, [{b}].exists(b, [{c}].exists(c, [{e}].exists(e, "
        f"[[{d_min}, ({p_min} * e + c - 1) / c].max()].exists(low, [[{d_max}, {p_max} * b / a].min()].exists(high, "
        f"{digits}.exists(i, {digits}.exists(j, low + 10 * i + j <= high && "
        "((low + 10 * i + j) * a + b - 1) / b <= (low + 10 * i + j) * c / e))))))))",
    )


FLEET_RULES: tuple[Rule, ...] = (
    Rule(
        path="",
        cel=f"self.spec.tiers.all(t, size(self.metadata.name) + size(t.name) <= {TWO_NAMES_MAX})",
        message=f"metadata.name and the name of a tier must have at most {TWO_NAMES_MAX} characters together: "
        "names of workers are made of both",
        holds=lambda raw: all(len(raw["metadata"]["name"]) + len(tier["name"]) <= TWO_NAMES_MAX for tier in raw["spec"]["tiers"]),
        field=".spec.tiers",
    ),
    Rule(
        path="spec",
        cel=f"{_or('limits.maxInputTokens', 1)} <= {_or('engine.maxModelLen', MODEL_LEN)}",
        message=f"limits.maxInputTokens must not be more than engine.maxModelLen (default {MODEL_LEN})",
        holds=lambda raw: bool(_dig(raw, "limits.maxInputTokens", 1) <= _dig(raw, "engine.maxModelLen", MODEL_LEN)),
        field=".limits.maxInputTokens",
    ),
    *MODEL_RULES,
    Rule(
        path="spec.engine",
        cel="!has(self.args) || size(self.args) == 0 || (has(self.type) && self.type == 'vllm')",
        message="args apply to engine type vllm only",
        holds=lambda raw: not raw.get("args") or raw.get("type", "torch") == "vllm",
        field=".args",
    ),
    Rule(
        path="spec.engine",
        cel="!has(self.blockTokens) || !has(self.type) || self.type == 'torch'",
        message="blockTokens applies to engine type torch only",
        holds=lambda raw: "blockTokens" not in raw or raw.get("type", "torch") == "torch",
        field=".blockTokens",
    ),
    _quantity_between("spec.engine", "cacheSize", "1Mi", "16Ti"),
    *ADAPTER_RULES,
    *POD_RULES,
    *RANGE_RULES,
    *_ratio_rules("spec.tiers[].ratio"),
    *_role_rules("spec.tiers[].prefill"),
    *_role_rules("spec.tiers[].decode"),
    Rule(
        path="spec.tiers[]",
        cel=_satisfiable_cel(),
        message="no number of prefill and decode workers within minReplicas and maxReplicas has a ratio between "
        "ratio.min and ratio.max",
        holds=_satisfiable,
    ),
    _duration_between("spec.tiers[].kvTransfer", "leaseDuration", "5s", "10m"),
    _duration_between("spec.tiers[].kvTransfer.seed", "timeout", "1s", "60s"),
    _duration_between("spec.model.cache.prefetch", "wait", "0s", "24h"),
    _duration_between("spec.slo.ttft", "p99", "1ms", "1h"),
    _duration_between("spec.slo.itl", "p99", "1ms", "1h"),
    _duration_between("spec.classes[].slo.ttft", "p99", "1ms", "1h"),
    _class_limit("maxInputTokens", "engine.maxModelLen", MODEL_LEN),
    _class_limit("maxOutputTokens", "limits.maxOutputTokens", OUTPUT_TOKENS),
    _duration_between("spec.scaling", "scaleDownWindow", "0s", "24h"),
    _duration_between("spec.routing", "slowStart", "0s", "1h"),
    _duration_between("spec.routing", "returnWait", "0s", "1m"),
    _duration_between("spec.routing.prewarm", "timeout", "1s", "5m"),
    _duration_between("spec.routing.hedge", "atLeast", "1ms", "1m"),
    Rule(
        path="spec.routing",
        cel="!has(self.hedge) || !has(self.policy) || self.policy == 'kvAware'",
        message="hedge needs policy kvAware: no other one expects when a prompt is done",
        holds=lambda raw: "hedge" not in raw or raw.get("policy", "kvAware") == "kvAware",
        field=".hedge",
    ),
    Rule(
        path="spec",
        cel="!has(self.routing) || !has(self.routing.tierRules) || "
        "self.routing.tierRules.all(r, self.tiers.exists(t, t.name == r.tier))",
        message="every tier of routing.tierRules must be one of spec.tiers",
        holds=lambda raw: (
            {rule["tier"] for rule in _dig(raw, "routing.tierRules", ())} <= {tier["name"] for tier in raw["tiers"]}
        ),
        field=".routing.tierRules",
    ),
    _duration_between("spec.scaling", "capacityWait", "1s", "24h"),
    Rule(
        path="spec.scaling.budget",
        cel="has(self.gpus) || has(self.perHour)",
        message="gpus or perHour is needed",
        holds=lambda raw: "gpus" in raw or "perHour" in raw,
    ),
    Rule(
        path="spec",
        cel="!has(self.scaling) || !has(self.scaling.budget) || !has(self.scaling.budget.perHour) || "
        "self.tiers.all(t, has(t.cost))",
        message="scaling.budget.perHour needs cost.perGpuHour of every tier: what a tier without one costs nobody knows",
        holds=lambda raw: _dig(raw, "scaling.budget.perHour", None) is None or all("cost" in tier for tier in raw["tiers"]),
        field=".tiers",
    ),
    _duration_between("spec.scaling.toZero", "idle", "5s", "24h"),
    _duration_between("spec.limits.hold", "time", "1s", "1h"),
    _quantity_between("spec.limits.hold", "size", "4Mi", "16Gi"),
    _quantity_between("spec.routing.cascade", "heldSize", "1Ki", "4Mi"),
    Rule(
        path="spec.scaling",
        cel="!has(self.toZero) || !has(self.toZero.enabled) || !self.toZero.enabled || !has(self.mode) || self.mode == 'auto'",
        message="toZero.enabled needs mode auto: others follow only /scale of the worker pools",
        holds=lambda raw: not _dig(raw, "toZero.enabled", False) or raw.get("mode", "auto") == "auto",
        field=".toZero.enabled",
    ),
    _duration_between("spec.healing.restartPoisoned", "after", "0s", "1h"),
    _duration_between("spec.telemetry", "interval", "1s", "5m"),
    _duration_between("spec.rollout", "progressDeadline", "1s", "24h"),
    _duration_between("spec.rollout", "drainTimeout", "1s", "1h"),
    _duration_between("spec.rollout.canary", "interval", "1s", "24h"),
    _duration_between("spec.deletion", "wait", "1s", "24h"),
    Rule(
        path="spec.rollout",
        cel="!has(self.maxSurgeGpus) || self.maxSurgeGpus > 0 || (has(self.maxUnavailable) && self.maxUnavailable > 0)",
        message="maxSurgeGpus 0 needs a maxUnavailable of at least 1: else nothing could ever be replaced",
        holds=lambda raw: raw.get("maxSurgeGpus", 1) > 0 or raw.get("maxUnavailable", 0) > 0,
        field=".maxSurgeGpus",
    ),
    Rule(
        path="spec.rollout.canary",
        cel="self.steps.all(i, step, i == 0 || self.steps[i - 1] < step)",
        message="steps must grow",
        holds=lambda raw: all(a < b for a, b in pairwise(raw["steps"])),
        field=".steps",
    ),
)

POOL_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec",
        cel="self.fleet == oldSelf.fleet && self.tier == oldSelf.tier && self.role == oldSelf.role && "
        "self.revision == oldSelf.revision",
        message="only replicas may change",
        # A transition rule: it compares with the stored object, which a single manifest does not have.
        holds=lambda _raw: True,
    ),
)
