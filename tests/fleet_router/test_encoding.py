"""A tokenizer whose pattern takes too long: nobody waits for it, and nobody's streams stand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from fleet_router.encoding import ENDLESS_S, LATE_S, SLOW_S, WAITING_CHARS_MOST, WAITING_MOST, Encoding, beside
from fleet_router.knowledge import NOT_KNOWN, Knowledge
from fleet_router.tokeniser import PROBE_CHARS, Tokeniser, UnreadableError
from fleet_worker.tinymodel import make_tiny_model
from tests.fleet_router.rig import CONFIG, Rig, ask, until
from tests.fleet_router.rig import run as run_router
from tests.fleet_router.test_knowledge import Publisher, counted, endpoint, ready, root_hash

TEXT = ["abc"]
IDS = [[1, 2]]


class Encodes:
    """A tokenizer that takes as long as it is told."""

    def __init__(self, burns_s: float = 0.0, held: threading.Event | None = None, error: Exception | None = None) -> None:
        self._burns_s, self._held, self._error = burns_s, held, error
        self.began = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.began += 1
        until_s = time.thread_time() + self._burns_s
        while time.thread_time() < until_s:
            pass
        if self._held is not None:
            self._held.wait(10)
        if self._error is not None:
            raise self._error
        return IDS


def run(test: Callable[[Encoding, list[str]], Awaitable[None]]) -> None:
    async def go() -> None:
        told: list[str] = []
        encoding = Encoding(lambda _, why: told.append(why), lambda _: None)
        try:
            await test(encoding, told)
        finally:
            encoding.stop()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("given", "found", "gives_up"),
    [
        (Encodes(), IDS, False),
        (Encodes(burns_s=2 * SLOW_S), IDS, True),
        (Encodes(error=UnreadableError("no")), None, False),
        (Encodes(burns_s=2 * SLOW_S, error=UnreadableError("no")), None, True),
    ],
    ids=["quick", "slow", "refuses", "refuses slowly"],
)
def test_each_use_is_measured(given: Encodes, found: list[list[int]] | None, gives_up: bool):
    async def go(encoding: Encoding, told: list[str]) -> None:
        assert encoding.at_once(given, TEXT) == found
        assert bool(told) is gives_up
        del told[:]
        done: list[Sequence[Sequence[int]]] = []
        encoding.later(given, TEXT, done.append)
        await until(lambda: bool(done))
        assert done == [found or []]
        assert bool(told) is (gives_up and found is not None)

    run(go)


def test_of_no_text_nobody_is_asked():
    async def go(encoding: Encoding, told: list[str]) -> None:
        nobody = Encodes()
        assert encoding.at_once(nobody, []) == []
        assert nobody.began == 0

    run(go)


def test_nobody_waits_for_a_thread_that_comes_to_no_end():
    """Each request that had to be counted waited for its own deadline, and was 504 then: 64 of them."""
    held = threading.Event()

    async def go(encoding: Encoding, told: list[str]) -> None:
        endless, done = Encodes(held=held), list[Sequence[Sequence[int]]]()
        for _ in range(3):
            encoding.later(endless, TEXT, done.append)
        await until(lambda: endless.began == 1)
        encoding.tick(1.0)
        encoding.tick(1.0 + LATE_S)
        await asyncio.sleep(0)
        assert (done, encoding.has_room) == ([], True)
        encoding.tick(1.1 + LATE_S)
        await until(lambda: len(done) == 3)
        assert (done, encoding.has_room, told) == ([[], [], []], False, [])
        encoding.tick(1.1 + ENDLESS_S)
        assert told == ["it comes to no end"]
        assert encoding.has_room
        encoding.later(Encodes(), TEXT, done.append)
        await until(lambda: len(done) == 4)
        assert done[3] == IDS
        assert endless.began == 1

    try:
        run(go)
    finally:
        held.set()


def test_a_thread_that_comes_back_is_used_again():
    held = threading.Event()

    async def go(encoding: Encoding, told: list[str]) -> None:
        done: list[Sequence[Sequence[int]]] = []
        encoding.later(Encodes(held=held), TEXT, done.append)
        encoding.tick(1.0)
        encoding.tick(1.1 + LATE_S)
        assert not encoding.has_room
        held.set()

        def has_room() -> bool:
            encoding.tick(1.2 + LATE_S)
            return encoding.has_room

        await until(has_room)
        assert (done, told) == ([[]], [])

    run(go)


@pytest.mark.parametrize("text", ["a", "a" * (WAITING_CHARS_MOST // 2)], ids=["many", "long"])
def test_few_wait_at_once(text: str):
    held = threading.Event()

    async def go(encoding: Encoding, told: list[str]) -> None:
        done: list[Sequence[Sequence[int]]] = []
        while encoding.has_room:
            encoding.later(Encodes(held=held), [text], done.append)
        waits = WAITING_MOST if len(text) == 1 else 2
        held.set()
        await until(lambda: len(done) == waits)
        assert encoding.has_room

    try:
        run(go)
    finally:
        held.set()


def test_what_comes_to_no_end_beside_the_loop_is_left_alone():
    held = threading.Event()

    async def go() -> None:
        with pytest.raises(TimeoutError):
            await beside(held.wait, 10, most_s=0.01)
        held.set()

    asyncio.run(go())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def files(folder: Path, pattern: str) -> dict[str, str]:
    """The model's files with another pattern before its own."""
    made = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, made["pre_tokenizer"]]}
    return {"tokenizer.json": json.dumps(made), "tokenizer_config.json": (folder / "tokenizer_config.json").read_text()}


