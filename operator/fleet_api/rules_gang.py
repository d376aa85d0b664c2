"""Rules about workers that span several nodes: their devices, their place, and who lets them in."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from fleet_api.rule import Raw, Rule, dig, unless_absent

Of = Callable[[Raw, str, str, str, Any], Any]
OfCel = Callable[[str, str, str, int], str]
RANKS = ("tensor", "pipeline", "data")
PLACEMENT = "spec.tiers[].placement"


def gang_rules(of_role: Of, of_role_cel: OfCel) -> tuple[Rule, ...]:
    """All of them; the arguments read a role's own field, or the tier's."""
    return (
        *(_devices(role, of_role, of_role_cel) for role in ("prefill", "decode")),
        *(_ranks(role, of_role, of_role_cel) for role in ("prefill", "decode")),
        _only_of_gangs(of_role, of_role_cel),
        Rule(
            path=PLACEMENT,
            cel="has(self.topologyKey) || (!has(self.policy) && !has(self.exclusive) && "
            "(has(self.gang) || has(self.queue) || has(self.podGroup)))",
            message="without a topologyKey there is no policy and no exclusive: give gang, queue or podGroup alone",
            holds=_has_a_place,
            field=".topologyKey",
        ),
    )


def _has_a_place(raw: Raw) -> bool:
    if "topologyKey" in raw:
        return True
    return not {"policy", "exclusive"} & set(raw) and bool({"gang", "queue", "podGroup"} & set(raw))


def _devices(role: str, of_role: Of, of_role_cel: OfCel) -> Rule:
    """Every pod of a worker has equally many devices."""
    nodes, count = of_role_cel(role, "parallelism", "nodes", 1), of_role_cel(role, "accelerator", "count", 0)
    ranks = " * ".join(of_role_cel(role, "parallelism", key, 1) for key in RANKS)
    device = f"(has(self.{role}) && has(self.{role}.accelerator) ? self.{role}.accelerator.type : self.accelerator.type)"

    def holds(raw: Raw) -> bool:
        size = of_role(raw, role, "parallelism", "nodes", 1)
        if size < 2 or dig(raw, f"{role}.accelerator.type", raw["accelerator"]["type"]) == "cpu":
            return True
        wanted = of_role(raw, role, "accelerator", "count", 0) or prod(_sizes(raw, role, of_role))
        return bool(wanted % size == 0)

    return Rule(
        path="spec.tiers[]",
        cel=unless_absent(
            ("parallelism", f"{role}.parallelism"),
            f"[{nodes}].exists(n, n < 2 || {device} == 'cpu' || [{count}].exists(c, (c > 0 ? c : {ranks}) % n == 0))",
        ),
        message=f"parallelism.nodes of {role} workers must divide their devices: accelerator.count, or tensor x pipeline x data",
        holds=holds,
        field=f".{role}",
    )


def _sizes(raw: Raw, role: str, of_role: Of) -> list[int]:
    return [of_role(raw, role, "parallelism", key, 1) for key in RANKS]


def _ranks(role: str, of_role: Of, of_role_cel: OfCel) -> Rule:
    """vLLM 0.32 (config/parallel.py): every node has equally many ranks, and either whole data parallel ranks or parts of one."""
    nodes, data = of_role_cel(role, "parallelism", "nodes", 1), of_role_cel(role, "parallelism", "data", 1)
    ranks = " * ".join(of_role_cel(role, "parallelism", key, 1) for key in RANKS)

    def holds(raw: Raw) -> bool:
        size, split, total = of_role(raw, role, "parallelism", "nodes", 1), *_data_and_all(raw, role, of_role)
        if size < 2 or split < 1 or total == 1:
            return True
        return bool(total % size == 0 and (split % size == 0 or size % split == 0))

    return Rule(
        path="spec.tiers[]",
        cel=unless_absent(
            ("parallelism", f"{role}.parallelism"),
            f"[{nodes}].exists(n, [{data}].exists(d, [{ranks}].exists(all, n < 2 || d < 1 || all == 1 || "
            "(all % n == 0 && (d % n == 0 || n % d == 0)))))",
        ),
        message=f"parallelism of {role} workers: nodes must divide tensor x pipeline x data, and of nodes and data one the other",
        holds=holds,
        field=f".{role}",
    )


def _data_and_all(raw: Raw, role: str, of_role: Of) -> tuple[int, int]:
    return of_role(raw, role, "parallelism", "data", 1), prod(_sizes(raw, role, of_role))


def _only_of_gangs(of_role: Of, of_role_cel: OfCel) -> Rule:
    nodes = " && ".join(f"{of_role_cel(role, 'parallelism', 'nodes', 1)} < 2" for role in ("prefill", "decode"))

    def holds(raw: Raw) -> bool:
        if not {"gang", "podGroup"} & set(raw.get("placement", {})):
            return True
        return any(of_role(raw, role, "parallelism", "nodes", 1) > 1 for role in ("prefill", "decode"))

    return Rule(
        path="spec.tiers[]",
        cel=f"!has(self.placement) || (!has(self.placement.gang) && !has(self.placement.podGroup)) || !({nodes})",
        message="placement.gang and placement.podGroup are for workers with parallelism.nodes of 2 or more",
        holds=holds,
        field=".placement",
    )
