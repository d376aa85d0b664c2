"""Logits → next tokens. Greedy rows take the argmax; sampled rows draw with a generator of their own, seeded by (request
seed, position), so that an answer does not depend on what else was in the batch."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from fleet_worker.engine.sequence import Sequence

NEVER = float("-inf")
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would overflow."""


def sample(logits: torch.Tensor, sequences: Rows[Sequence], eos_ids: Rows[int]) -> list[int]:
    """One token per row. `logits` is float32 [rows, vocab] and may be changed in place."""
    for row, sequence in enumerate(sequences):
        banned = banned_tokens(sequence, eos_ids)
        if banned:
            logits[row, list(banned)] = NEVER
    if not torch.isfinite(logits.max(dim=-1).values).all():
        raise FloatingPointError("the model produced logits that are not finite")
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        if sequence.sampling.temperature >= GREEDY_BELOW:
            chosen[row] = draw(logits[row], sequence)
    return chosen


def banned_tokens(sequence: Sequence, eos_ids: Rows[int]) -> set[int]:
    """Tokens that may not come now: the end tokens before min_tokens."""
    sampling = sequence.sampling
    if len(sequence.output) >= sampling.min_tokens:
        return set()
    return {*eos_ids, *sampling.stop_token_ids}


def draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Temperature, top-k, top-p, then one draw by the Gumbel-max trick (argmax of logits plus Gumbel noise)."""
    sampling = sequence.sampling
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = NEVER
    if sampling.top_p < 1.0:
        scaled = _nucleus(scaled, sampling.top_p)
    generator = torch.Generator().manual_seed((sequence.seed * 1_000_003 + sequence.length) % 2**63)
    noise = -torch.log(torch.empty_like(scaled).exponential_(generator=generator))
    return int((scaled + noise).argmax())


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of best tokens whose probability reaches `top_p` (at least one)."""
    ordered, index = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    ordered[before >= top_p] = NEVER
    return torch.empty_like(logits).scatter_(0, index, ordered)
