"""Requests through the engine core with a scripted connector: who owns which block, and that no bad request hurts another."""

from __future__ import annotations

from collections.abc import Sequence as Blocks
from dataclasses import replace

import msgspec
import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_wire.blocks import adapter_salt, prompt_name, root_hash, sealed
from fleet_wire.kv import KvReference
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.core import EngineCore, Limits
from fleet_worker.engine.errors import BadRequestError, OverloadedError
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.engine.weights import load_weights, weights_digest
from fleet_worker.transfer.base import FetchResult, KvReferenceError, KvTransferError

BLOCK = 16
WEIGHTS = weights_digest(read_config(tiny_model()), load_weights(tiny_model(), read_config(tiny_model())))
PROMPT = tuple(range(5, 55))  # 4 blocks, the last one partly filled


class ScriptedConnector:
    """Moves blocks by copying inside one pool's peer; reports only when the test says so."""

    transport = "tcp"

    def __init__(self, pool, peer=None) -> None:
        self.pool, self.peer = pool, peer
        self.done: list[FetchResult] = []
        self.ended: list[tuple[str, str]] = []
        self.fetched: list[tuple[str, int, list[int]]] = []
        self.granted: list[str] = []
        self.cancelled: list[str] = []
        self.held: list[str] = []

    def grant(self, request_id: str, block_ids: Blocks[int], num_tokens: int, prompt: str) -> KvReference:
        self.granted.append(request_id)
        return reference(num_tokens, tuple(block_ids), prompt)

    def hold(self, request_id: str, ref: KvReference) -> None:
        self.held.append(request_id)

    def dropped_frames(self) -> int:
        return 0

    def strangers(self) -> dict[str, int]:
        return {}

    def is_guarded(self) -> bool:
        return True

    def fetch(self, request_id: str, ref: KvReference, skip: int, into: Blocks[int]) -> None:
        self.fetched.append((request_id, skip, list(into)))
        if self.peer is not None:
            for there, here in zip(ref.remote_block_ids[skip:], into, strict=True):
                self.pool[here] = self.peer[there]

    def finish(self, request_id: str, error: KvTransferError | None = None) -> None:
        self.done.append(FetchResult(request_id, error, 1024, 0.1, 1))

    def finished(self) -> list[FetchResult]:
        done, self.done = self.done, []
        return done

    def released(self) -> list[tuple[str, str]]:
        ended, self.ended = self.ended, []
        return ended

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def release(self, lease_id: str) -> bool:
        return True

    def open_leases(self, besides: str = "") -> int:
        return 0

    def turn_s(self) -> float:
        return 0.0

    def close(self) -> None:
        return None