BREAKS = "q" * 40 + "!"
"""What `(q+)+b` tries more ways of than it may."""


@pytest.mark.parametrize("pattern", [r"(a+)+b|.", r"( | )*b|."])
def test_a_pattern_that_takes_too_long_over_plain_texts_is_not_used(folder: Path, pattern: str):
    assert Tokeniser(files(folder, "a*|.")).usable
    with pytest.raises(ValueError, match=rf"gave up|over {PROBE_CHARS} characters"):
        Tokeniser(files(folder, pattern))


def test_who_panics_says_no(folder: Path):
    """What Rust panics with is no Exception: it went through everything, and the client's connection was closed."""
    made = Tokeniser(files(folder, r"(q+)+b|."))
    assert made.encode(["quick"])
    with pytest.raises(UnreadableError, match="gave up"):
        made.encode([BREAKS])


def test_a_text_that_its_tokenizer_breaks_at_goes_by_the_approximate_index(folder: Path, tmp_path: Path):
    for name, text in files(folder, r"(q+)+b|.").items():
        (tmp_path / name).write_text(text)

    async def go(host: str = "127.84.0.71") -> None:
        from tests.fleet_router.test_knowledge import agent

        server, publisher, said = await agent(host, tmp_path), Publisher(host, root_hash("c", 16)), list[str]()
        knowledge = Knowledge(time.monotonic, said.append)
        try:
            knowledge.follow([(endpoint(host), 1)])
            await publisher.settle(lambda: ready(knowledge), knowledge)
            made = knowledge._tokeniser
            assert made is not None
            assert await counted(knowledge, {"prompt": BREAKS}) == NOT_KNOWN
            assert await counted(knowledge, {"prompt": "and so on " * 900 + BREAKS}) == NOT_KNOWN
            knowledge._gave_up(made, "it comes to no end")
            assert await counted(knowledge, {"prompt": "and so on"}) == NOT_KNOWN
            for later_s in (1_000.0, 2_000.0):
                knowledge.tick(time.monotonic() + later_s)
                await until(lambda: knowledge._fetching is None)
            assert knowledge._tokeniser is None
            assert sum("approximate index" in text for text in said) == 1
        finally:
            await asyncio.to_thread(knowledge.stop)
            publisher.engine.close()
            server.close()

    asyncio.run(go())


def test_who_waits_for_a_tokenizer_that_a_reload_has_put_away_goes_on_at_once():
    """Nobody looked after its thread any more: where it was stuck, all that waited for it did until their deadlines."""

    async def go(rig: Rig) -> None:
        held, precise = threading.Event(), msgspec.structs.replace(CONFIG, prefix_index="precise")
        rig.apply(rig.prefill, rig.decode, precise)
        knowledge, stuck = rig.context.knowledge, Encodes(held=held)
        assert knowledge is not None
        stuck.inline_chars, stuck.lead = 0, ()  # type: ignore[attr-defined]
        knowledge._tokeniser = stuck  # type: ignore[assignment]
        asked = asyncio.create_task(rig.post(ask(prompt="short")))
        await until(lambda: stuck.began == 1)
        rig.apply(rig.prefill, rig.decode)
        try:
            async with asyncio.timeout(3):
                assert (await asked)[0] == 200
        finally:
            held.set()

    run_router(go, prefill=0)
