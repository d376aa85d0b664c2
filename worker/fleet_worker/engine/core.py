"""The engine without threads or sockets: add, abort, step. One thread calls it.

Life of a request: waiting → (decode leg: pulling, until the transfer is proven) → running → finished. On a prefill leg the
blocks outlive the sequence under a lease. Every block is owned by exactly: a sequence, a lease, or a pull in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import torch

from fleet_wire.kv import KvReference
from fleet_worker.engine.blocks import BlockAllocator, CacheEvent
from fleet_worker.engine.errors import BadRequestError, EngineError, OverloadedError
from fleet_worker.engine.llama import Chunk, Llama
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.references import check_reference
from fleet_worker.engine.sampler import end_tokens, sample
from fleet_worker.engine.scheduler import Scheduler, Work
from fleet_worker.engine.seeding import Hot
from fleet_worker.engine.sequence import FinishReason, Sampling, Sequence, finish_reason
from fleet_worker.transfer.base import Connector, FetchResult, KvError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine."""

    max_model_len: int
    max_batch: int
    step_tokens: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class Output:
    """What a step produced for one request: a token, an end, or an error."""

    sequence: Sequence
    token: int | None = None
    finish: FinishReason | None = None
    reference: KvReference | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Counters:
    """Monotonic counts for /metrics."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    external_queries: int = 0
    external_hits: int = 0
    blocks_received: int = 0
    failed_transfers: int = 0
    expired_leases: int = 0
    fetches: list[FetchResult] = field(default_factory=list)
    """Successful pulls since /metrics last looked; drained by the metrics thread, bounded there."""


class EngineCore:
    """Owns the pool, the scheduler and the connector."""

    def __init__(
        self,
        model: Llama,
        allocator: BlockAllocator,
        pool: torch.Tensor,
        root: bytes,
        limits: Limits,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.connector: Connector | None = None
        self.hot: Hot | None = None
        """Gives hot prefixes to new workers and takes them from others; None: neither."""
        self.progressed = False
        """The last step computed or reported something; otherwise the loop may sleep, also when requests wait for blocks."""
        self._model = model
        self._pool = pool
        self._eos = eos_ids
        self.scheduler = Scheduler(allocator, model.block_tokens, root, limits.max_batch, limits.step_tokens)
        self.sequences: dict[str, Sequence] = {}
        self._leased: dict[str, list[int]] = {}
        self._lease_ids: dict[str, str] = {}
        self._cancelled_pulls: dict[str, list[int]] = {}

    @property
    def model(self) -> Llama:
        """What computes."""
        return self._model

    @property
    def blocks(self) -> BlockAllocator:
        """All of the pool."""
        return self.scheduler.blocks

    @property
    def is_moving(self) -> bool:
        """KV is on its way here."""
        return bool(self.scheduler.pulling) or (self.hot is not None and self.hot.seeder.is_busy)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.config.vocab_size

    # -- requests ---------------------------------------------------------------------------------------------------
    def add(self, sequence: Sequence) -> None:
        """Admit or raise EngineError; nothing is held when it raises."""
        self.check_fits(len(sequence.prompt), sequence.sampling.max_tokens)
        self._check_tokens(sequence)
        self.check_can_sample(sequence.sampling)
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            raise OverloadedError(f"{self.limits.max_waiting} requests are waiting already")
        if sequence.request_id in self.sequences:
            raise BadRequestError(f"request id {sequence.request_id} is in use", "request_id")
        self._check_reference(sequence)
        self.sequences[sequence.request_id] = sequence
        self.scheduler.add(sequence)
        if sequence.reference is not None and self.connector is not None:
            self.connector.hold(sequence.request_id, sequence.reference)
        self.counters.prompt_tokens += len(sequence.prompt)

    def check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        """Prove that the request can ever finish: model length and KV pool."""
        if prompt_tokens < 1:
            raise BadRequestError("the prompt is empty", "prompt")
        longest = self.limits.max_model_len
        if prompt_tokens + max_tokens > longest:
            raise BadRequestError(
                f"This model's maximum context length is {longest} tokens. However, you requested {max_tokens} output "
                f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of "
                f"{prompt_tokens + max_tokens} tokens.",
                "prompt" if prompt_tokens >= longest else "max_tokens",
            )
        held = self.scheduler.blocks.total * self._model.block_tokens
        if prompt_tokens + max_tokens > held:
            raise BadRequestError(
                f"prompt plus output is {prompt_tokens + max_tokens} tokens, the KV pool holds {held}", "prompt"
            )

    def _check_tokens(self, sequence: Sequence) -> None:
        """An id outside the vocabulary would fail inside a step, and with it everybody else's request."""
        for param, ids in (("prompt", sequence.prompt), ("stop_token_ids", sequence.sampling.stop_token_ids)):
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise BadRequestError(f"{param} holds token ids outside 0..{self.vocab_size - 1}", param)

    def check_can_sample(self, sampling: Sampling) -> None:
        """Prove that there is always a token to choose; BadRequestError."""
        if sampling.min_tokens and len(end_tokens(sampling, self._eos)) >= self.vocab_size:
            raise BadRequestError(
                "stop_token_ids and the end tokens are the whole vocabulary: with min_tokens no token could be chosen",
                "stop_token_ids",
            )

    def _check_reference(self, sequence: Sequence) -> None:
        reference = sequence.reference
        if reference is None and not sequence.keep_for_remote:
            return
        if self.connector is None:
            raise BadRequestError("this engine has no KV connector", "kv_transfer_params")
        if reference is not None:
            check_reference(reference, sequence, self._model.block_tokens, self._model.weights_digest)

    def abort(self, request_id: str) -> Sequence | None:
        """End a request now; blocks come back at once, except those that a transfer may still write."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, "abort")
        return sequence

    # -- one step ---------------------------------------------------------------------------------------------------
    def has_work(self) -> bool:
        """A step would compute something now."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Output]:
        """Poll transfers, start pulls, compute one batch."""
        outputs = self._poll_connector()
        outputs += self._start_pulls()
        work = self.scheduler.step()
        if work:
            outputs += self._compute(work)
        self.progressed = bool(work or outputs)
        return outputs

    def _compute(self, work: list[Work]) -> list[Output]:
        tokens = [token for item in work for token in item.sequence.tokens(item.start, item.count)]
        chunks = [Chunk(item.start, item.count, tuple(item.sequence.table), item.sequence.adapter) for item in work]
        logits = self._model.forward(tokens, chunks, self._pool)
        self.scheduler.advance(work)
        rows = [row for row, item in enumerate(work) if item.samples]
        outputs = self._spoilt_on_the_way(work, logits) if len(rows) < len(work) else []
        if not rows:
            return outputs
        sequences = [work[row].sequence for row in rows]
        chosen = sample(logits[rows], sequences, self._eos)
        return outputs + [self._accept(sequence, token) for sequence, token in zip(sequences, chosen, strict=True)]

    def _spoilt_on_the_way(self, work: list[Work], logits: torch.Tensor) -> list[Output]:
        """A prompt that is not at its end: it may be aborted, or give way, before anybody looks at its numbers again."""
        rows = [row for row, item in enumerate(work) if not item.samples]
        usable: list[bool] = torch.isfinite(logits[rows].max(dim=-1).values).tolist()
        return [self._spoilt(work[row].sequence) for row, fine in zip(rows, usable, strict=True) if not fine]

    def _spoilt(self, sequence: Sequence) -> Output:
        """The model's numbers for this request are not finite: it ends alone, and nobody finds its KV, which may hold them."""
        self.scheduler.blocks.forget(sequence.table)
        self.wipe(sequence.table)
        return self._fail(sequence, EngineError("the model produced numbers that are not finite for this request"))

    def wipe(self, table: list[int]) -> None:
        """Of a request that fails, blocks that nobody finds: the next one that holds them finds zeros. Attention gives what lies
        behind a last token the weight 0, but 0 times a number that is not finite is none either."""
        if own := [block for block in table if self.scheduler.blocks.owners(block) == 1]:
            self._pool[own] = 0

    def _accept(self, sequence: Sequence, token: int | None) -> Output:
        if token is None:
            return self._spoilt(sequence)
        sequence.output.append(token)
        self.counters.generated_tokens += 1
        finish = finish_reason(sequence, token, self._eos)
        if finish is None:
            return Output(sequence, token)
        return Output(sequence, token, finish, self._end(sequence, finish))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside (a stop string was met): its answer is out, so that nobody would hear of a lease."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            self.release_lease_of(request_id)
        else:
            sequence.keep_for_remote = False
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> KvReference | None:
        del self.sequences[sequence.request_id]
        sequence.finish = reason
        self.counters.finished[reason] += 1
        was_pulling = sequence.stage == "pulling"
        self.scheduler.remove(sequence)
        self._let_go(sequence)
        if was_pulling:
            self._put_aside(sequence)
        reference = None
        if sequence.keep_for_remote and reason != "abort" and self.connector is not None:
            reference = self._lease(sequence, self.connector)
        self.scheduler.release(sequence)
        return reference

    def _let_go(self, sequence: Sequence) -> None:
        """The lease of an ended decode leg is renewed no more, and no further block of it is read."""
        if sequence.reference is not None and self.connector is not None:
            self.connector.cancel(sequence.request_id)

    def _lease(self, sequence: Sequence, connector: Connector) -> KvReference | None:
        """None when so many leases are open that the answer goes without: whoever decodes computes the prompt itself."""
        blocks = sequence.table[: self.scheduler.blocks_for(len(sequence.prompt))]
        name = sequence.prompt_name(len(sequence.prompt), self._model.weights_digest)
        reference = self._grant(connector, sequence.request_id, blocks, len(sequence.prompt), name)
        if reference is None:
            return None
        weights, said_at = self._model.weights_digest, sequence.said_at
        return msgspec.structs.replace(reference, adapter=sequence.salt, weights=weights, said_at=said_at)

    def _grant(self, connector: Connector, owner: str, blocks: list[int], tokens: int, name: str = "") -> KvReference | None:
        try:
            reference = connector.grant(owner, blocks, tokens, name)
        except OverflowError:
            return None
        self.scheduler.blocks.share(blocks)
        self._leased[owner] = blocks
        self._lease_ids[owner] = reference.lease_id
        return reference

    def lend(self, lender: str, blocks: list[int]) -> KvReference | None:
        """As seeding.Pool has it. No prompt's name seals it: no decode worker takes such a reference."""
        if self.connector is None:
            return None
        return self._grant(self.connector, lender, blocks, len(blocks) * self._model.block_tokens)

    def requests_leases(self) -> int:
        """Open leases of requests: what a drain waits for. A new worker that loses what it was lent begins with less, one that
        asks on and on, or died in the midst, keeps nobody from going. Any thread."""
        if self.connector is None:
            return 0
        lent = self.hot.lender.lease if self.hot is not None else ""
        return self.connector.open_leases(self._lease_ids.get(lent, ""))

    def put_aside(self, pull: str, blocks: list[int]) -> None:
        """As seeding.Pool has it."""
        self._cancelled_pulls[pull] = blocks

    def release_lease_of(self, request_id: str) -> None:
        """Nobody heard of the lease of this ended request: it ends with the next step."""
        lease_id = self._lease_ids.get(request_id)
        if lease_id is not None and self.connector is not None:
            self.connector.release(lease_id)

    def running_under(self, adapter: Adapter) -> int:
        """Requests that this version of an adapter is needed for."""
        return sum(sequence.adapter is adapter for sequence in self.sequences.values())

    def leased_requests(self) -> list[str]:
        """Ended requests whose blocks are under a lease."""
        return list(self._leased)

    # -- transfers --------------------------------------------------------------------------------------------------
    def _poll_connector(self) -> list[Output]:
        if self.connector is None:
            return []
        asked = self.hot.asked() if self.hot is not None else []
        for request_id, why in self.connector.released():
            self.scheduler.blocks.free(self._leased.pop(request_id))
            del self._lease_ids[request_id]
            self.counters.expired_leases += why == "expired"
            if self.hot is not None:
                self.hot.lender.ended(request_id)
        outputs = [output for result in self.connector.finished() if (output := self._fetched(result)) is not None]
        if self.hot is not None:
            self.hot.advance(asked)
        return outputs

    def _start_pulls(self) -> list[Output]:
        """Decode legs at the head of the queue start to pull as soon as they have blocks; they compute nothing until proven."""
        outputs: list[Output] = []
        scheduler = self.scheduler
        while scheduler.waiting and scheduler.waiting[0].reference is not None:
            sequence = scheduler.waiting[0]
            if len(scheduler.running) + len(scheduler.pulling) >= self.limits.max_batch or not scheduler.place(sequence):
                break
            scheduler.waiting.popleft()
            error = self._start_pull(sequence)
            if error is not None:
                outputs.append(error)
        return outputs

    def _start_pull(self, sequence: Sequence) -> Output | None:
        reference, size = sequence.reference, self._model.block_tokens
        if reference is None or self.connector is None:
            raise EngineError("a pull without reference or connector")
        sequence.stage = "pulling"
        self.scheduler.pulling[sequence.request_id] = sequence
        have, there = sequence.computed // size, len(reference.remote_block_ids)
        self.counters.external_queries += len(sequence.prompt)
        try:
            self.connector.fetch(sequence.request_id, reference, have, sequence.table[have:there])
        except KvError as error:
            return self._fail(sequence, error)
        return None

    def _resume(self, sequence: Sequence, computed: int) -> None:
        """The prompt's KV is here: only what it does not cover is computed."""
        del self.scheduler.pulling[sequence.request_id]
        sequence.computed = max(sequence.computed, min(computed, len(sequence.prompt) - 1))
        sequence.stage = "running"
        sequence.reference = None
        self.scheduler.running.append(sequence)

    def _fetched(self, result: FetchResult) -> Output | None:
        if self.hot is not None and self.hot.fetched(result):
            return None
        if result.lingers:
            return self._fetched_too_late(result)
        cancelled = self._cancelled_pulls.pop(result.request_id, None)
        if cancelled is not None:
            if result.error is not None:
                self.wipe(cancelled)
            self.scheduler.blocks.free(cancelled)
            return None
        sequence = self.scheduler.pulling[result.request_id]
        if result.error is not None:
            self.counters.failed_transfers += 1
            self.wipe(sequence.table[sequence.registered :])  # whatever bytes came
            return self._fail(sequence, result.error)
        reference = sequence.reference
        if reference is None:
            raise EngineError("a finished pull without reference")
        # the local cache may cover more than a short reference does: then nothing was gained, and a counter never falls
        self.counters.external_hits += max(0, reference.remote_num_tokens - sequence.computed)
        have = sequence.computed // self._model.block_tokens
        self.counters.blocks_received += max(0, len(reference.remote_block_ids) - have)
        if result.transferred_bytes:  # the prefix cache may have had all of it
            self.counters.fetches.append(result)
        self._resume(sequence, reference.remote_num_tokens)
        self.scheduler.register_full(sequence)
        return None

    def _put_aside(self, sequence: Sequence) -> None:
        """Its read may still write: of its blocks those that the prefix cache did not have wait for the end of that."""
        self._cancelled_pulls[sequence.request_id] = sequence.table[sequence.registered :]
        del sequence.table[sequence.registered :]

    def _fetched_too_late(self, result: FetchResult) -> Output | None:
        """The pull failed and is not over; None: its request ended already."""
        sequence = self.scheduler.pulling.get(result.request_id)
        if sequence is None or result.error is None:
            return None
        self.counters.failed_transfers += 1
        self._put_aside(sequence)
        return self._fail(sequence, result.error)

    def _fail(self, sequence: Sequence, error: Exception) -> Output:
        """A pull that ended without proof, or a step without a token: the request ends with the error, its blocks come back."""
        del self.sequences[sequence.request_id]
        self._let_go(sequence)
        self.scheduler.remove(sequence)
        self.scheduler.release(sequence)
        self.counters.finished["error"] += 1
        return Output(sequence, error=error)

    # -- observation ------------------------------------------------------------------------------------------------
    def take_cache_events(self) -> list[CacheEvent]:
        """Prefix cache changes since the last call."""
        return self.scheduler.blocks.take_events()

    def check_integrity(self) -> None:
        """Every used block has an owner that this engine knows; call when idle."""
        self.scheduler.blocks.check_integrity()
        tables = [s.table for s in self.sequences.values()] + list(self._leased.values()) + list(self._cancelled_pulls.values())
        tables += [self.hot.seeder.owned()] if self.hot is not None else []
        if {block for table in tables for block in table} != {
            b for b in range(self.scheduler.blocks.total) if self.scheduler.blocks.owners(b)
        }:
            raise AssertionError("a used block belongs to nobody")