def reference(tokens: int, blocks: tuple[int, ...] | None = None, prompt: str | None = None) -> KvReference:
    name = prompt_name(PROMPT[:tokens], weights=WEIGHTS) if prompt is None else prompt
    return KvReference(
        do_remote_prefill=True, remote_block_ids=tuple(range(-(-tokens // BLOCK))) if blocks is None else blocks,
        remote_engine_id="e", remote_request_id="r", remote_host="127.0.0.1", remote_port=5600, remote_num_tokens=tokens,
        lease_id="lease." + sealed(name, "d"), remote_epoch="epoch", digest="d", weights=WEIGHTS,
    )  # fmt: skip


def engine(llama: Llama, blocks: int = 64, batch: int = 8, waiting: int = 100, peer: EngineCore | None = None) -> EngineCore:
    pool = llama.new_pool(blocks)
    limits = Limits(max_model_len=512, max_batch=batch, step_tokens=64, max_waiting=waiting)
    core = EngineCore(llama, BlockAllocator(blocks), pool, root_hash("tiny", BLOCK), limits, (2,))
    core.connector = ScriptedConnector(pool, peer._pool if peer else None)
    return core


def ask(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, keep=False, ref=None, **sampling) -> Sequence:
    return Sequence(name, prompt, Sampling(max_tokens=max_tokens, **sampling), 0, 0.0, keep, ref)


def steps(core: EngineCore, most: int = 500):
    outputs = []
    for _ in range(most):
        new = core.step()
        outputs += new
        if not core.progressed:
            return outputs
    raise AssertionError(f"still busy after {most} steps")


def ended(outputs) -> dict[str, list[int]]:
    return {o.sequence.request_id: list(o.sequence.output) for o in outputs if o.finish}


def test_decode_continues_from_pulled_blocks_with_the_same_tokens_and_computes_one_token_of_the_prompt(llama: Llama):
    prefill = engine(llama)
    alone = ended_alone(llama)
    prefill.add(ask("p", max_tokens=1, keep=True))
    given = next(o.reference for o in steps(prefill) if o.finish)
    decode = engine(llama, peer=prefill)
    decode.add(ask("d", ref=given))
    steps(decode)
    assert decode.scheduler.pulling.keys() == {"d"}
    decode.connector.finish("d")
    decode._poll_connector()
    assert decode.scheduler.running[0].todo == 1
    assert ended(steps(decode))["d"] == alone
    decode.check_integrity()
    assert decode.scheduler.blocks.used == 0


@pytest.mark.parametrize(("first", "second", "found"), [("a", "a", True), ("", "", True), ("a", "b", False), ("", "b", False)])
def test_cached_kv_is_found_by_requests_of_the_same_salt_only(llama: Llama, first: str, second: str, found: bool):
    core = engine(llama)
    for name, salt in (("one", first), ("two", second)):
        asked = replace(ask(name), cache_salt=salt)
        core.add(asked)
        assert ended(steps(core))[name] == ended_alone(llama)
    assert (asked.cached_tokens > 0) == found


def test_kv_that_was_pulled_is_kept_under_its_salt(llama: Llama):
    prefill, decode = engine(llama), None
    prefill.add(replace(ask("p", max_tokens=1, keep=True), cache_salt="a"))
    given = next(o.reference for o in steps(prefill) if o.finish)
    decode = engine(llama, peer=prefill)
    decode.add(replace(ask("d", ref=given), cache_salt="a"))
    steps(decode)
    decode.connector.finish("d")
    decode._poll_connector()
    steps(decode)
    cached = {}
    for salt in ("a", "b"):
        asked = replace(ask(f"later-{salt}"), cache_salt=salt)
        decode.add(asked)
        steps(decode)
        cached[salt] = asked.cached_tokens
    assert cached["a"] > 0 == cached["b"]


def ended_alone(llama: Llama, **asked) -> list[int]:
    core = engine(llama)
    core.add(ask("alone", **asked))
    return ended(steps(core))["alone"]


def test_leased_blocks_stay_until_the_connector_names_the_lease(llama: Llama):
    core = engine(llama)
    core.add(ask("p", max_tokens=1, keep=True))
    steps(core)
    assert core.scheduler.blocks.used == 4
    core.connector.ended.append(("p", "expired"))
    core.step()
    assert (core.scheduler.blocks.used, core.counters.expired_leases) == (0, 1)
    core.check_integrity()


def test_a_failed_pull_fails_closed_without_a_token_and_frees_its_blocks(llama: Llama):
    core = engine(llama)
    core.add(ask("d", ref=reference(50)))
    steps(core)
    core.connector.finish("d", KvTransferError("digest", "wrong bytes"))
    (output,) = core.step()
    assert (output.token, output.error.reason) == (None, "digest")
    assert (core.scheduler.blocks.used, core.counters.generated_tokens) == (0, 0)


def test_blocks_of_a_cancelled_pull_are_free_only_after_the_transfer_ended(llama: Llama):
    core = engine(llama)
    core.add(ask("d", ref=reference(50)))
    steps(core)
    core.abort("d")
    steps(core)
    assert core.connector.cancelled == ["d"]
    assert core.scheduler.blocks.used == 4
    core.check_integrity()
    core.connector.finish("d")
    core.step()
    assert core.scheduler.blocks.used == 0


@pytest.mark.parametrize("after", [0, 1, 3], ids=["waiting", "prefilling", "decoding"])
def test_a_client_that_leaves_gives_every_block_back(llama: Llama, after: int):
    core = engine(llama)
    core.add(ask("gone", prompt=tuple(range(5, 205)), max_tokens=100, ignore_eos=True))
    for _ in range(after):
        core.step()
    assert core.abort("gone") is not None
    assert core.scheduler.blocks.used == 0
    core.check_integrity()


def test_a_decode_leg_behind_a_plain_request_is_pulled_not_computed(llama: Llama):
    core = engine(llama)
    core.add(ask("plain", prompt=tuple(range(100, 140))))
    core.add(ask("d", ref=reference(50)))
    steps(core)
    assert [name for name, _, _ in core.connector.fetched] == ["d"]
    assert core.scheduler.pulling.keys() == {"d"}


@pytest.mark.parametrize("leaves", ["waiting", "pulling", "failed", "running"])
def test_a_lease_is_held_from_the_moment_that_its_decode_leg_is_taken_until_it_ends(llama: Llama, leaves: str):
    """Incident: nobody renewed while a decode leg waited for a place; its lease expired, and the prefill was for nothing."""
    core = engine(llama, batch=1)
    if leaves == "waiting":
        core.add(ask("long", prompt=(300, 301), max_tokens=400, ignore_eos=True))
        core.step()
    core.add(ask("d", ref=reference(50)))
    assert core.connector.held == ["d"]
    core.step()
    assert core.sequences["d"].stage == ("waiting" if leaves == "waiting" else "pulling")
    assert core.connector.cancelled == []
    if leaves == "failed":
        core.connector.finish("d", KvTransferError("digest", "wrong bytes"))
        core.step()
    elif leaves == "running":
        core.connector.finish("d")
        steps(core)
    else:
        core.abort("d")
    assert core.connector.cancelled == ([] if leaves == "running" else ["d"])


def test_what_the_side_channel_dropped_is_in_the_metrics(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    core, metrics = engine(llama), EngineMetrics("tiny")
    for dropped in (0, 3):
        monkeypatch.setattr(core.connector, "dropped_frames", lambda count=dropped: count)
        metrics.collect(core)
        assert f'\nfleet:kv_frames_dropped_total{{engine="0",model_name="tiny"}} {dropped}.0\n'.encode() in metrics.exposition()


def test_who_was_not_believed_and_whether_kv_is_guarded_is_in_the_metrics(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    core, metrics = engine(llama), EngineMetrics("tiny")
    for missing, guarded in ((0, False), (3, True)):
        monkeypatch.setattr(core.connector, "strangers", lambda count=missing: {"missing": count, "wrong": 0})
        monkeypatch.setattr(core.connector, "is_guarded", lambda is_so=guarded: is_so)
        metrics.collect(core)
        told, of = metrics.exposition().decode(), 'engine="0",model_name="tiny"'
        assert f'\nfleet:kv_handoff_strangers_total{{{of},reason="missing"}} {missing}.0\n' in told
        assert f"\nfleet:kv_handoff_guarded{{{of}}} {int(guarded)}.0\n" in told


def test_a_reference_shorter_than_the_local_cache_changes_no_token_and_no_counter_falls(llama: Llama):
    core, metrics = engine(llama), EngineMetrics("tiny")
    core.add(ask("first"))
    first = ended(steps(core))["first"]
    metrics.collect(core)
    core.add(ask("short", ref=reference(16)))
    steps(core)
    core.connector.finish("short")
    assert ended(steps(core))["short"] == first
    assert (core.counters.external_hits, core.counters.blocks_received) == (0, 0)
    metrics.collect(core)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_id": ""}, "unprovable"),
        ({"remote_epoch": ""}, "unprovable"),
        ({"digest": ""}, "unprovable"),
        ({"remote_block_ids": ((0, 1, 2, 3),)}, "layout"),
        ({"remote_block_ids": (0, 1, 2)}, "shape"),
        ({"remote_num_tokens": 51}, "shape"),
        ({"remote_num_tokens": 0}, "shape"),
        ({"remote_port": 0}, "address"),
        ({"remote_port": 99_999_999}, "address"),
        ({"remote_port": -1}, "address"),
        ({"remote_host": "a b"}, "address"),
        ({"remote_host": ""}, "address"),
        ({"remote_host": "x" * 300}, "address"),
        ({"remote_host": "12345"}, None),
        ({"remote_host": "fd00::1"}, None),
        ({"remote_host": "[fd00::1]"}, None),
        ({"lease_generation": 2**64}, "bounds"),
        ({"lease_generation": -1}, "bounds"),
        ({"lease_generation": 2**63 - 1}, None),
        ({"lease_id": "x" * 257}, "bounds"),
        ({"lease_id": "a b"}, "bounds"),
        ({"remote_epoch": "x" * 257}, "bounds"),
        ({"remote_engine_id": "\n"}, "bounds"),
        ({"remote_engine_id": ""}, "bounds"),
    ],
)
def test_a_reference_that_cannot_be_proven_or_reached_is_refused_before_it_holds_anything(
    llama: Llama, change, reason: str | None
):
    core = engine(llama)
    asked = ask("d", ref=msgspec.structs.replace(reference(50), **change))
    if reason is None:
        core.add(asked)
        return
    with pytest.raises(KvReferenceError) as caught:
        core.add(asked)
    assert caught.value.reason == reason
    assert not core.sequences
    assert core.scheduler.blocks.used == 0


OTHER = tuple(range(205, 255))
NAMED = {
    "another-prompt": (prompt_name(OTHER, weights=WEIGHTS), {}, "prompt"),
    "another-last-token": (prompt_name((*PROMPT[:-1], 9), weights=WEIGHTS), {}, "prompt"),
    "another-salt": (prompt_name(PROMPT, "", "a", WEIGHTS), {}, "prompt"),
    "salted-and-not": (prompt_name(PROMPT, weights=WEIGHTS), {"cache_salt": "a"}, "prompt"),
    "salt-as-adapter": (prompt_name(PROMPT, "a", "", WEIGHTS), {"cache_salt": "a"}, "prompt"),
    "fewer-tokens": (prompt_name(PROMPT[:49], weights=WEIGHTS), {}, "prompt"),
    "sealed-by-other-weights": (prompt_name(PROMPT, weights="other"), {}, "prompt"),
}


@pytest.mark.parametrize(("name", "change", "reason"), NAMED.values(), ids=NAMED)
def test_a_reference_to_the_kv_of_another_prompt_is_refused(llama: Llama, name: str, change: dict[str, str], reason: str):
    """Incident: a real, unread reference given with another prompt of the same length was answered with 200 and wrong tokens, and
    its blocks were registered under the wrong prompt's names."""
    core = engine(llama)
    with pytest.raises(KvReferenceError) as caught:
        core.add(replace(ask("d", ref=reference(50, prompt=name)), **change))
    assert caught.value.reason == reason
    assert not core.sequences


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"digest": "e"}, KvReferenceError),  # the blocks of another lease under this one
        ({"lease_id": "epoch-1"}, KvTransferError),  # an older prefill worker: no fault of the client's, prefill anew
        ({"adapter": adapter_salt("a", "1")}, KvTransferError),
        ({"weights": "other"}, KvTransferError),  # a branch that moved between two starts: prefill anew
        ({"weights": ""}, KvTransferError),
        ({"weights": "other", "remote_num_tokens": 99}, KvTransferError),  # its tokenizer may be another, too
    ],
    ids=["other-blocks", "older-owner", "adapter", "other-weights", "weights-not-told", "other-weights-and-tokens"],
)
def test_a_lease_is_of_these_bytes_and_says_so(llama: Llama, given: dict[str, str], error: type[Exception]):
    core = engine(llama)
    with pytest.raises(error):
        core.add(ask("d", ref=msgspec.structs.replace(reference(50), **given)))


