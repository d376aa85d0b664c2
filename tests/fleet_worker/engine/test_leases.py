"""A lease that nobody heard of ends at once: its blocks are the prefill worker's most wanted."""

from __future__ import annotations

import asyncio

import pytest

from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.transfer.base import KvTransferError
from tests.fleet_worker.engine.test_core import ask, engine, reference, steps


def released(core: EngineCore) -> list[str]:
    """Lease ids given back from now on."""
    found: list[str] = []
    core.connector.release = lambda lease_id: found.append(lease_id) or True  # type: ignore[method-assign,union-attr]
    return found


@pytest.mark.parametrize("heard", [False, True], ids=["on-its-way", "put-in-its-queue"])
def test_a_client_that_leaves_as_its_prefill_leg_ends_leaves_no_lease(llama: Llama, heard: bool):
    """Incident: cancel() came after the engine had ended the request: the lease stayed until it expired."""

    async def scenario() -> None:
        core = engine(llama)
        given = released(core)
        loop = EngineLoop(core, lambda _: None, lambda _: None)
        loop._server_loop = asyncio.get_running_loop()
        sink = loop.submit(ask("p", max_tokens=1, keep=True))
        loop._take()
        loop._deliver(core.step())
        if heard:
            await sink.get()
        loop.cancel("p")
        loop._take()
        assert core.leased_requests() == ["p"]  # until the connector says that it is over
        assert len(given) == (0 if heard else 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("engine_knows", [False, True], ids=["still-running", "ended-meanwhile"])
def test_a_prefill_leg_that_ends_by_a_stop_string_keeps_no_lease(llama: Llama, engine_knows: bool):
    async def scenario() -> None:
        core = engine(llama)
        given = released(core)
        loop = EngineLoop(core, lambda _: None, lambda _: None)
        loop._server_loop = asyncio.get_running_loop()
        loop.submit(ask("p", max_tokens=3, keep=True))
        loop._take()
        core.step()
        if engine_knows:
            steps(core)
        loop.complete("p")
        loop._take()
        assert len(given) == len(core.leased_requests()) == engine_knows
        if not engine_knows:
            assert core.scheduler.blocks.used == 0
        assert core.counters.finished == {"length" if engine_knows else "stop": 1}

    asyncio.run(scenario())


def test_more_leases_than_there_may_be_end_nothing(llama: Llama):
    core = engine(llama)

    def full(*_: object) -> None:
        raise OverflowError("65536 leases are open")

    core.connector.grant = full  # type: ignore[method-assign,union-attr,assignment]
    core.add(ask("p", max_tokens=1, keep=True))
    (output,) = steps(core)
    assert (output.finish, output.reference, core.leased_requests()) == ("length", None, [])
    assert core.scheduler.blocks.used == 0
    core.check_integrity()


def test_a_pull_takes_a_place_in_the_batch(llama: Llama):
    core = engine(llama, batch=2)
    for name in "abc":
        core.add(ask(name, ref=reference(50)))
    core.step()
    assert core.scheduler.pulling.keys() == {"a", "b"}
    core.connector.finish("a", KvTransferError("read", "gone"))  # type: ignore[union-attr]
    core.step()
    assert core.scheduler.pulling.keys() == {"b", "c"}


def test_what_was_computed_again_after_a_preemption_counts_as_no_hit(llama: Llama):
    """Incident: usage.cached_tokens was larger than the prompt."""
    core = engine(llama, blocks=14)
    for name, first in (("a", 100), ("b", 300)):
        core.add(ask(name, tuple(range(first, first + 40)), max_tokens=120, ignore_eos=True))
    sequences = {output.sequence.request_id: output.sequence for output in steps(core, 3000)}
    assert core.scheduler.preemptions > 0
    assert [sequence.cached_tokens for sequence in sequences.values()] == [0, 0]
    assert (core.scheduler.prefix_hits, core.scheduler.prefix_queries) == (0, 80)
