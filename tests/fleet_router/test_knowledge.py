"""Precise knowledge in a router: real ZMQ from the engine's own publisher, a real tokenizer from an agent's route."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.hints import NO_HINTS
from fleet_router.knowledge import NOT_KNOWN, Counted, Knowledge
from fleet_router.request import parse_body
from fleet_router.tokeniser import INLINE_CHARS, MESSAGES_MOST
from fleet_wire.blocks import chain, root_hash
from fleet_wire.endpoints import Endpoint
from fleet_wire.events import BlockStored
from fleet_worker.config import KvSettings, WorkerConfig
from fleet_worker.engine.assemble import build_core
from fleet_worker.engine.blocks import CacheEvent
from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.kvevents import KvEventPublisher
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.engine.text import Text
from fleet_worker.engine.weights import load_weights
from fleet_worker.tinymodel import make_tiny_model
from tests.fleet_router.rig import until

SIZE = 16
CONFIG = RouterConfig(fleet="f", served_name="m", max_input_tokens=100_000)
PROMPT = "The router moves blocks of keys and values between two workers before noon again. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


class Publisher:
    """A worker's events: published when asked to, replays answered all the time."""

    def __init__(self, host: str, root: bytes) -> None:
        self.host, self._root = host, root
        self.engine = KvEventPublisher(host, 5557, 5558, SIZE)

    def store(self, ids: list[int], *, until: int | None = None) -> None:
        parent, changes = None, []
        for i, name in enumerate(chain(self._root, ids, SIZE)):
            if until is not None and i >= until:
                break
            changes.append(CacheEvent(stored=True, name=name, parent=parent, tokens=tuple(ids[i * SIZE : (i + 1) * SIZE])))
            parent = name
        self.engine.publish(changes)

    async def settle(self, check: Callable[[], bool], knowledge: Knowledge, deadline_s: float = 8.0) -> None:
        end = time.monotonic() + deadline_s
        while not check():
            assert time.monotonic() < end, "not within the deadline"
            self.engine.publish([])
            knowledge.tick(time.monotonic())
            await asyncio.sleep(0.01)


async def agent(host: str, folder: Path, *, merges: bool = True, asked: list[str] | None = None) -> asyncio.Server:
    """The one route of an agent that a router asks. `asked`: what it gives is no tokenizer, and each question goes there."""
    files = {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    if not merges:
        made = json.loads(files["tokenizer.json"])
        made["model"]["merges"] = []
        files["tokenizer.json"] = json.dumps(made)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(host)
        body = json.dumps(files if asked is None else {"tokenizer.json": "{}"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, host, 9000)


def endpoint(host: str, uid: str = "w", replay_port: int = 5558) -> Endpoint:
    return Endpoint(
        name=uid, uid=uid, address=host, http_port=1, agent_port=9000, role="decode", tier="t", revision="r", compat="c",
        events_port=5557, replay_port=replay_port,
    )  # fmt: skip


def run(host: str, folder: Path, test: Callable[[Knowledge, Publisher], Awaitable[None]], replay_port: int = 5558) -> None:
    async def go() -> None:
        server, publisher, said = await agent(host, folder), Publisher(host, root_hash("c", SIZE)), []
        knowledge = Knowledge(time.monotonic, said.append)
        try:
            knowledge.follow([(endpoint(host, replay_port=replay_port), 1)])
            await test(knowledge, publisher)
        finally:
            await asyncio.to_thread(knowledge.stop)
            publisher.engine.close()
            server.close()

    asyncio.run(go())


async def counted(knowledge: Knowledge, body: dict, *, chat: bool = False, salt: str = "") -> Counted:
    ask = parse_body(msgspec.json.encode({"model": "m", **body}), chat, CONFIG)
    later: asyncio.Future[Counted] = asyncio.get_running_loop().create_future()
    return knowledge.count(ask, chat, later.set_result, salt) or await asyncio.wait_for(later, 10)


def ready(knowledge: Knowledge) -> bool:
    return knowledge._tokeniser is not None and knowledge.believed.trusted == 1


def test_a_prompt_is_known_where_the_engine_said_so(folder: Path):
    text = Text(folder)

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        ids = text.encode(PROMPT)
        publisher.store(ids)  # before anybody listens: the replay has it
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) > 3, knowledge)
        found = await counted(knowledge, {"prompt": PROMPT})
        assert found.tokens == len(ids)
        whole = len(ids) // SIZE * SIZE
        hints = knowledge.hints(found, NO_HINTS)
        assert (hints.tokens, hints.blocks, hints.precise) == (len(ids), ((whole, 1),), 1)
        as_ids = await counted(knowledge, {"prompt": ids})
        assert knowledge.hints(as_ids, NO_HINTS).blocks == ((whole, 1),)
        for field, value in (("add_special_tokens", False), ("truncate_prompt_tokens", 8)):
            for prompt in (PROMPT, ids):  # the engine's are others: it would owe us events of ours
                assert await counted(knowledge, {"prompt": prompt, field: value}) == NOT_KNOWN
        other = await counted(knowledge, {"prompt": "Something else. " + PROMPT})
        assert knowledge.hints(other, NO_HINTS).blocks == ()
        assert knowledge.hints(NOT_KNOWN, NO_HINTS) is NO_HINTS

    run("127.84.0.1", folder, go)