@pytest.mark.parametrize("length", [16, 50])
def test_what_a_prefill_leg_answers_is_taken_with_its_own_request(llama: Llama, length: int):
    core, other = engine(llama), engine(llama)
    core.add(replace(ask("p", PROMPT[:length], max_tokens=1, keep=True), cache_salt="mine"))
    given = next(output.reference for output in steps(core) if output.finish)
    other.add(replace(ask("d", PROMPT[:length], ref=given), cache_salt="mine"))
    with pytest.raises(KvReferenceError, match="another prompt, or of another cache_salt"):
        other.add(replace(ask("e", PROMPT[:length], ref=given), cache_salt="theirs"))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("a", prompt=()), "the prompt is empty"),
        (ask("a", prompt=tuple(range(3, 510)), max_tokens=8), "maximum context length is 512 tokens"),
        (ask("a", prompt=(1024,)), "prompt holds token ids outside 0..1023"),
        (ask("a", prompt=(-1,)), "prompt holds token ids outside 0..1023"),
        (ask("a", min_tokens=1, stop_token_ids=(99_999,)), "stop_token_ids holds token ids outside 0..1023"),
        (ask("a", min_tokens=1, stop_token_ids=(0, 1, *range(3, 1024))), "the end tokens are the whole vocabulary"),
    ],
    ids=["empty", "too-long", "token-too-big", "token-negative", "stop-token-too-big", "no-token-left"],
)
def test_a_bad_request_is_refused_and_its_neighbour_is_answered(llama: Llama, request_: Sequence, words: str):
    core = engine(llama)
    core.add(ask("good"))
    with pytest.raises(BadRequestError, match=words.replace("..", r"\.\.")):
        core.add(request_)
    assert len(ended(steps(core))["good"]) == 8


