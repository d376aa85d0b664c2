"""Streams that break: carried on exactly, or ended with an error. Pure parts, then a router on real sockets.

The workers here say token i of a prompt as a function of all tokens before it, so that whoever is given prompt and sent tokens
says the same as whoever said these tokens; `differs` is one that does not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.ending import framed, unframed
from fleet_router.health.determined import determined
from fleet_router.health.resume import OVERLAP_TOKENS, Again, DiffersError, Start, continued, said_of, start_of
from fleet_router.health.sent import STREAM_MOST_BYTES, Room, Sent
from fleet_router.request import parse_body
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, run, until

PREFILLING = msgspec.structs.replace(CONFIG, resume="prefill")
GREEDY = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "stream": True}


def next_token(before: list[int]) -> int:
    found = 7
    for token in before:
        found = (found * 31 + token) % 997
    return found


def tokens(prompt: list[int], count: int) -> list[int]:
    said = list(prompt)
    for _ in range(count):
        said.append(next_token(said))
    return said[len(prompt) :]


def word(token: int) -> str:
    return f" w{token}"


def events(
    ids: list[int], *, chat: bool = False, with_ids: bool = True, finish: bool = True, usage: tuple[int, int] | None = None
) -> list[bytes]:
    out: list[dict[str, Any]] = []
    if chat:
        out.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for i, token in enumerate(ids):
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if finish and i == len(ids) - 1 else None}
        choice |= {"delta": {"content": word(token)}} if chat else {"text": word(token)}
        choice |= {"token_ids": [token]} if with_ids else {}
        out.append({"choices": [choice]})
    if usage:
        out.append({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
    made = [b"data: " + json.dumps({"id": "c-1", "created": 5, **one}).encode() + b"\n\n" for one in out]
    return [*made, b"data: [DONE]\n\n"] if finish else made


def asked(**more: Any) -> Any:
    return parse_body(json.dumps({**GREEDY, **more}).encode(), "messages" in more, CONFIG)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, True), ({"temperature": 0.0}, True), ({"temperature": 1e-6}, True), ({"temperature": 0.1}, False),
        ({}, False), ({"seed": 4}, True), ({"seed": None}, False), ({"temperature": 1, "seed": 0}, True),
        ({"temperature": 0, "n": 1}, True), ({"temperature": 0, "n": 2}, False), ({"temperature": 0, "tools": []}, False),
        ({"temperature": 0, "tools": None}, True), ({"temperature": 0, "logprobs": 1}, False),
        ({"seed": 1, "who": "knows"}, False), ({"temperature": 0, "reasoning_effort": "none"}, True),
    ],
)  # fmt: skip
def test_only_what_we_know_to_be_determined_is_carried_on(fields: dict[str, Any], expected: bool):
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    assert determined(raw) is expected


@given(st.integers(1, 30), st.integers(0, 30), st.booleans(), st.booleans(), st.booleans())
def test_wherever_a_stream_breaks_the_client_gets_each_token_once(
    count: int, broken: int, with_ids: bool, chat: bool, prefill: bool
):
    prompt, broken = [5, 6, 7], min(broken, count)
    ids = tokens(prompt, count)
    first = events(ids, chat=chat, with_ids=with_ids)[: broken + chat]
    said = said_of(b"".join(first))
    assert said is not None
    ask = asked(max_tokens=count)
    start = start_of(ask, said) if prefill else Start()
    assert start.tokens <= max(0, broken - OVERLAP_TOKENS) or not prefill
    rest = continued(ask, said, start, prompt) if start.tokens else ask
    begins = json.loads(bytes(rest.fields["prompt"]))
    left = json.loads(bytes(rest.fields["max_tokens"]))
    assert begins + tokens(begins, left) == prompt + ids
    assert rest.stream
    as_chat = chat and start.tokens > 0
    more = events(tokens(begins, left), chat=chat and not as_chat, with_ids=with_ids, usage=(len(begins), left))
    again = Again(said, start, as_chat=as_chat)
    new = b"".join(again.feed(one[6:].strip()) for one in more)
    assert again.done
    whole = said_of(b"".join(first) + new)
    assert whole is not None
    assert whole.text == "".join(map(word, ids))
    assert whole.ids == ids if with_ids else whole.ids is None
    assert whole.finish == "length"
    if broken < count or said.finish is None:
        assert f'"prompt_tokens":{len(prompt)},"completion_tokens":{count}'.encode() in new.replace(b": ", b":").replace(
            b", ", b","
        )


@given(st.integers(10, 30), st.data())
def test_one_other_token_in_what_is_said_again_ends_it(count: int, data: st.DataObject):
    ids = tokens([5, 6, 7], count)
    said = said_of(b"".join(events(ids, finish=False)))
    assert said is not None
    start = start_of(asked(max_tokens=count + 5), said)
    at = data.draw(st.integers(start.tokens, count - 1))
    other = [*ids[:at], (ids[at] + 1) % 997, *ids[at + 1 :]]
    again = Again(said, start, as_chat=False)
    more = [one[6:].strip() for one in events(other[start.tokens :])]
    with pytest.raises(DiffersError):
        list(map(again.feed, more))


def test_a_text_that_loses_its_first_space_is_the_same_text():
    ids = tokens([5], 20)
    said = said_of(b"".join(events(ids, finish=False)))
    assert said is not None
    start = start_of(asked(max_tokens=25), said)
    more = events([*ids[start.tokens :], 1, 2])
    more[0] = more[0].replace(b'" w', b'"w')
    again = Again(said, start, as_chat=False)
    new = said_of(b"".join(again.feed(one[6:].strip()) for one in more))
    assert new is not None
    assert (new.text, new.ids) == (" w1 w2", [1, 2])


@pytest.mark.parametrize(
    "event",
    [
        b'{"error":{"message":"x"}}', b"{", b'{"choices":[{"delta":{"tool_calls":[{}]}}]}', 
        b'{"choices":[{"text":"a","logprobs":{"x":1}}]}',
        b'{"choices":[{"delta":{"reasoning":"hm"}}]}', b"[]",
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_not_carried_on(event: bytes):
    assert said_of(b"data: " + event + b"\n\n") is None


WRITTEN = {"comment": b": ping\n%b", "event": b"event: message\n%b", "rubbish": b"\x00\xffzz\r\n%b"}


@pytest.mark.parametrize("way", WRITTEN.values(), ids=list(WRITTEN))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_last_event_that_is_written_in_another_way_is_said_once(path: str, way: bytes):
    """Incident: a line before `data:` hid the event from us and not from the client, which had that token twice."""

    async def go(rig: Rig) -> None:
        async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            made = events(tokens([5, 6, 7], 40)[:12], chat="messages" in body, finish=False)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"".join(map(framed, [*made[:-1], way % made[-1]])))
            await writer.drain()
            writer.close()
            return True

        rig.decode[0].behave = rig.decode[1].behave = first
        prompt = {"prompt": [5, 6, 7]} if path == "/v1/completions" else {"messages": MESSAGES["messages"]}
        _, got = await rig.post({"model": "m", "max_tokens": 40, "temperature": 0, "stream": True, **prompt}, path)
        assert re.findall(rb'"text": ?"( w\d+)"', got) == [word(token).encode() for token in tokens([5, 6, 7], 40)]

    run(go, prefill=0, decode=2, config=PREFILLING)


@pytest.mark.parametrize("way", [*WRITTEN.values(), b"data:%b"], ids=[*WRITTEN, "no-space"])
def test_what_a_client_has_is_read_as_clients_read_it(way: bytes):
    """As above: WHATWG HTML, 9.2."""
    event = events([7], finish=False)[0]
    said = said_of(event + way % (event[6:] if b"data:" in way else event))
    assert said is not None
    assert said.text == 2 * word(7)


@given(st.lists(st.integers(0, 996), min_size=1, max_size=20), st.data())
def test_only_whole_events_go_out_and_nothing_is_lost(ids: list[int], data: st.DataObject):
    stream = b"".join(framed(one) for one in events(ids)) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    room = Room()
    sent, out = Sent(room), b""
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        piece = sent.whole(stream[a:b])
        assert not piece or piece.endswith((b"\n\n\r\n", b"0\r\n\r\n"))
        out += piece
    out += sent.rest()
    assert out == stream
    kept = said_of(unframed(sent.kept()))
    assert kept is not None
    assert kept.ids is not None
    assert kept.ids == ids[: len(kept.ids)]
    sent.forget()
    assert room == Room()


def test_what_is_kept_is_bounded():
    room = Room(left=3 * STREAM_MOST_BYTES // 2)
    one, two = Sent(room), Sent(room)
    piece = framed(b"data: " + b"x" * 1000 + b"\n\n")
    while not one.full:
        one.whole(piece)
    while not two.full:
        two.whole(piece)
    assert room.left <= 0
    one.forget()
    two.forget()
    assert room.left == 3 * STREAM_MOST_BYTES // 2


# -- a router on real sockets ---------------------------------------------------------------------------------------------
def generator(*, dies_after: int | None = None, differs: bool = False, chat: bool = False) -> Callable[..., Awaitable[bool]]:
    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            return False
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        if not limit:  # /tokenize
            answer(writer, 200, {"tokens": [5, 6, 7]})
            return True
        prompt = body["prompt"] if isinstance(body.get("prompt"), list) else [5, 6, 7]
        ids = tokens(prompt, limit)
        ids = [(token + 1) % 997 for token in ids] if differs else ids
        made = events(ids, chat="messages" in body, with_ids=bool(body.get("return_token_ids")))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i, event in enumerate(made):
            if i == dies_after:
                writer.write(framed(event)[:30])  # half an event, and no end
                await writer.drain()
                writer.close()
                return True
            writer.write(framed(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    return behave


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}


@pytest.mark.parametrize("resume", ["replay", "prefill"])
@pytest.mark.parametrize("more", [{}, MESSAGES, {"prompt": "text"}], ids=["ids", "chat", "text"])
@pytest.mark.parametrize("dies_after", [1, 3, 20])
def test_a_stream_goes_on_elsewhere_with_the_same_tokens(resume: str, more: dict[str, Any], dies_after: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = rig.decode[1].behave = generator(dies_after=dies_after)
        body = {name: value for name, value in {**GREEDY, **more}.items() if value is not None}

        async def second(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            return await generator()(asked, writer)

        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = second
            return await generator(dies_after=dies_after)(asked, writer)

        rig.decode[0].behave = rig.decode[1].behave = first
        status, got = await rig.post(body, "/v1/chat/completions" if "messages" in body else "/v1/completions")
        said = said_of(unframed(got))
        assert said is not None, got
        assert (status, said.text) == (200, "".join(map(word, tokens([5, 6, 7], 40))))
        assert said.finish == "length"
        assert got.endswith(b"0\r\n\r\n")
        assert got.count(b"[DONE]") == 1
        assert rig.context.metrics.resumed == {"done": 1}
        seen = [one for worker in rig.decode for one in worker.seen if "max_tokens" in one]
        if resume == "prefill" and dies_after == 20:
            assert min(one["max_tokens"] for one in seen) <= 40 - 20 + 2 * OVERLAP_TOKENS
            assert max(len(one["prompt"]) for one in seen if "prompt" in one) >= 3 + 20 - 2 * OVERLAP_TOKENS

    run(go, prefill=0, decode=2, config=PREFILLING if resume == "prefill" else CONFIG)


@pytest.mark.parametrize("resume", ["replay", "prefill"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("dies_after", [1, 3, 20])
def test_a_stream_in_another_dialect_goes_on_elsewhere(path: str, resume: str, dies_after: int):
    async def go(rig: Rig) -> None:
        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            return await generator(dies_after=dies_after)(asked, writer)

        rig.decode[0].behave = rig.decode[1].behave = first
        body: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
        if path == "/v1/messages":
            body |= {"max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
        else:
            body |= {"max_output_tokens": 40, "input": "hi"}
        status, got = await rig.post(body, path)
        told = [json.loads(line[6:]) for line in unframed(got).split(b"\n") if line.startswith(b"data: ")]
        kinds = [one["type"] for one in told]
        text = "".join(
            one["delta"] if path == "/v1/responses" else one["delta"]["text"]
            for one in told
            if one["type"] in ("response.output_text.delta", "content_block_delta")
        )
        assert (status, text) == (200, "".join(map(word, tokens([5, 6, 7], 40))))
        assert "error" not in kinds
        assert kinds[-1] in ("message_stop", "response.completed", "response.incomplete")
        assert got.endswith(b"0\r\n\r\n")
        assert rig.context.metrics.resumed == {"done": 1}

    run(go, prefill=0, decode=2, config=PREFILLING if resume == "prefill" else CONFIG)


@pytest.mark.parametrize("late", [False, True], ids=["closed", "hangs"])
def test_a_stream_whose_prompt_nobody_counts_is_said_again_from_its_beginning(late: bool):
    """Incident: a lost /tokenize took one of the stream's resumptions, and a retry, for the next worker to be asked the same."""

    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def second(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if asked.get("max_tokens"):
                return await generator()(asked, writer)
            if late:
                await over.wait()
            writer.close()
            return True

        async def first(asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = second
            return await generator(dies_after=20)(asked, writer)

        rig.decode[0].behave = rig.decode[1].behave = first
        body = {name: value for name, value in {**GREEDY, **MESSAGES}.items() if value is not None}
        posted = asyncio.create_task(rig.post(body, "/v1/chat/completions"))
        if late:
            await until(lambda: sum(len(worker.seen) for worker in rig.decode) == 2)
            rig.router.sweep(rig.context.clock() + rig.context.config.first_token_deadline_s + 1)
        status, got = await posted
        over.set()
        said = said_of(unframed(got))
        assert said is not None, got
        assert (status, said.text) == (200, "".join(map(word, tokens([5, 6, 7], 40))))
        assert (rig.context.metrics.resumed, rig.context.metrics.retries) == ({"done": 1}, 1)

    run(go, prefill=0, decode=2, config=PREFILLING)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_what_came_together_with_nonsense_is_neither_lost_nor_said_twice(path: str):
    """Whole events and broken framing in one read."""

    async def go(rig: Rig) -> None:
        async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            made = b"".join(map(framed, events(tokens([5, 6, 7], 40)[:4], chat="messages" in body, with_ids=False, finish=False)))
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + made + b"zz\r\nwhat?\r\n")
            await writer.drain()
            return True

        rig.decode[0].behave = rig.decode[1].behave = first
        body = {"model": "m", "max_tokens": 40, "temperature": 0, "stream": True}
        if path == "/v1/messages":
            body["messages"] = [{"role": "user", "content": "hi"}]
        else:
            body["prompt"] = [5, 6, 7]
        status, got = await rig.post(body, path)
        told = [json.loads(line[6:]) for line in unframed(got).split(b"\n") if line.startswith(b"data: {")]
        if path == "/v1/messages":
            text = "".join(one["delta"]["text"] for one in told if one["type"] == "content_block_delta")
        else:
            text = "".join(one["choices"][0]["text"] for one in told)
        assert (status, text) == (200, "".join(map(word, tokens([5, 6, 7], 40))))

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize("more", [{"temperature": 1}, {"temperature": 0, "user_field": 1}, {"temperature": 0, "n": 2}])
def test_a_stream_that_is_not_determined_ends_with_an_error(more: dict[str, Any]):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = rig.decode[1].behave = generator(dies_after=5)
        status, got = await rig.post({**GREEDY, **more})
        assert (status, b"[DONE]" in got) == (200, False)
        assert sum(len(worker.seen) for worker in rig.decode) == 1
        assert rig.context.metrics.resumed == {"refused": 1}

    run(go, prefill=0, decode=2)


def test_another_workers_other_tokens_never_reach_a_client():
    async def go(rig: Rig) -> None:
        async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator(differs=True)
            return await generator(dies_after=12)(body, writer)

        rig.decode[0].behave = rig.decode[1].behave = first
        _, got = await rig.post({**GREEDY, "return_token_ids": True})
        assert b"[DONE]" not in got
        assert b'"code":"bad_gateway"' in got
        body, _, _ = unframed(got).rpartition(b'data: {"error"')
        said = said_of(body)
        assert said is not None, got
        assert said.ids == tokens([5, 6, 7], 12)
        assert rig.context.metrics.resumed == {"differs": 1}

    run(go, prefill=0, decode=2)


def test_a_worker_that_failed_before_carries_on_when_it_is_the_only_one_left():
    """Two workers: the second dies when the first one runs again, under the uid of its pod."""

    async def go(rig: Rig) -> None:
        left = [12, 6, None]

        async def dying(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            return await generator(dies_after=left.pop(0))(body, writer)

        rig.decode[0].behave = rig.decode[1].behave = dying
        _, got = await rig.post(GREEDY)
        said = said_of(unframed(got))
        assert said is not None, got
        assert said.text == "".join(map(word, tokens([5, 6, 7], 40)))
        assert got.count(b"[DONE]") == 1
        assert [sum("max_tokens" in one for one in worker.seen) for worker in rig.decode] in ([2, 1], [1, 2])

    run(go, prefill=0, decode=2, config=CONFIG)


def test_a_stream_that_breaks_again_and_again_ends_with_an_error():
    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            worker.behave = generator(dies_after=5)
        _, got = await rig.post(GREEDY)
        assert b"[DONE]" not in got
        assert rig.context.metrics.resumed == {"refused": 1}

    run(go, prefill=0, decode=6)


def test_a_leg_that_begins_while_the_client_does_not_read_is_not_read_either():
    """Else a stream that is carried on is kept here whole, for a client that takes nothing of it."""

    async def go(rig: Rig) -> None:
        die = asyncio.Event()

        async def first(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            for worker in rig.decode:
                worker.behave = generator()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for made in events(tokens([5, 6, 7], 40)[:12], with_ids=False, finish=False):
                writer.write(framed(made))
            await die.wait()
            writer.close()
            return True

        rig.decode[0].behave = rig.decode[1].behave = first
        posted = asyncio.create_task(rig.post(GREEDY))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        (connection,) = rig.connections

        async def meanwhile() -> bool:
            connection.pause_writing()
            return True

        for worker in rig.context.table.by_role["decode"]:
            worker.reading()._proven = meanwhile
        flow, before = connection.flow, connection.flow._connection
        die.set()
        await until(lambda: connection._unread and flow._connection is not None and flow._connection is not before)
        assert flow._connection._paused
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not flow._connection.got_bytes
        connection.resume_writing()
        _, got = await posted
        said = said_of(unframed(got))
        assert said is not None, got
        assert said.text == "".join(map(word, tokens([5, 6, 7], 40)))

    run(go, prefill=0, decode=2)