def test_a_worker_without_a_replay_port_is_believed_in_what_it_says(folder: Path):
    """vLLM's default, and all that other engines have: none of its events was ever believed."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        await publisher.settle(lambda: knowledge.believed.state("w") == "partial", knowledge)
        ids = list(range(64))
        publisher.store(ids)
        await publisher.settle(lambda: len(knowledge.believed.index) == 4, knowledge, deadline_s=4.0)
        hints = knowledge.hints(await counted(knowledge, {"prompt": ids}), NO_HINTS)
        assert (hints.blocks, hints.precise) == (((64, 1),), 0)

    run("127.84.0.19", folder, go, replay_port=0)


def test_who_holds_more_than_there_is_room_for_is_left_to_the_approximate_index_as_well(folder: Path):
    """Of a large cache the first blocks alone were known, for ever, and nothing else was believed."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        ids, knowledge.believed.index._capacity = list(range(4 * SIZE)), 3
        await publisher.settle(lambda: knowledge.believed.trusted == 1, knowledge)
        for blocks, trusted in ((3, 1), (4, 0)):
            publisher.store(ids, until=blocks)
            await publisher.settle(lambda: len(knowledge.believed.index) == 3, knowledge)
            await publisher.settle(lambda: knowledge.believed.index.lacking == 1 - trusted, knowledge)  # noqa: B023
            hints = knowledge.hints(await counted(knowledge, {"prompt": ids}), NO_HINTS)
            assert (hints.blocks, hints.precise) == (((3 * SIZE, 1),), trusted)
            state = "live" if trusted else "lacking"  # which was live as well, while it was not believed
            assert f'fleet_router_kv_streams{{state="{state}"}} 1' in knowledge.lines()

    run("127.84.0.31", folder, go)


def test_a_conversation_is_rendered_as_the_engine_does(folder: Path):
    text = Text(folder)
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        plain = [messages[0], {"role": "user", "content": "Why?"}]
        ids = text.encode(text.render_chat(plain), add_special=False)
        publisher.store(ids)
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) > 3, knowledge)
        found = await counted(knowledge, {"messages": messages}, chat=True)
        assert (found.tokens, knowledge.hints(found, NO_HINTS).blocks) == (len(ids), ((len(ids) // SIZE * SIZE, 1),))
        for field, value in (("tools", []), ("continue_final_message", True), ("reasoning_effort", "low")):
            assert await counted(knowledge, {"messages": messages, field: value}, chat=True) == NOT_KNOWN
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
        assert await counted(knowledge, {"messages": picture}, chat=True) == NOT_KNOWN

    run("127.84.0.2", folder, go)


def test_long_text_is_encoded_beside_the_loop_and_its_beginning_only_once(folder: Path):
    text = Text(folder)
    long = PROMPT * 40

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        publisher.store(text.encode("any block at all " * 20))
        await publisher.settle(lambda: ready(knowledge) and bool(knowledge.believed.index.layouts()), knowledge)
        ask = parse_body(msgspec.json.encode({"model": "m", "prompt": long}), False, CONFIG)
        later: asyncio.Future[Counted] = asyncio.get_running_loop().create_future()
        assert knowledge.count(ask, False, later.set_result) is None
        stalls, at = [], time.perf_counter()
        while not later.done():
            await asyncio.sleep(0)
            stalls.append(time.perf_counter() - at)
            at = time.perf_counter()
        found = later.result()
        assert found.tokens == len(text.encode(long))
        more = parse_body(msgspec.json.encode({"model": "m", "prompt": long + " And so on."}), False, CONFIG)
        reading = knowledge.prefixes.read(long + " And so on.", knowledge._tokeniser.lead)
        assert 0 < reading.missing_chars <= INLINE_CHARS + 1500
        assert len(reading.missing) == 1
        again = knowledge.count(more, False, later.set_exception)
        assert again is None or again.tokens > found.tokens

    run("127.84.0.3", folder, go)


def test_a_worker_that_falls_silent_is_not_believed_until_it_speaks(folder: Path):
    text = Text(folder)

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        ids = text.encode(PROMPT)
        publisher.store(ids, until=2)
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) == 2, knowledge)
        found = await counted(knowledge, {"prompt": PROMPT})
        knowledge.answered("w", found)  # it computed all of it, and says nothing
        knowledge.tick(time.monotonic() + 3.0)
        assert knowledge.believed.trusted == 1
        knowledge.tick(time.monotonic() + 6.0)
        assert (knowledge.believed.trusted, knowledge.believed.state("w")) == (0, "stale")
        publisher.store(ids)
        await publisher.settle(lambda: knowledge.believed.trusted == 1, knowledge)
        assert any('state="live"' in line for line in knowledge.lines())

    run("127.84.0.4", folder, go)


def test_a_restarted_worker_begins_anew_and_one_that_left_is_forgotten(folder: Path):
    text = Text(folder)

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        ids = text.encode(PROMPT)
        publisher.store(ids)
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) > 3, knowledge)
        publisher.engine.close()
        await until(lambda: not knowledge.believed.trusted)  # the connection broke: nothing is believed
        assert len(knowledge.believed.index) == 0
        publisher.engine = KvEventPublisher(publisher.host, 5557, 5558, SIZE)
        publisher.store(ids, until=1)
        await publisher.settle(lambda: knowledge.believed.trusted == 1 and len(knowledge.believed.index) == 1, knowledge)
        knowledge.follow([])
        assert (len(knowledge.believed.index), knowledge.believed.state("w")) == (0, None)

    run("127.84.0.5", folder, go)


