"""A decode leg from its pull to its end, by the engine's own books: queues, counters, which blocks are read."""

from __future__ import annotations

import pytest

from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.llama import Llama
from fleet_worker.transfer.base import FetchResult, KvReferenceError, KvTransferError
from tests.fleet_worker.engine.test_core import BLOCK, PROMPT, ScriptedConnector, ask, engine, reference, steps

PROMPT_BLOCKS = 4


def connector(core: EngineCore) -> ScriptedConnector:
    assert isinstance(core.connector, ScriptedConnector)
    return core.connector


def is_empty(core: EngineCore) -> bool:
    """Nobody is known any more, and the request's name is free."""
    core.check_integrity()
    return not (core.sequences or core.scheduler.pulling or core.scheduler.running or core.scheduler.blocks.used)


@pytest.mark.parametrize("nbytes", [1024, 0], ids=["moved", "nothing-moved"])
def test_a_pull_is_counted_once_and_leaves_its_queue_when_it_is_proven(llama: Llama, nbytes: int):
    core = engine(llama, batch=1)
    core.add(ask("d", ref=reference(len(PROMPT))))
    steps(core)
    counted = core.counters
    assert (counted.external_queries, counted.external_hits) == (len(PROMPT), 0)
    connector(core).done.append(FetchResult("d", None, nbytes, 0.1, 1))
    core._poll_connector()
    assert (list(core.scheduler.pulling), [one.request_id for one in core.scheduler.running]) == ([], ["d"])
    assert (counted.external_hits, counted.blocks_received) == (len(PROMPT), PROMPT_BLOCKS)
    assert len(counted.fetches) == (nbytes > 0)
    steps(core)
    assert counted.generated_tokens == 8
    assert dict(counted.finished) == {"length": 1}
    assert is_empty(core)
    core.add(ask("d", prompt=(7,), max_tokens=1))  # the place, the name, and a prompt of one token
    assert [output.finish for output in steps(core)] == ["length"]


def test_blocks_that_are_there_are_not_read(llama: Llama):
    core = engine(llama)
    core.add(ask("here", prompt=PROMPT[: 2 * BLOCK + 1], max_tokens=1))
    steps(core)
    core.add(ask("d", ref=reference(len(PROMPT))))
    steps(core)
    ((name, skip, into),) = connector(core).fetched
    assert (name, skip, into) == ("d", 2, core.sequences["d"].table[2:PROMPT_BLOCKS])
    connector(core).finish("d")
    steps(core)
    assert (core.counters.external_hits, core.counters.blocks_received) == (len(PROMPT) - 2 * BLOCK, PROMPT_BLOCKS - 2)


def test_a_pull_that_failed_is_counted_and_forgotten(llama: Llama):
    core = engine(llama)
    core.add(ask("d", ref=reference(len(PROMPT))))
    steps(core)
    connector(core).finish("d", KvTransferError("digest", "other bytes"))
    (output,) = steps(core)
    assert isinstance(output.error, KvTransferError)
    assert (core.counters.failed_transfers, dict(core.counters.finished)) == (1, {"error": 1})
    assert connector(core).cancelled == ["d"], "its lease is renewed no more"
    assert is_empty(core)
    core.add(ask("d"))


def test_a_pull_that_cannot_begin_ends_its_request_with_the_reason(llama: Llama, monkeypatch: pytest.MonkeyPatch):
    core = engine(llama)

    def refuses(*_: object) -> None:
        raise KvReferenceError("range", "no such block")

    monkeypatch.setattr(core.connector, "fetch", refuses)
    core.add(ask("d", ref=reference(len(PROMPT))))
    core.add(ask("next", max_tokens=1))
    outputs = steps(core)
    assert {output.sequence.request_id: str(output.error or output.finish) for output in outputs} == {
        "d": "no such block",
        "next": "length",
    }
    assert is_empty(core)
