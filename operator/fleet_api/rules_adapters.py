"""Rules about adapters and prefetching: as many as there is room for, names of their own, sources inside of what is mounted."""

from __future__ import annotations

from fleet_api.rule import Raw, Rule, dig
from fleet_api.rules_model import NO_STEPS, plain_path, source_rules
from fleet_api.v1alpha1.model import ADAPTER_SLOTS


def _slots(raw: Raw) -> int:
    found: int = dig(raw, "model.maxSimultaneousAdapters", ADAPTER_SLOTS[dig(raw, "engine.type", "torch")])
    return found


def _names_free(raw: Raw) -> bool:
    served = dig(raw, "spec.model.servedName", raw["metadata"]["name"])
    return all(adapter["name"] != served for adapter in dig(raw, "spec.model.adapters", ()))


def _inside(raw: Raw) -> bool:
    root = raw.get("adapterRoot", raw["source"])
    return all(a["source"].startswith("hf://") or a["source"].startswith(f"{root}/") for a in raw.get("adapters", ()))


ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec",
        cel="!has(self.model.adapters) || size(self.model.adapters) <= (has(self.model.maxSimultaneousAdapters) ? "
        "self.model.maxSimultaneousAdapters : "
        f"(has(self.engine) && has(self.engine.type) && self.engine.type == 'vllm' ? {ADAPTER_SLOTS['vllm']} : "
        f"{ADAPTER_SLOTS['torch']}))",
        message="there are more adapters than maxSimultaneousAdapters (default 8 for torch, 0 for vllm)",
        holds=lambda raw: len(dig(raw, "model.adapters", ())) <= _slots(raw),
        field=".model.adapters",
    ),
    Rule(
        path="",
        cel="!has(self.spec.model.adapters) || self.spec.model.adapters.all(a, a.name != "
        "(has(self.spec.model.servedName) ? self.spec.model.servedName : self.metadata.name))",
        message="an adapter must not have the name that the model is served under",
        holds=_names_free,
        field=".spec.model.adapters",
    ),
    Rule(
        path="spec.model",
        cel="!has(self.adapters) || self.adapters.all(a, a.source.startsWith('hf://') || "
        "a.source.startsWith((has(self.adapterRoot) ? self.adapterRoot : self.source) + '/'))",
        message="an adapter with a file:// or pvc:// source must lie below adapterRoot (default: the model's source): nothing "
        "else is mounted",
        holds=_inside,
        field=".adapters",
    ),
    Rule(
        path="spec.model",
        cel="!has(self.adapterRoot) || !self.adapterRoot.split('/').exists(part, part == '..' || part == '.')",
        message=f"adapterRoot {NO_STEPS}",
        holds=lambda raw: plain_path(raw.get("adapterRoot", "")),
        field=".adapterRoot",
    ),
    *source_rules("spec.model.adapters[]"),
    Rule(
        path="spec.model.cache",
        cel="!has(self.prefetch) || (has(self.type) && self.type == 'nodeLocal')",
        message="prefetch applies to type nodeLocal only",
        holds=lambda raw: "prefetch" not in raw or raw.get("type") == "nodeLocal",
        field=".prefetch",
    ),
)
