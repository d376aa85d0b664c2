"""A request whose numbers are not finite fails alone: neither who shares its step nor who has its blocks next is hurt."""

from __future__ import annotations

import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.weights import load_weights
from fleet_worker.transfer.base import KvTransferError
from tests.fleet_worker.engine.conftest import BLOCK
from tests.fleet_worker.engine.test_core import PROMPT, ask, ended, ended_alone, engine, reference, steps


class Spoiling:
    """The model, whose numbers for sequences of one first prompt token are not finite from position `since` on."""

    def __init__(self, model: Llama, first: int, since: int) -> None:
        self._model, self._first, self._since = model, first, since
        self.config, self.block_tokens, self.weights_digest = model.config, model.block_tokens, model.weights_digest
        self.spoilt: set[int] = set()

    def forward(self, tokens, chunks, pool):
        logits, at = self._model.forward(tokens, chunks, pool), 0
        for row, chunk in enumerate(chunks):
            if chunk.start == 0 and tokens[at] == self._first:
                self.spoilt.add(chunk.table[0])
            if chunk.table[0] in self.spoilt and chunk.start + chunk.count > self._since:
                logits[row] = float("nan")
            at += chunk.count
        return logits


@pytest.mark.parametrize("since", [0, 52], ids=["first-token", "third-token"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_numbers_are_not_finite_fails_alone_and_its_kv_is_found_by_nobody(llama, since: int, temperature: float):
    """Incident: one request that could not be sampled ended the engine, and with it everybody's request."""
    core = engine(llama)
    core._model = Spoiling(llama, 900, since)
    core.add(ask("bad", prompt=(900, *PROMPT[1:]), temperature=temperature))
    core.add(ask("good"))
    outputs = steps(core)
    assert [output.sequence.request_id for output in outputs if output.error] == ["bad"]
    assert ended(outputs) == {"good": ended_alone(llama)}
    assert core.counters.finished == {"error": 1, "length": 1}
    core.check_integrity()
    stored = {event.name: event for event in core.take_cache_events() if event.stored}
    spoilt = {name for name, event in stored.items() if event.tokens and event.tokens[0] == 900}
    assert spoilt
    assert not any(core.scheduler.blocks.find([name]) for name in spoilt)


@pytest.fixture
def overflowing(llama: Llama) -> Llama:
    """The model, of whose token 900 everything that it computes is not a number."""
    weights = dict(load_weights(tiny_model(), llama.config))
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][900] = float("nan")
    return Llama(llama.config, weights, BLOCK)


@pytest.mark.parametrize("length", [50, 200], ids=["one-step", "in-chunks"])
def test_whoever_has_the_blocks_of_a_spoilt_request_next_is_answered(llama: Llama, overflowing: Llama, length: int):
    """Incident: one such request failed all who came after it: a block's last places hold what its last owner left, and no number
    has the weight 0."""
    core = engine(overflowing, blocks=14)
    core.add(ask("bad", prompt=(900, *range(length - 1))))
    core.step()
    core.abort("bad")  # its client does not wait for the end
    for name in "abcdefgh":
        core.add(ask(name, prompt=(7, 8, ord(name)), max_tokens=20))
    outputs = steps(core)
    assert not [output.sequence.request_id for output in outputs if output.error]
    found = ended(outputs)
    for name in "abcdefgh":
        assert found[name] == ended_alone(llama, prompt=(7, 8, ord(name)), max_tokens=20)
    core.check_integrity()


def test_a_spoilt_request_fails_nobody_who_shares_its_step(llama: Llama, overflowing: Llama):
    """Incident: shorter tables of a batch were filled up with block 0, whoever had it."""
    core = engine(overflowing, blocks=16)
    core.add(ask("first", prompt=(4, 5), max_tokens=1))  # gives block 0 back
    core.add(ask("long"))
    core.add(ask("short", prompt=(7, 8, 9), max_tokens=6))
    outputs = [*core.step(), *core.step()]
    core.add(ask("bad", prompt=(900, 4, 5)))
    outputs += steps(core)
    assert [output.sequence.request_id for output in outputs if output.error] == ["bad"]
    assert ended(outputs)["short"] == ended_alone(llama, prompt=(7, 8, 9), max_tokens=6)


def test_what_a_failed_pull_wrote_is_nobodys_number(llama: Llama):
    core = engine(llama, blocks=4)
    core.add(ask("d", ref=reference(50)))
    core.step()
    [(_, _, into)] = core.connector.fetched
    core._pool[into] = float("nan")
    core.connector.finish("d", KvTransferError("digest", "other bytes"))
    core.add(ask("next", prompt=(7, 8, 9), max_tokens=6))
    outputs = steps(core)
    assert [output.sequence.request_id for output in outputs if output.error] == ["d"]
    assert ended(outputs)["next"] == ended_alone(llama, prompt=(7, 8, 9), max_tokens=6)


def test_what_a_cancelled_pull_wrote_is_nobodys_number(llama: Llama):
    """As above, and its client had left: that one's blocks came back as they were. What the cache gave it is nobody's to wipe."""
    core = engine(llama, blocks=4)
    core.add(ask("before", prompt=PROMPT[:BLOCK], max_tokens=2))
    steps(core)
    [cached] = core.scheduler.blocks.find([event.name for event in core.take_cache_events() if event.stored])
    core.add(ask("d", ref=reference(50)))
    core.step()
    [(_, _, into)] = core.connector.fetched
    assert cached not in into
    core._pool[into] = float("nan")
    core.abort("d")
    core.connector.finish("d", KvTransferError("digest", "other bytes"))
    core.step()
    core.check_integrity()
    assert core._pool[cached].any()
    core.add(ask("next", prompt=(7, 8, 9), max_tokens=6))
    outputs = steps(core)
    assert ended(outputs) == {"next": ended_alone(llama, prompt=(7, 8, 9), max_tokens=6)}
