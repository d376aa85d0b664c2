"""Several choices and probabilities through the router: both legs ask for them, and a client gets every byte of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest

from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, run

USAGE = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
KEY = key_of("acme")


def logprobs(token: str, *, chat: bool) -> dict[str, Any]:
    if chat:
        one = {"token": token, "logprob": -0.5, "bytes": list(token.encode())}
        return {"content": [{**one, "top_logprobs": [one]}]}
    return {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}], "text_offset": [0]}


def choices(chat: bool) -> dict[str, Any]:
    rows = [
        {"index": i, "logprobs": logprobs(f"w{i}", chat=chat), "finish_reason": "stop",
         **({"message": {"role": "assistant", "content": f"w{i}"}} if chat else {"text": f"w{i}"})}
        for i in range(3)
    ]  # fmt: skip
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "c", "object": kind, "created": 1, "model": "m", "choices": rows, "usage": USAGE}


def chunks(chat: bool, usage: bool) -> list[dict[str, Any]]:
    """Three choices by turns, two pieces of each, then their ends."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": "c", "object": kind, "created": 1, "model": "m"}
    found = []
    for turn in range(2):
        for i in range(3):
            word = f"{turn}w{i}"
            said = {"delta": {"content": word}} if chat else {"text": word}
            choice = {"index": i, **said, "logprobs": logprobs(word, chat=chat), "finish_reason": None}
            found.append({**head, "choices": [choice]})
    ends = [
        {"index": i, **({"delta": {}} if chat else {"text": ""}), "logprobs": None, "finish_reason": "stop"} for i in range(3)
    ]
    return [*found, *({**head, "choices": [end]} for end in ends), *([{**head, "choices": [], "usage": USAGE}] if usage else [])]


