"""One request inside the engine: parameters, tokens and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fleet_wire.blocks import prompt_name
from fleet_wire.kv import KvReference

if TYPE_CHECKING:  # it brings torch, which takes seconds and 300 MB
    from fleet_worker.engine.lora import Adapter

FinishReason = Literal["stop", "length", "abort"]
Stage = Literal["waiting", "pulling", "running", "finished"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's makers advise for requests that do not say, as vLLM takes it from generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Temperature 0 is greedy; a seed makes a sampled answer reproducible in any batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Sequence:
    """Mutable state of one request; owned by the engine thread."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Always set: the request's own seed or one drawn when it arrived."""
    arrived_at: float
    keep_for_remote: bool = False
    """Prefill leg: the blocks go under a lease when the sequence ends."""
    reference: KvReference | None = None
    """Decode leg: where the prompt's KV is."""
    adapter: Adapter | None = None
    """What it runs under, from its first to its last token; None: the base model."""
    cache_salt: str = ""
    """Whose KV it may find, and who may find its own; empty: those without a salt."""
    said_at: str = ""
    """What time it was for the template that wrote its prompt (KvReference.said_at)."""
    stage: Stage = "waiting"
    output: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in the pool."""
    table: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of prompt and output, as far as anybody asked for them."""
    registered: int = 0
    """Blocks of `table` whose names are in the prefix cache."""
    finish: FinishReason | None = None
    stop_text: str | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was there when it was first given its blocks."""
    was_preempted: bool = False

    @property
    def salt(self) -> str:
        """What its KV depends on beside tokens and model."""
        return self.adapter.salt if self.adapter is not None else ""

    def prompt_name(self, tokens: int, weights: str) -> str:
        """Name of its first `tokens` prompt tokens and all else that their KV depends on."""
        return prompt_name(self.prompt[:tokens], self.salt, self.cache_salt, weights)

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return len(self.prompt) + len(self.output)

    @property
    def todo(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return self.length - self.computed

    def tokens(self, start: int, count: int) -> list[int]:
        """Token ids at these positions."""
        whole = len(self.prompt)
        if start >= whole:
            return self.output[start - whole : start - whole + count]
        return [*self.prompt[start : start + count], *self.output[: max(0, start + count - whole)]]


def finish_reason(sequence: Sequence, token: int, eos_ids: tuple[int, ...]) -> FinishReason | None:
    """Why the sequence ends with this token, if it does."""
    sampling = sequence.sampling
    ends = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
    if ends and len(sequence.output) > sampling.min_tokens:
        return "stop"
    return "length" if len(sequence.output) >= sampling.max_tokens else None
