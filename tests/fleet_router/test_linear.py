"""What files of a model may make the loop do: a tokenizer that is not known to be quick has its thread, and a template that is
slow is not asked again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_router import tokeniser
from fleet_router.encoding import INLINE_MOST_S, SLOW_S, Encoding
from fleet_router.linear import PATTERNS
from fleet_router.tokeniser import (
    CONVERSATION,
    FEW_MESSAGES,
    INLINE_CHARS,
    PROBE_HOPELESS_S,
    PROBE_S,
    PROBE_TRIES,
    QUICK_S,
    Tokeniser,
    UnreadableError,
)  # fmt: skip
from fleet_worker.tinymodel import make_tiny_model
from tests.fleet_router.rig import until
from tests.fleet_router.test_encoding import IDS, TEXT, Encodes
from tests.fleet_router.test_knowledge import Publisher, agent, endpoint, ready, root_hash

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def files(folder: Path, change: Change, template: str | None = None) -> dict[str, str]:
    made = json.loads((folder / "tokenizer.json").read_text())
    change(made)
    found = {"tokenizer.json": json.dumps(made), "tokenizer_config.json": (folder / "tokenizer_config.json").read_text()}
    return found if template is None else {**found, "chat_template.jinja": template}


def nothing(_: dict[str, Any]) -> None: ...


def before(step: dict[str, Any]) -> Change:
    """One more step before the model's own pre-tokenizer."""

    def change(made: dict[str, Any]) -> None:
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, made["pre_tokenizer"]]}

    return change


def pattern(regex: str) -> Change:
    return before({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})


def normalizer(**step: Any) -> Change:
    return lambda made: made.update(normalizer=step)


def word_piece(made: dict[str, Any]) -> None:
    made["model"] = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**6,
        "vocab": {"[UNK]": 0, "a": 1},
    }  # fmt: skip
    made["added_tokens"], made["post_processor"], made["decoder"] = [], None, None


class Stolen:
    """A thread's clock that goes on by so much over each of its first tries; nothing else takes time."""

    def __init__(self, *takes_s: float, then_s: float = 0.0) -> None:
        self.takes_s, self.then_s, self.now_s, self.asked = list(takes_s), then_s, 0.0, 0

    def thread_time(self) -> float:
        self.asked += 1
        if self.asked % 2 == 0:
            self.now_s += self.takes_s.pop(0) if self.takes_s else self.then_s
        return self.now_s

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize("change", [nothing, *map(pattern, sorted(PATTERNS)), normalizer(type="NFC")])
def test_what_models_in_use_have_is_known_to_be_quick(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Change):
    """Whatever the machine: over 2,048 line breaks one of them takes 8 ms of a slow one's core, and has its thread there."""
    monkeypatch.setattr(tokeniser, "time", Stolen())
    assert Tokeniser(files(folder, change)).inline_chars == INLINE_CHARS


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(pattern(r"q*q*q*b|."), id="a second over 300 letters"),
        pytest.param(pattern(r"(q+)+b|."), id="gives up after 80 ms"),
        pytest.param(pattern(r"q(?=q*z)|."), id="looks ahead"),
        pytest.param(normalizer(type="Replace", pattern={"Regex": "q*q*b"}, content="x"), id="a pattern in the normalizer"),
        pytest.param(normalizer(type="Replace", pattern={"String": "q"}, content="x" * 1000), id="a text that grows"),
        pytest.param(
            normalizer(
                type="Sequence",
                normalizers=[{"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 8} for _ in range(5)],
            ),
            id="one that grows a little five times: by 32,768",
        ),
        pytest.param(normalizer(type="Prepend", prepend="x" * 1000), id="a long beginning"),
        pytest.param(
            normalizer(
                type="Sequence",
                normalizers=[{"type": "NFC"}, {"type": "Replace", "pattern": {"String": "q"}, "content": "x" * 99}],
            ),
            id="inside a sequence",
        ),
        pytest.param(word_piece, id="words of a million letters"),
    ],
)
def test_every_other_one_has_its_thread(folder: Path, change: Change):
    assert Tokeniser(files(folder, change)).inline_chars == 0


@pytest.mark.parametrize(
    ("clock", "inline_chars"),
    [
        pytest.param(Stolen(2 * QUICK_S), INLINE_CHARS, id="once slow"),
        pytest.param(Stolen(2 * PROBE_S, 2 * PROBE_S, 2 * QUICK_S), INLINE_CHARS, id="three times slow: others had the core"),
        pytest.param(Stolen(*[2 * QUICK_S] * PROBE_TRIES), 0, id="slow each time, over one text"),
    ],
)
def test_who_is_slow_once_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Stolen, inline_chars: int):
    """A virtual machine whose core others were given as well took a model's tokenizer for a slow one until the next start."""
    monkeypatch.setattr(tokeniser, "time", clock)
    assert Tokeniser(files(folder, nothing)).inline_chars == inline_chars


@pytest.mark.parametrize("clock", [Stolen(*[2 * PROBE_S] * PROBE_TRIES), Stolen(PROBE_HOPELESS_S)])
def test_who_is_far_too_slow_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Stolen):
    monkeypatch.setattr(tokeniser, "time", clock)
    with pytest.raises(ValueError, match="characters like 'a'"):
        Tokeniser(files(folder, nothing))
    assert clock.takes_s == []


