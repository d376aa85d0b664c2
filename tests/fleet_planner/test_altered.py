"""A value that has the wanted fields is not made anew."""

from __future__ import annotations

from dataclasses import replace

from fleet_planner.altered import altered
from fleet_planner.memory import ScaleMemory


def test_only_what_differs_is_made_anew():
    memory = ScaleMemory(cap=(1, 2), cap_until=5.0)
    assert altered(memory, cap=(1, 2), cap_until=5.0) is memory
    for fields in ({"cap": None}, {"cap": (1, 2), "cap_until": 6.0}, {"placed": (0, 0)}):
        assert altered(memory, **fields) == replace(memory, **fields) != memory
