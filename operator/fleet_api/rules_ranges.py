"""Rules about ranges whose least is above their most: nothing is in them, and what asks for one never does anything."""

from __future__ import annotations

from fleet_api.quantities import CPU_PATTERN, QUANTITY_PATTERN, exact_quantity
from fleet_api.rule import Raw, Rule, dig
from fleet_api.structure import go_match

AMOUNTS = {
    "cpu": CPU_PATTERN, "memory": QUANTITY_PATTERN, "ephemeral-storage": QUANTITY_PATTERN, "hugepages-2Mi": QUANTITY_PATTERN,
}  # fmt: skip


def _within(raw: Raw, name: str, pattern: str) -> bool:
    """Of one amount; text that is none is what the structure already reports."""
    least, most = (dig(raw, f"{kind}.{name}", None) for kind in ("requests", "limits"))
    if least is None or most is None or not (go_match(pattern, str(least)) and go_match(pattern, str(most))):
        return True
    return exact_quantity(str(least)) <= exact_quantity(str(most))


def _within_cel(name: str, pattern: str) -> str:
    escaped = name.replace("-", "__dash__")  # as CEL spells it
    least, most = f"self.requests.{escaped}", f"self.limits.{escaped}"
    return (
        f"(!has({least}) || !has({most}) || !string({least}).matches(r'{pattern}') || !string({most}).matches(r'{pattern}') || "
        f"quantity(string({least})).compareTo(quantity(string({most}))) <= 0)"
    )


def resource_rule(path: str) -> Rule:
    """Of what a container reserves and may use: the API server refuses every pod that reserves more."""
    return Rule(
        path=path,
        cel="!has(self.requests) || !has(self.limits) || ("
        + " && ".join(_within_cel(name, pattern) for name, pattern in AMOUNTS.items())
        + ")",
        message="requests must not be more than limits: else no pod can be made",
        holds=lambda raw: all(_within(raw, name, pattern) for name, pattern in AMOUNTS.items()),
        field=".requests",
    )


RANGE_RULES: tuple[Rule, ...] = (
    Rule(
        path="spec.routing.tierRules[].when.inputTokens",
        cel="!has(self.ge) || !has(self.lt) || self.ge < self.lt",
        message="ge must be less than lt: else no prompt fits",
        holds=lambda raw: "ge" not in raw or "lt" not in raw or raw["ge"] < raw["lt"],
        field=".ge",
    ),
    resource_rule("spec.tiers[].prefill.podTemplate.resources"),
    resource_rule("spec.tiers[].decode.podTemplate.resources"),
)
