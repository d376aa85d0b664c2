"""Logits → next tokens. Greedy rows take the argmax; sampled rows draw with a generator of their own, seeded by (request
seed, position), so that an answer does not depend on what else was in the batch."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Rows

import torch
import xxhash

from fleet_worker.engine.sequence import Sampling, Sequence

NEVER = float("-inf")
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would overflow."""


def sample(logits: torch.Tensor, sequences: Rows[Sequence], eos_ids: Rows[int]) -> list[int | None]:
    """One token per row; None where the model's numbers are not finite, which is that row's failure alone. `logits` is float32
    [rows, vocab] and may be changed in place."""
    usable: list[bool] = torch.isfinite(logits.max(dim=-1).values).tolist()  # before the bans: they are ours, not the model's
    for row, sequence in enumerate(sequences):
        banned = banned_tokens(sequence, eos_ids)
        if banned:
            logits[row, list(banned)] = NEVER
    best: list[int] = logits.argmax(dim=-1).tolist()
    return [_chosen(logits[row], best[row], sequence) if usable[row] else None for row, sequence in enumerate(sequences)]


def _chosen(logits: torch.Tensor, best: int, sequence: Sequence) -> int:
    return draw(logits, sequence) if sequence.sampling.temperature >= GREEDY_BELOW else best


def banned_tokens(sequence: Sequence, eos_ids: Rows[int]) -> set[int]:
    """Tokens that may not come now: the end tokens before min_tokens."""
    if len(sequence.output) >= sequence.sampling.min_tokens:
        return set()
    return end_tokens(sequence.sampling, eos_ids)


def end_tokens(sampling: Sampling, eos_ids: Rows[int]) -> set[int]:
    """What may not come before min_tokens. The engine admits no request for which that is the whole vocabulary."""
    return {*eos_ids, *sampling.stop_token_ids}


def draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Temperature, top-k, top-p, then one draw by the Gumbel-max trick (argmax of logits plus Gumbel noise)."""
    sampling = sequence.sampling
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = NEVER
    if sampling.top_p < 1.0:
        scaled = _nucleus(scaled, sampling.top_p)
    generator = torch.Generator().manual_seed(noise_seed(sequence.seed, sequence.length))
    noise = -torch.log(torch.empty_like(scaled).exponential_(generator=generator))
    return int((scaled + noise).argmax())


def noise_seed(seed: int, position: int) -> int:
    """Of torch's generator for CPUs, which reads the lower 32 bits of what it is given and no others: all of a seed counts in
    them. Below 2**32."""
    return xxhash.xxh32_intdigest(struct.pack("<qQ", seed, position))


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of best tokens whose probability reaches `top_p` (at least one)."""
    ordered, index = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    ordered[1:][before[1:] >= top_p] = NEVER  # float32 takes the smallest numbers for 0: the best token stays by its place
    return torch.empty_like(logits).scatter_(0, index, ordered)