def test_a_dead_agent_keeps_no_tokenizer_from_the_router_and_a_useless_one_is_not_read_again_and_again(folder: Path):
    """The first worker alone was asked, for ever; and each five seconds, also when what it gave was nothing to be used."""

    async def go() -> None:
        said, asked, now = list[str](), list[str](), time.monotonic()
        useless, good = await agent("127.84.0.34", folder, asked=asked), await agent("127.84.0.35", folder)
        knowledge = Knowledge(time.monotonic, said.append)
        try:
            knowledge.follow([(endpoint("127.84.0.34", "a"), 1)])
            for later_s in range(0, 300, 6):
                knowledge.tick(now + later_s)
                await until(lambda: knowledge._fetching is None)
            assert 3 <= len(asked) <= 8
            knowledge.follow([(endpoint("127.84.0.36", "gone"), 1), (endpoint("127.84.0.35", "b"), 2)])
            for later_s in range(300, 324, 6):
                knowledge.tick(now + later_s)
                await until(lambda: knowledge._fetching is None)
            assert knowledge._tokeniser is not None
        finally:
            await asyncio.to_thread(knowledge.stop)
            useless.close()
            good.close()

    asyncio.run(go())


def test_a_fleet_that_gets_another_model_gets_its_tokenizer(folder: Path):
    """Prompts were counted with the first model's for ever, and refused as too long by it."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        await publisher.settle(lambda: ready(knowledge), knowledge)
        before = await counted(knowledge, {"prompt": PROMPT})
        other = await agent("127.84.0.33", folder, merges=False)
        knowledge.follow([(endpoint(publisher.host), 1), (endpoint("127.84.0.33", "x"), 2)])
        knowledge.tick(time.monotonic() + 60.0)
        assert (await counted(knowledge, {"prompt": PROMPT})).tokens == before.tokens == len(Text(folder).encode(PROMPT))
        knowledge.follow([(msgspec.structs.replace(endpoint("127.84.0.33", "x"), compat="d"), 2)])
        knowledge.tick(time.monotonic() + 120.0)
        assert await counted(knowledge, {"prompt": PROMPT}) == NOT_KNOWN
        await until(lambda: knowledge._tokeniser is not None)
        assert (await counted(knowledge, {"prompt": PROMPT})).tokens == len(PROMPT.encode())
        other.close()

    run("127.84.0.32", folder, go)


@pytest.mark.parametrize("same", [True, False], ids=["the same tokenizer", "another one"])
def test_of_a_tier_with_another_tokenizer_the_approximate_index_is_believed(folder: Path, same: bool):
    """A cascade: of its large tier nothing was known of any text, and what was sent where was not believed either."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        host = "127.84.0.43"
        other, large = await agent(host, folder, merges=same), Publisher(host, root_hash("d", SIZE))
        await publisher.settle(lambda: ready(knowledge), knowledge)
        workers = [(endpoint(publisher.host), 1), (msgspec.structs.replace(endpoint(host, "x"), compat="d"), 2)]
        knowledge.follow(workers)
        await large.settle(lambda: knowledge.believed.trusted == 3, knowledge)
        ids = Text(folder).encode(PROMPT)
        publisher.store(ids)
        large.store(ids)
        await publisher.settle(lambda: len(knowledge.believed.index) == 2 * (len(ids) // SIZE), knowledge)
        found = await counted(knowledge, {"prompt": PROMPT})
        assert knowledge.hints(found, NO_HINTS).precise == 1  # what tokenizer it has is not known yet
        knowledge.tick(time.monotonic() + 60.0)
        await until(lambda: knowledge._fetching is None)
        found, depth = await counted(knowledge, {"prompt": PROMPT}), len(ids) // SIZE * SIZE
        hints = knowledge.hints(found, NO_HINTS)
        assert (hints.precise, sum(mask for _, mask in hints.blocks)) == ((3, 3) if same else (1, 1))
        as_ids = await counted(knowledge, {"prompt": ids})
        assert knowledge.hints(as_ids, NO_HINTS).precise == 3
        knowledge.answered("x", await counted(knowledge, {"prompt": PROMPT + "And more of it. " * 20}))
        knowledge.tick(time.monotonic() + 120.0)
        assert (knowledge.believed.trusted == 1) == same  # it owes events of blocks that we know the names of
        assert hints.blocks[0][0] == depth
        knowledge.follow(workers[1:])
        knowledge.tick(time.monotonic() + 240.0)
        assert (knowledge._tokeniser is not None) == same
        await until(lambda: knowledge._fetching is None)
        large.engine.close()
        other.close()

    run("127.84.0.42", folder, go)


def test_a_fleet_that_rested_at_zero_has_its_tokenizer_when_it_wakes(folder: Path):
    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        await publisher.settle(lambda: ready(knowledge), knowledge)
        knowledge.follow([])
        knowledge.tick(time.monotonic())
        knowledge.follow([(endpoint(publisher.host), 1)])
        knowledge.tick(time.monotonic())
        assert (await counted(knowledge, {"prompt": PROMPT})).tokens == len(Text(folder).encode(PROMPT))
        assert knowledge._bits_alike == 1

    run("127.84.0.45", folder, go)


def test_long_prompts_wait_for_no_minute_of_encoding(folder: Path):
    """64 of a megabyte each did: longer than a first token may take."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        await publisher.settle(lambda: ready(knowledge), knowledge)
        tokeniser, may = knowledge._tokeniser, threading.Event()
        assert tokeniser is not None
        tokeniser.encode = lambda texts: [[1]] * (len(texts) * may.wait(5.0))  # type: ignore[method-assign]
        found = list[Counted]()

        def asks(number: int) -> Counted | None:
            body = msgspec.json.encode({"model": "m", "prompt": f"{number} " + "a few words " * 50_000})
            return knowledge.count(parse_body(body, False, wide), False, found.append)

        wide = msgspec.structs.replace(CONFIG, max_input_tokens=1_000_000)
        told = [asks(number) for number in range(4)]
        may.set()
        assert told == [None, None, NOT_KNOWN, NOT_KNOWN]
        await until(lambda: len(found) == 2)
        assert NOT_KNOWN not in found
        assert asks(5) is None
        await until(lambda: len(found) == 3)

    run("127.84.0.44", folder, go)


def test_a_conversation_of_very_many_messages_is_not_rendered_on_the_loop(folder: Path):
    """20,000 of them held everybody up for 57 ms, by a longer template for 180 ms."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        await publisher.settle(lambda: ready(knowledge), knowledge)
        tokeniser = knowledge._tokeniser
        assert tokeniser is not None
        rendered = list[int]()
        tokeniser._template = SimpleNamespace(
            takes_parts=False, render=lambda _, messages, **__: rendered.append(len(messages)) or "text"
        )  # fmt: skip
        for count, known in ((MESSAGES_MOST, True), (MESSAGES_MOST + 1, False), (20_000, False)):
            found = await counted(knowledge, {"messages": [{"role": "user", "content": ""}] * count}, chat=True)
            assert (found != NOT_KNOWN) == known
        assert rendered == [MESSAGES_MOST]

    run("127.84.0.41", folder, go)


def engine(folder: Path) -> EngineCore:
    """The torch engine itself with a pool of 40 blocks."""
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model=str(folder), served_name="m",
        max_model_len=512, kv=KvSettings(block_tokens=SIZE),
    )  # fmt: skip
    architecture = read_config(folder)
    llama = Llama(architecture, load_weights(folder, architecture), SIZE)
    config = msgspec.structs.replace(config, kv=KvSettings(block_tokens=SIZE, cache_bytes=40 * llama.new_pool(1).nbytes))
    return build_core(config, llama, architecture.eos_ids)[0]


def compute(core: EngineCore, publisher: Publisher, ids: list[int], number: int, salt: str = "") -> None:
    """One request from start to end; what the cache does is published."""
    sampling = Sampling(max_tokens=3, temperature=0.0)
    core.add(Sequence(f"r{number}", tuple(ids), sampling, 1, 0.0, False, None, cache_salt=salt))
    while core.has_work():
        core.step()
        publisher.engine.publish(core.take_cache_events())


def test_what_the_torch_engine_computes_and_evicts_is_what_the_router_knows(folder: Path):
    """Real engine, real events, real tokenizer: the router's names are the engine's, block by block, also after evictions."""
    text = Text(folder)

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        core = engine(folder)
        prompts = [f"{number} {PROMPT} {number}" for number in range(6)]
        for number, prompt in enumerate(prompts):
            compute(core, publisher, text.encode(prompt), number)
        held = core.scheduler.blocks
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) == len(held._by_name), knowledge)
        evicted = 0
        for prompt in prompts:
            found = knowledge.hints(await counted(knowledge, {"prompt": prompt}), NO_HINTS)
            names = list(chain(root_hash("c", SIZE), text.encode(prompt), SIZE))
            here = len(held.find(names))
            evicted += here < len(names)
            assert found.blocks == (((here * SIZE), 1),) if here else found.blocks == ()
        assert 0 < evicted < len(prompts)  # the pool holds some of them, not all

    run("127.84.0.6", folder, go)