def test_the_whole_vocabulary_may_stop_an_answer_that_has_no_least_length(llama: Llama):
    core = engine(llama)
    core.add(ask("a", stop_token_ids=tuple(range(1024))))
    core.add(ask("b", min_tokens=1, stop_token_ids=tuple(range(1, 1024))))  # 0 is left
    answers = ended(steps(core))
    assert (len(answers["a"]), answers["b"][0]) == (1, 0)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_numbers(llama: Llama):
    with pytest.raises(BadRequestError, match="prompt plus output is 58 tokens, the KV pool holds 48"):
        engine(llama, blocks=3).add(ask("a"))


def test_the_waiting_line_is_bounded(llama: Llama):
    core = engine(llama, waiting=2)
    core.add(ask("a"))
    core.add(ask("b"))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        core.add(ask("c"))


def test_the_loop_may_sleep_while_leases_hold_the_pool_and_goes_on_when_they_end(llama: Llama):
    core = engine(llama, blocks=5)
    core.add(ask("p", max_tokens=1, keep=True))
    steps(core)
    core.add(ask("q", prompt=tuple(range(200, 250)), max_tokens=2))
    assert core.step() == []
    assert core.has_work()
    assert not core.progressed
    core.connector.ended.append(("p", "read"))
    assert len(ended(steps(core))["q"]) == 2


