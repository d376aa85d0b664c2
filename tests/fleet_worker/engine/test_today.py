"""A chat template that asks what day it is: it is told as Hugging Face tells it, once for both legs of a request."""

from __future__ import annotations

import asyncio
import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_wire.kv import KvReference
from fleet_worker.engine import reading
from fleet_worker.engine.errors import BadRequestError
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.reading import Terms, packed, read_request, unpacked
from fleet_worker.engine.server import EngineServer
from fleet_worker.engine.text import Text
from fleet_worker.engine.today import now_said, teller
from fleet_worker.engine.tokens import tokenize
from tests.fleet_worker.engine.test_core import ScriptedConnector, engine, reference
from tests.fleet_worker.engine.test_server import CONFIG

MESSAGES = [{"role": "user", "content": "the router"}]
MISTRAL = '{%- set today = strftime_now("%Y-%m-%d") %}{{ today }} {% for m in messages %}{{ m.content }}{% endfor %}'
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}{{ date_string }} {{ messages[0].content }}"
)
IN_A_MACRO = "{% macro day() %}{{ strftime_now('%j') }}{% endmacro %}{{ day() }} {{ messages[0].content }}"
TEMPLATES = {"mistral": MISTRAL, "llama": LLAMA, "macro": IN_A_MACRO}
LATE, EARLY = "2026-12-31T23:59:59.999999", "2027-01-01T00:00:00.200000"
TERMS = Terms(("tiny",), 1024, 512)


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Text:
    shutil.copy(tiny_model() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": request.param}))
    return Text(tmp_path)


def it_is(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "now_said", lambda: moment)


def asked(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **more}).encode()


def with_kv(said_at: str) -> bytes:
    kv = {**json.loads(json.dumps(reference(16), default=_plain)), "said_at": said_at}
    return asked(kv_transfer_params=kv)


def _plain(one: KvReference) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_it_is_told_as_hugging_face_tells_it(text: Text):
    """Mistral's since Small 3 were refused with 400, Llama's since 3.1 said another day than the one that it was."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = json.loads((text.folder / "tokenizer_config.json").read_text())["chat_template"]
    before = now_said()
    theirs = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)[0][0]
    ours = text.decode(read_request(asked(), "chat", text, TERMS).tokens)
    counted = tokenize(asked(), text, TERMS.served, TERMS.longest)["tokens"]
    if now_said()[:10] == before[:10]:
        assert (ours, text.decode(counted)) == (theirs, theirs)


@pytest.mark.parametrize("other_process", [False, True], ids=["here", "other-process"])
def test_both_legs_of_a_request_have_one_day(text: Text, monkeypatch: pytest.MonkeyPatch, other_process: bool):
    def read(raw: bytes) -> reading.Read:
        found = unpacked(packed(raw, "chat", text, TERMS), "chat") if other_process else read_request(raw, "chat", text, TERMS)
        assert isinstance(found, reading.Read)
        return found

    it_is(LATE, monkeypatch)
    first = read(asked())
    assert first.said_at == LATE
    it_is(EARLY, monkeypatch)
    second, alone = read(with_kv(first.said_at)), read(asked())
    assert list(second.tokens) == list(first.tokens) != list(alone.tokens)
    assert second.said_at == LATE


class Moves(ScriptedConnector):
    """Moves at once."""

    def fetch(self, request_id: str, ref: KvReference, skip: int, into: Any) -> None:
        super().fetch(request_id, ref, skip, into)
        self.finish(request_id)


def test_a_prompt_of_before_midnight_is_decoded_after_it(llama: Llama, text: Text, monkeypatch: pytest.MonkeyPatch):
    """By two clocks the decode worker had another prompt than the KV is of: 400."""

    async def scenario() -> None:
        prefill = engine(llama)
        decode = engine(llama, peer=prefill)
        decode.connector = Moves(decode._pool, prefill._pool)
        loops = [EngineLoop(core, lambda _: None, lambda _: None) for core in (prefill, decode)]
        told: list[dict[str, Any]] = []
        for loop, moment, kv in zip(loops, (LATE, EARLY), ({"do_remote_decode": True}, None), strict=True):
            loop.start()
            it_is(moment, monkeypatch)
            server = EngineServer(CONFIG, loop, text, EngineMetrics("tiny"))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://e", timeout=30) as client:
                given = asked(max_tokens=2, kv_transfer_params=kv or told[0]["kv_transfer_params"])
                answer = await client.post("/v1/chat/completions", content=given)
            assert answer.status_code == 200, answer.text
            told.append(answer.json())
        for loop in loops:
            await asyncio.to_thread(loop.stop)
        assert told[0]["kv_transfer_params"]["said_at"] == LATE
        assert decode.counters.blocks_received == len(told[0]["kv_transfer_params"]["remote_block_ids"])

    asyncio.run(scenario())


def test_whoever_prefilled_without_a_day_decodes_without_one(tmp_path: Path):
    """Of workers from before templates were told: the same words come of it."""
    shutil.copy(tiny_model() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA}))
    text = Text(tmp_path)
    assert text.decode(read_request(with_kv(""), "chat", text, TERMS).tokens) == "26 Jul 2024 the router"


def test_what_no_template_asks_for_is_not_told(monkeypatch: pytest.MonkeyPatch):
    text = Text(tiny_model())
    assert read_request(asked(), "chat", text, TERMS).said_at == ""
    assert read_request(with_kv("long ago"), "chat", text, TERMS).said_at == ""


@pytest.mark.parametrize(
    ("source", "said_at", "why"),
    [
        (MISTRAL, "long ago", "kv_transfer_params.said_at: Invalid isoformat"),
        ("{{ strftime_now('%c' * 200) }}", LATE, "strftime_now takes at most 256 characters"),
        ("{{ strftime_now(5) }}", LATE, "TypeError"),
        ("{{ strftime_now.__globals__['os'] }}", LATE, "__globals__"),
    ],
    ids=["no-moment", "long", "no-text", "reaches-out"],
)
def test_what_it_cannot_be_told_is_a_bad_request(tmp_path: Path, source: str, said_at: str, why: str):
    shutil.copy(tiny_model() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(BadRequestError, match=why):
        Text(tmp_path).render_chat(MESSAGES, said_at=said_at)


def test_a_moment_that_is_none_is_not_said_back_in_full():
    with pytest.raises(BadRequestError) as told:
        teller("x" * 1_000_000)
    assert len(str(told.value)) < 300


def test_the_day_goes_on():
    """The clock is read for each request."""
    first = datetime.fromisoformat(now_said())
    assert timedelta(0) <= datetime.fromisoformat(now_said()) - first < timedelta(minutes=1)
