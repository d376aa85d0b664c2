"""Rules about models: where they lie, what fetches them, and tiers that have one of their own."""

from __future__ import annotations

from fleet_api.rule import Raw, Rule, dig

NO_STEPS = "must not contain . or .. as a path element"
TIER_HAS_ONE = "self.tiers.exists(t, has(t.model))"
CASCADE = "(has(self.routing) && has(self.routing.cascade))"
HUB = "startsWith('hf://')"
HUB_MODEL = f"self.model.source.{HUB} || self.tiers.exists(t, has(t.model) && t.model.source.{HUB})"


def plain_path(source: str) -> bool:
    """Nothing in it leads out of where it seems to lie."""
    return not {".", ".."} & set(source.split("/"))


def source_rules(path: str) -> tuple[Rule, ...]:
    """What holds for every `source` with a `revision`."""
    return (
        Rule(
            path=path,
            cel=f"!has(self.revision) || self.source.{HUB}",
            message="revision applies to an hf:// source only",
            holds=lambda raw: "revision" not in raw or raw["source"].startswith("hf://"),
            field=".revision",
        ),
        Rule(
            path=path,
            cel="!self.source.split('/').exists(part, part == '..' || part == '.')",
            message=f"source {NO_STEPS}",
            holds=lambda raw: plain_path(raw["source"]),
            field=".source",
        ),
    )


def _own_models(raw: Raw) -> list[Raw]:
    return [tier["model"] for tier in raw["tiers"] if "model" in tier]


def _from_hub(*parts: Raw) -> bool:
    return any(part["source"].startswith("hf://") for part in parts)


def _cascade_tiers(raw: Raw) -> list[str] | None:
    found: list[str] | None = dig(raw, "routing.cascade.tiers", None)
    return found


def _all_there(raw: Raw) -> bool:
    return set(_cascade_tiers(raw) or ()) <= {tier["name"] for tier in raw["tiers"]}


def _all_named(raw: Raw) -> bool:
    named = _cascade_tiers(raw)
    return named is None or {tier["name"] for tier in raw["tiers"]} <= set(named)


_HUB_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec",
        cel=f"!has(self.model.tokenSecretRef) || {HUB_MODEL} || "
        f"(has(self.model.adapters) && self.model.adapters.exists(a, a.source.{HUB}))",
        message="tokenSecretRef applies to an hf:// source only, a model's or an adapter's",
        holds=lambda raw: (
            "tokenSecretRef" not in raw["model"] or _from_hub(raw["model"], *_own_models(raw), *raw["model"].get("adapters", ()))
        ),
        field=".model.tokenSecretRef",
    ),
    Rule(
        path="spec",
        cel=f"!has(self.model.cache) || {HUB_MODEL}",
        message="cache applies to an hf:// source only",
        holds=lambda raw: "cache" not in raw["model"] or _from_hub(raw["model"], *_own_models(raw)),
        field=".model.cache",
    ),
)
_TIER_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec",
        cel=f"!{TIER_HAS_ONE} || {CASCADE}",
        message="a tier with a model of its own needs routing.cascade: else it would be chance which model answers",
        holds=lambda raw: not _own_models(raw) or _cascade_tiers(raw) is not None,
        field=".tiers",
    ),
    Rule(
        path="spec",
        cel=f"!has(self.model.adapters) || size(self.model.adapters) == 0 || !{TIER_HAS_ONE}",
        message="adapters belong to one model: there can be none where a tier has a model of its own",
        holds=lambda raw: not raw["model"].get("adapters") or not _own_models(raw),
        field=".model.adapters",
    ),
)
_CASCADE_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec.routing.cascade",
        cel="self.tiers.all(a, self.tiers.exists_one(b, a == b))",
        message="tiers must name each tier once",
        holds=lambda raw: len(set(raw["tiers"])) == len(raw["tiers"]),
        field=".tiers",
    ),
    Rule(
        path="spec",
        cel=f"!{CASCADE} || self.routing.cascade.tiers.all(name, self.tiers.exists(t, t.name == name))",
        message="every tier of routing.cascade must be one of spec.tiers",
        holds=_all_there,
        field=".routing.cascade.tiers",
    ),
    Rule(
        path="spec",
        cel=f"!{CASCADE} || self.tiers.all(t, t.name in self.routing.cascade.tiers)",
        message="every one of spec.tiers must be a tier of routing.cascade: else it would be chance which model answers",
        holds=_all_named,
        field=".routing.cascade.tiers",
    ),
    Rule(
        path="spec.routing",
        cel="!has(self.cascade) || !has(self.endpointPicker)",
        message="cascade does not go together with endpointPicker: a gateway's picker cannot check answers",
        holds=lambda raw: "cascade" not in raw or "endpointPicker" not in raw,
        field=".cascade",
    ),
    Rule(
        path="spec",
        cel=f"!{CASCADE} || !(has(self.scaling) && has(self.scaling.toZero) && has(self.scaling.toZero.enabled) && "
        "self.scaling.toZero.enabled)",
        message="routing.cascade does not go together with scaling.toZero.enabled: a draft does not wait for a tier to wake",
        holds=lambda raw: _cascade_tiers(raw) is None or not dig(raw, "scaling.toZero.enabled", False),
        field=".routing.cascade",
    ),
    Rule(
        path="spec",
        cel=f"!{CASCADE} || !has(self.routing.cascade.check) || !has(self.routing.cascade.check.minMeanLogprob) || "
        "(has(self.engine) && has(self.engine.type) && self.engine.type == 'vllm')",
        message="minMeanLogprob needs an engine that tells log-probabilities: engine.type vllm",
        holds=lambda raw: dig(raw, "routing.cascade.check.minMeanLogprob", None) is None or dig(raw, "engine.type", "") == "vllm",
        field=".routing.cascade.check.minMeanLogprob",
    ),
)
MODEL_RULES: tuple[Rule, ...] = (
    *source_rules("spec.model"),
    *source_rules("spec.tiers[].model"),
    *_HUB_RULES,
    *_TIER_RULES,
    *_CASCADE_RULES,
)