def test_nothing_is_encoded_on_the_loop_by_one_that_is_not_known(folder: Path, tmp_path: Path):
    """301 letters stood everybody's streams for 1.1 s, 2,000 for ever."""
    for name, text in files(folder, pattern(r"q*q*q*b|.")).items():
        (tmp_path / name).write_text(text)

    async def go(host: str = "127.84.0.72") -> None:
        from fleet_router.knowledge import Counted, Knowledge
        from fleet_router.request import parse_body
        from tests.fleet_router.rig import CONFIG

        server, publisher, said = await agent(host, tmp_path), Publisher(host, root_hash("c", 16)), list[str]()
        knowledge = Knowledge(time.monotonic, said.append)
        try:
            knowledge.follow([(endpoint(host), 1)])
            await publisher.settle(lambda: ready(knowledge), knowledge)
            assert any("on_loop=False" in text for text in said)
            done: list[Counted] = []
            ask = parse_body(json.dumps({"model": "m", "prompt": "q" * 60}).encode(), False, CONFIG)
            assert knowledge.count(ask, False, done.append) is None
            await until(lambda: bool(done))
            assert done[0].tokens > 0
            found = knowledge.count(ask, False, done.append)
            assert found is not None, "what is known needs no thread"
            assert found.tokens == done[0].tokens
        finally:
            await asyncio.to_thread(knowledge.stop)
            publisher.engine.close()
            server.close()

    asyncio.run(go())


@pytest.mark.parametrize(("burns_s", "stays"), [(0.0, True), (2 * INLINE_MOST_S, False)], ids=["quick", "slow"])
def test_one_that_was_slow_on_the_loop_is_not_run_there_again(burns_s: float, stays: bool):
    async def go() -> None:
        said, gave_up, one = list[str](), list[str](), Encodes(burns_s=burns_s)
        one.inline_chars = 2_048
        encoding = Encoding(lambda _, why: gave_up.append(why), said.append)
        try:
            assert encoding.at_once(one, TEXT) == IDS
        finally:
            encoding.stop()
        assert (one.inline_chars > 0, said == []) == (stays, stays)
        assert gave_up == [], f"it is used: that takes {SLOW_S} s"

    asyncio.run(go())


@pytest.mark.parametrize(
    "setting",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 300},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        },
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_text_has_its_own_length_as_it_has_for_engines(folder: Path, setting: dict[str, Any]):
    """Files of models that embed cut every text; a width of two thousand million takes all memory."""
    text = ["The quick brown fox jumps over the lazy dog. " * 4]
    own = Tokeniser(files(folder, nothing)).encode(text)
    assert Tokeniser(files(folder, lambda made: made.update(setting))).encode(text) == own


# -- templates -------------------------------------------------------------------------------------------------------------
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
FEW, MANY, LONG = [1, FEW_MESSAGES], 40, 200


def burn(some_s: float) -> None:
    until_s = time.thread_time() + some_s
    while time.thread_time() < until_s:
        pass


class Slow:
    """A template that takes so long over each conversation."""

    takes_parts = False

    def __init__(self, *burns_s: float) -> None:
        self.burns_s, self.rendered = list(burns_s), 0

    def render(self, *_: object, **__: object) -> str:
        self.rendered += 1
        burn(self.burns_s.pop(0) if self.burns_s else 0.0)
        return "text"


def conversation(messages: int, content: str = "hi") -> bytes:
    return json.dumps([{"role": "user", "content": content}] * messages).encode()


def with_template(folder: Path, slow: Slow) -> Tokeniser:
    made: Any = Tokeniser(files(folder, nothing, PLAIN))
    made._template = slow
    return made


@pytest.mark.parametrize("messages", [*FEW, MANY])
def test_a_template_that_is_slow_twice_is_not_asked_again(folder: Path, messages: int):
    takes_s = 2 * (QUICK_S + 0.00005 * messages)
    slow = Slow(takes_s, takes_s)
    made, asked = with_template(folder, slow), conversation(messages)
    assert [made.render(asked), made.render(asked)] == ["text", "text"]
    with pytest.raises(UnreadableError, match="too long"):
        made.render(asked)
    assert slow.rendered == 2
    if messages > 1:
        assert made.render(conversation(1, "a")) == "text", "of less it may be quick"


def test_one_that_was_slow_once_is_measured_and_asked_on(folder: Path):
    """The clock went on because others had the core."""
    slow = Slow(2 * QUICK_S, 0.0, 2 * QUICK_S, 0.0)
    made, asked = with_template(folder, slow), conversation(2)
    assert [made.render(asked) for _ in range(6)] == ["text"] * 6


def test_a_long_conversation_of_many_messages_has_their_time(folder: Path):
    slow = Slow(*[2 * QUICK_S + 0.00005 * LONG] * 6)
    made, asked = with_template(folder, slow), conversation(LONG)
    assert len(asked) > INLINE_CHARS
    assert [made.render(asked) for _ in range(6)] == ["text"] * 6


@pytest.mark.parametrize(("lines", "usable"), [(1, True), (40_000, False)])
def test_a_template_that_is_slow_over_anything_is_not_used(folder: Path, lines: int, usable: bool):
    """Nothing in it is a turn, or a call: its steps are not counted."""
    made = Tokeniser(files(folder, nothing, PLAIN + "{% if 1 in [2, 3] %}x{% endif %}" * lines))
    if usable:
        assert made.render(CONVERSATION)
    else:
        with pytest.raises(UnreadableError, match="template"):
            made.render(CONVERSATION)
