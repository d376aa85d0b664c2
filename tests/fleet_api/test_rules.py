"""Rules between fields, against brute force."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_api.rules import FLEET_RULES

SATISFIABLE = next(rule for rule in FLEET_RULES if rule.message.startswith("no number of prefill"))
part = st.integers(1, 99)
bounds = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=300)
@given(low=st.tuples(part, part), high=st.tuples(part, part), prefill=bounds, decode=bounds)
@example(low=(2, 3), high=(2, 3), prefill=(1, 8), decode=(1, 2))
@example(low=(97, 99), high=(97, 99), prefill=(1, 97), decode=(1, 99))
@example(low=(97, 99), high=(97, 99), prefill=(1, 96), decode=(1, 99))
def test_satisfiable_is_what_trying_every_pair_says(low, high, prefill, decode):
    raw = {
        "ratio": {"min": f"{low[0]}:{low[1]}", "max": f"{high[0]}:{high[1]}"},
        "prefill": {"minReplicas": prefill[0], "maxReplicas": prefill[1]},
        "decode": {"minReplicas": decode[0], "maxReplicas": decode[1]},
    }
    tried = any(
        Fraction(*low) <= Fraction(p, d) <= Fraction(*high)
        for p in range(prefill[0], prefill[1] + 1)
        for d in range(decode[0], decode[1] + 1)
    )
    assert SATISFIABLE.holds(raw) == tried


def test_messages_are_one_line_and_unique_per_place():
    seen = [(rule.path, rule.field, rule.message) for rule in FLEET_RULES]
    assert len(seen) == len(set(seen))
    assert all("\n" not in rule.message and len(rule.message) <= 200 for rule in FLEET_RULES)


GUARDED = [rule for rule in FLEET_RULES if rule.cel.startswith("(!(has(")]


@pytest.mark.parametrize("rule", GUARDED, ids=lambda rule: f"{rule.path}{rule.field}")
@pytest.mark.parametrize("count", [None, 1, 8])
@pytest.mark.parametrize("type_", ["cpu", "h100-sxm"])
@pytest.mark.parametrize("shape", [{}, {"prefill": 1, "decode": 4}])
def test_a_rule_that_looks_no_further_holds_for_what_it_did_not_look_at(rule, count, type_, shape):
    device = {"type": type_} if count is None else {"type": type_, "count": count}
    tier = {"name": "t", "accelerator": device, "ratio": shape, "prefill": {"accelerator": device}, "decode": {"replicas": 3}}
    assert rule.holds({"spec.tiers[]": tier, "spec.tiers[].ratio": shape}[rule.path])


def test_rules_of_what_few_fleets_have_look_no_further_without_it():
    assert len(GUARDED) == 9
    assert {rule.path for rule in GUARDED} == {"spec.tiers[]", "spec.tiers[].ratio"}
