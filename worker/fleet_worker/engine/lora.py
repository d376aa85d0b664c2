"""LoRA adapters in the forward pass: y = W x + B (A x), per sequence of one batch.

Rows of the step are grouped by adapter; a group's deltas are added to the fused projections (q, k and v are one matrix, gate and
up are one) at the columns of their part. A step without adapters costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from fleet_wire.blocks import adapter_salt, salted_root


@dataclass(frozen=True, slots=True)
class Delta:
    """One projection's change: `a` [rank, in], `b` [out, rank] with the scaling in it, added from column `at` on."""

    a: torch.Tensor
    b: torch.Tensor
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded version of an adapter. Whoever runs under it holds it: unloading takes nothing away from a running request."""

    name: str
    digest: str
    """sha256 over both files, hex: another content is another version."""
    path: str
    rank: int
    deltas: Mapping[tuple[int, str], tuple[Delta, ...]] = field(repr=False)
    """By layer and fused projection: qkv, out, gate_up, down."""

    @property
    def salt(self) -> str:
        """Names this version in KV block hashes and KV references."""
        return adapter_salt(self.name, self.digest)

    def root(self, base: bytes) -> bytes:
        """Parent of its first KV blocks, where `base` is the model's."""
        return salted_root(base, self.salt)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one step that run under one adapter."""

    adapter: Adapter
    rows: torch.Tensor


def group_rows(adapters: Sequence[Adapter | None], counts: Sequence[int]) -> list[Group]:
    """Of chunks that follow each other: the rows of each adapter, in order of first appearance."""
    rows: dict[int, tuple[Adapter, list[int]]] = {}
    start = 0
    for adapter, count in zip(adapters, counts, strict=True):
        if adapter is not None:
            rows.setdefault(id(adapter), (adapter, []))[1].extend(range(start, start + count))
        start += count
    return [Group(adapter, torch.tensor(found)) for adapter, found in rows.values()]


def add_deltas(out: torch.Tensor, x: torch.Tensor, groups: Sequence[Group], layer: int, projection: str) -> torch.Tensor:
    """`out` [rows, columns] with each group's deltas added in place; `x` [rows, in] is what the projection was given."""
    for group in groups:
        deltas = group.adapter.deltas.get((layer, projection), ())
        mine = x[group.rows] if deltas else x
        for delta in deltas:
            change = F.linear(F.linear(mine, delta.a), delta.b)
            out[group.rows, delta.at : delta.at + change.shape[1]] += change
    return out
