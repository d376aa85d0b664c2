"""A lease that nobody heard of ends at once: its blocks are the prefill worker's most wanted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.server import EngineServer
from fleet_worker.transfer.base import KvTransferError
from tests.fleet_worker.engine.test_core import ask, engine, reference, steps
from tests.fleet_worker.engine.test_server import CONFIG, TEXT, body, until


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


class Caller:
    """One request for a prefill leg, as uvicorn hands it over; `leave` is its connection's end."""

    def __init__(self, **asked: Any) -> None:
        self._body: bytes | None = json.dumps(body(kv_transfer_params={"do_remote_decode": True}, **asked)).encode()
        self._left = asyncio.Event()
        self.scope = {
            "type": "http", "path": "/v1/completions", "raw_path": b"/v1/completions", "method": "POST", "headers": [],
            "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http", "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        self.heard = b""

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            given, self._body = self._body, None
            return {"type": "http.request", "body": given}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.heard += message.get("body", b"")

    def leave(self) -> None:
        self._left.set()


async def answered(llama: Llama, caller: Caller, leave: str) -> tuple[list[str], EngineCore]:
    """The leases given back, when all tokens of the request come in one turn of the server's loop."""
    core = engine(llama)
    given = released(core)
    loop = EngineLoop(core, lambda _: None, lambda _: None)
    loop._server_loop = asyncio.get_running_loop()
    app = EngineServer(CONFIG, loop, TEXT, EngineMetrics("tiny")).app()
    serving = asyncio.create_task(app(caller.scope, caller.receive, caller.send))  # type: ignore[arg-type]
    await until(lambda: bool(loop._inbox))
    loop._take()
    outputs = steps(core)
    if leave == "before":
        caller.leave()
    loop._put([(output.sequence.request_id, output) for output in outputs])
    if leave == "after":
        caller.leave()
    await serving
    loop._take()
    return given, core


@pytest.mark.parametrize("leave", ["before", "after", ""], ids=["leaves-before", "leaves-after", "stays"])
def test_a_client_that_is_gone_when_its_finished_prefill_is_answered_leaves_no_lease(llama: Llama, leave: str):
    """Incident: its tokens were queued, nothing was left to cancel, and the lease in the answer waited until it expired."""

    async def scenario() -> None:
        caller = Caller(max_tokens=1)
        given, core = await answered(llama, caller, leave)
        assert len(core.leased_requests()) == 1
        assert len(given) == bool(leave)
        assert leave or json.loads(caller.heard)["kv_transfer_params"]["lease_id"]

    asyncio.run(scenario())


@pytest.mark.parametrize("leave", ["before", "after", ""], ids=["leaves-before", "leaves-after", "stays"])
def test_a_stream_that_is_cut_before_its_lease_is_told_leaves_none(llama: Llama, leave: str):
    async def scenario() -> None:
        caller = Caller(max_tokens=3, stream=True)
        given, core = await answered(llama, caller, leave)
        assert len(core.leased_requests()) == 1
        assert len(given) == bool(leave)
        assert leave or b'"lease_id":' in caller.heard

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_met_when_the_engine_is_at_its_end_already_leaves_no_lease(llama: Llama, stream: bool):
    """The lease is in the last output, which nobody reads any more."""

    async def scenario() -> None:
        whole = Caller(max_tokens=8, ignore_eos=True)
        await answered(llama, whole, "")
        text = json.loads(whole.heard)["choices"][0]["text"]
        given, core = await answered(llama, Caller(max_tokens=8, ignore_eos=True, stop=text[0], stream=stream), "")
        assert len(core.leased_requests()) == len(given) == 1

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