def test_preemption_is_counted_and_changes_no_token(llama: Llama):
    def answers(blocks: int):
        core = engine(llama, blocks=blocks)
        for i in range(3):
            core.add(ask(f"r{i}", prompt=tuple(range(5 + i, 60 + i)), max_tokens=40, ignore_eos=True))
        return ended(steps(core)), core.scheduler.preemptions

    roomy, none = answers(64)
    tight, some = answers(12)
    assert (none, some > 0) == (0, True)
    assert tight == roomy


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "left-before"])
def test_the_blocks_of_a_read_that_lingers_are_nobodys_until_it_is_over(llama: Llama, leaves: bool):
    """Incident: a frozen prefill worker went on, and what it wrote was in another request's blocks: wrong tokens, status 200."""
    core = engine(llama, blocks=4)
    core.add(ask("d", ref=reference(50)))
    core.step()
    [(_, _, into)] = core.connector.fetched
    if leaves:
        core.abort("d")
    error = KvTransferError("timeout", "its owner is silent")
    core.connector.done.append(FetchResult("d", error, lingers=True))
    core.add(ask("next", prompt=(7, 8, 9), max_tokens=6))
    outputs = core.step()
    assert [output.sequence.request_id for output in outputs if output.error] == ([] if leaves else ["d"])
    core.check_integrity()
    assert (core.scheduler.pulling, core.scheduler.blocks.used, ended(steps(core))) == ({}, 4, {})
    core._pool[into] = float("nan")
    core.connector.finish("d", error)
    assert ended(steps(core)) == {"next": ended_alone(llama, prompt=(7, 8, 9), max_tokens=6)}
    assert core.counters.failed_transfers == (0 if leaves else 1)
    core.check_integrity()
    assert core.scheduler.blocks.used == 0
