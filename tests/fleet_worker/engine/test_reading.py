"""How a request is read: on which thread, in which order, and what its end says."""

from __future__ import annotations

import threading

import httpx
import pytest

from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.server import SMALL_BYTES
from tests.fleet_worker.engine.test_server import TEXT, body, serve


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(("size", "beside"), [(10, [False]), (SMALL_BYTES, [True]), (1_000_000, [])])
def test_a_long_prompt_is_not_tokenised_on_the_loop_that_streams_answers(
    monkeypatch: pytest.MonkeyPatch, size: int, beside: list[bool], chat: bool
):
    """4 MB stopped every stream for 2 s; in a thread still for up to 0.4 s: large ones are another process's."""
    threads: list[threading.Thread] = []
    encode = TEXT.encode

    def seen(text: str, *, add_special: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text, add_special=add_special)

    monkeypatch.setattr(TEXT, "encode", seen)

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        here, text = threading.current_thread(), "a b " * (size // 4)
        if chat:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=asked)
        else:
            answer = await client.post("/v1/completions", json=body(prompt=text, max_tokens=1))
        assert answer.status_code == (200 if size < 100 else 400), answer.text
        assert [(thread is not here) for thread in threads] == beside

    serve(scenario)


def test_an_unknown_model_is_told_before_anything_is_tokenised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TEXT, "encode", lambda *_, **__: pytest.fail("tokenised"))

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        assert (await client.post("/v1/completions", json=body(model="other"))).status_code == 404

    serve(scenario)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_token_that_was_asked_for_is_named_and_the_models_own_end_is_not(stream: bool):
    """As vLLM does; routers that speak Anthropic's dialect tell the two apart by it."""

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        ids = (await client.post("/v1/completions", json=body())).json()["choices"][0]["token_ids"]
        loop.core._eos = (ids[2],)
        for change, reason in (({"stop_token_ids": [ids[1]]}, ids[1]), ({}, None), ({"max_tokens": 1}, None)):
            answer = await client.post("/v1/completions", json=body(stream=stream, **change))
            if stream:
                assert f'"stop_reason":{reason if reason is not None else "null"}' in answer.text
            else:
                assert answer.json()["choices"][0]["stop_reason"] == reason

    serve(scenario)
