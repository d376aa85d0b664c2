"""What an emulated worker says: each token depends on all tokens before it, so that loss, repetition and mixing all show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

VOCABULARY: Final = 50_000
MODULUS: Final = 2**61 - 1


def state_of(ids: Sequence[int], weights: int, seed: int) -> int:
    """Of a prefix, under these weights; `seed` 0: greedy."""
    state = weights * 7919 + seed * 104729 + 1
    for token in ids:
        state = after(state, token)
    return state


def after(state: int, token: int) -> int:
    """One token more."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 12345) % MODULUS


def token_of(state: int) -> int:
    """The next one."""
    return (state >> 13) % VOCABULARY


def said(prompt: Sequence[int], count: int, *, weights: int = 0, seed: int = 0) -> list[int]:
    """So many tokens after a prompt."""
    out, state = [], state_of(prompt, weights, seed)
    for _ in range(count):
        token = token_of(state)
        out.append(token)
        state = after(state, token)
    return out


def word(token: int) -> str:
    """Its text."""
    return f" {token:x}"