def test_a_tenant_is_told_of_its_own_blocks_and_of_nobody_elses(folder: Path):
    """The real engine computes one prompt for two tenants and one for nobody: each finds its own."""
    text = Text(folder)

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        core, ids = engine(folder), text.encode(PROMPT)
        compute(core, publisher, ids[: 3 * SIZE + 1], 1, "a" * 32)
        compute(core, publisher, ids[: 5 * SIZE + 1], 2, "b" * 32)
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) == 8, knowledge)
        for salt, blocks in (("a" * 32, 3), ("b" * 32, 5), ("c" * 32, 0), ("", 0)):
            for prompt in (PROMPT, ids):
                asked = await counted(knowledge, {"prompt": prompt}, salt=salt)
                found = knowledge.hints(asked, NO_HINTS)
                assert (found.blocks, found.precise) == (((blocks * SIZE, 1),) if blocks else (), 1)
        adapted = msgspec.structs.replace(CONFIG, adapters=("billing",))
        ask = parse_body(msgspec.json.encode({"model": "billing", "prompt": PROMPT}), False, adapted)
        assert knowledge.count(ask, False, lambda _: None, "a" * 32) is NOT_KNOWN

    run("127.84.0.9", folder, go)


def test_a_worker_whose_names_do_not_tell_tenants_apart_is_left_to_the_approximate_index(folder: Path):
    """vLLM's events: hashes of its own, tokens, no salt."""

    async def go(knowledge: Knowledge, publisher: Publisher) -> None:
        ids = Text(folder).encode(PROMPT)
        publisher.store(ids)
        await publisher.settle(lambda: ready(knowledge) and len(knowledge.believed.index) > 3, knowledge)
        index, now = knowledge.believed.index, time.monotonic()
        index.clear("w")
        index.apply("w", [BlockStored([1001], None, ids[:SIZE], SIZE, None, "GPU", None)])
        salted, plain = await counted(knowledge, {"prompt": PROMPT}, salt="a" * 32), await counted(knowledge, {"prompt": PROMPT})
        assert knowledge.hints(plain, NO_HINTS).blocks == ((SIZE, 1),)
        found = knowledge.hints(salted, NO_HINTS)
        assert (found.blocks, found.precise) == ((), 0)
        for second in range(30):  # it owes a tenant's prompt no event that we would know
            knowledge.answered("w", salted)
            knowledge.believed.check(now + second)
        assert knowledge.believed.trusted == 1

    run("127.84.0.10", folder, go)