def answers(chat: bool, together: int) -> Any:
    """A worker that says so; streams with so many events in a chunk."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if "do_remote_decode" in body.get("kv_transfer_params", {}):
            return False
        if not body.get("stream"):
            raw = json.dumps(choices(chat)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        wants = (body.get("stream_options") or {}).get("include_usage", False)
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks(chat, wants)] + [b"data: [DONE]\n\n"]
        for at in range(0, len(events), together):
            part = b"".join(events[at:][:together])
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    return behave


def gpt(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{rig.port}/v1", max_retries=0)


def asked(chat: bool) -> dict[str, Any]:
    if chat:
        turns = [{"role": "user", "content": LONG}]
        return {"model": "m", "n": 3, "max_tokens": 2, "messages": turns, "logprobs": True, "top_logprobs": 1}
    return {"model": "m", "n": 3, "max_tokens": 2, "prompt": LONG, "logprobs": 1}


@pytest.mark.parametrize("tenants", [False, True], ids=["", "metered"])
@pytest.mark.parametrize("prefill", [0, 1], ids=["one-leg", "two-legs"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("together", [0, 1, 4], ids=["whole", "stream", "stream-by-four"])
def test_every_choice_comes_with_its_probabilities(chat: bool, prefill: int, together: int, tenants: bool):
    async def go(rig: Rig) -> None:
        if tenants:
            rig.context.desk.tenants_needed = True
            rig.context.desk.know(parsed(acme={"tokensPerMinute": 100_000}))
        rig.decode[0].behave = answers(chat, together)
        async with gpt(rig) as client:
            make = client.chat.completions.create if chat else client.completions.create
            told = await make(**asked(chat), stream=bool(together))  # type: ignore[call-overload]
            found = (
                [one.model_dump(exclude_unset=True) async for one in told] if together else [told.model_dump(exclude_unset=True)]
            )
        assert found == (chunks(chat, usage=False) if together else [choices(chat)])
        assert [(leg["n"], leg["logprobs"]) for leg in rig.decode[0].seen] == [(3, asked(chat)["logprobs"])]
        if prefill:  # the KV of one sequence is enough for all of them
            assert ["n" in leg for leg in rig.prefill[0].seen] == [False]
        if tenants:
            account = rig.context.desk.accounts["acme"]
            assert (account.input_tokens, account.output_tokens) == (5, 6)

    run(go, prefill=prefill)


def test_the_fleets_limit_holds_for_each_choice_and_the_detector_expects_all_of_them():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = answers(True, 1)
        more = {key: value for key, value in asked(True).items() if key != "max_tokens"}
        status, body = await rig.post({**more, "stream": True}, "/v1/chat/completions")
        assert (status, body.count(b"data: "), rig.decode[0].seen[0]["max_tokens"]) == (200, 10, 2)
        assert not any(rig.context.desk.runaways.values())

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, max_output_tokens=2, max_model_len=100_000, runaway=True))


@pytest.mark.parametrize(("chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_a_stream_that_ran_away_ends_for_each_of_its_choices(chat: bool, path: str):
    """Only choice 0 had an end: clients waited for the finish_reason of the others for ever."""

    async def go(rig: Rig) -> None:
        async def runs_away(_body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(200):
                said = {"delta": {"content": f"{number}"}} if chat else {"text": f"{number}"}
                choice = {"index": number % 3, **said, "logprobs": None, "finish_reason": None}
                event = (
                    b"data: " + json.dumps({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice]}).encode()
                )
                writer.write(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event))
            await writer.drain()
            return True

        rig.decode[0].behave = runs_away
        raw = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        status, body = await rig.post({"model": "m", "n": 3, "stream": True, **raw}, path)
        ends = [json.loads(line[6:])["choices"][0] for line in body.splitlines() if b"no_stop" in line]
        assert status == 200
        assert [(end["index"], end["finish_reason"], end["stop_reason"]) for end in ends] == [
            (i, "length", "no_stop") for i in range(3)
        ]
        assert body.count(b"[DONE]") == 1

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, max_output_tokens=2, max_model_len=100_000, runaway=True))


def gives(leased: bool) -> Any:
    """A prefill worker whose KV has a lease of ours, or is given to one reader."""
    told = {"do_remote_prefill": True, "remote_block_ids": [1], **({"lease_id": "lease-1"} if leased else {})}

    async def prefills(_body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        answer(writer, 200, {"choices": [], "kv_transfer_params": told})
        return True

    return prefills


@pytest.mark.parametrize("leased", [True, False], ids=["torch", "vllm"])
@pytest.mark.parametrize("more", [{"n": 1}, {"n": 3}, {"best_of": 1}, {"best_of": 3}, {"n": 1, "best_of": 2}], ids=str)
def test_several_choices_never_read_kv_that_the_first_reader_gives_free(more: dict[str, int], leased: bool):
    """vLLM makes a request of each choice. All had the one reference; the first that had read it freed the prefill's blocks, and
    the others were answered with 200 from whatever lay there then. `best_of` makes as many, of which clients see `n`."""

    async def go(rig: Rig) -> None:
        rig.prefill[0].behave = gives(leased)
        for prompt in (LONG, "y" * 2000):
            status, _ = await rig.post({"model": "m", **more, "max_tokens": 2, "prompt": prompt})
            assert status == 200
        alone = max(more.values()) > 1 and not leased
        assert ["kv_transfer_params" in leg for leg in rig.decode[0].seen] == [not alone, not alone]
        assert len(rig.prefill[0].seen) == (1 if alone else 2)  # it was learnt from the first
        assert sum(rig.context.metrics.handed_over.values()) == (0 if alone else 2)
        assert rig.idle()

    run(go)


@pytest.mark.parametrize("leased", [True, False], ids=["torch", "vllm"])
def test_what_is_sent_once_more_has_no_reference_that_may_have_been_read(leased: bool):
    """A worker took a request on a pooled connection, and closed it: it was sent again, with KV that the first may have read."""

    async def go(rig: Rig) -> None:
        rig.prefill[0].behave = gives(leased)
        assert (await rig.post(asked(False) | {"n": 1}))[0] == 200  # its connection waits for the next

        async def closes(_body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            rig.decode[0].behave = None
            writer.transport.abort()
            return True

        rig.decode[0].behave = closes
        assert (await rig.post(asked(False) | {"n": 1, "prompt": "y" * 2000}))[0] == 200
        assert ["kv_transfer_params" in leg for leg in rig.decode[0].seen] == [True, True, leased]
        metrics = rig.context.metrics
        assert (metrics.resends, metrics.retries, rig.context.table.trouble.out) == (1, 0, 0)

    run(go)
