"""What becomes of answers that break: streams inside and between events, events without an end, answers that are no JSON (R9)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import CONFIG, LONG, Rig, ask, run


@pytest.mark.parametrize("half", [b"", b'1f\r\ndata: {"choices"', b"1", b"1f\r\n"])
def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(half: bytes):
    """Also when it breaks inside an event: half of it goes to nobody."""

    async def go(rig: Rig) -> None:
        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"], end=False)
            writer.write(half)
            await writer.drain()
            writer.close()
            return True

        rig.decode[0].behave = breaks
        _, body = await rig.post(ask(prompt="short", stream=True))
        assert b'"code":"bad_gateway"' in body
        assert b"[DONE]" not in body
        assert body.endswith(b"0\r\n\r\n")
        assert body.count(b'"choices"') == 2

    run(go)


@pytest.mark.parametrize("before", [0, 2], ids=["a-new-head", "a-head-that-came-before"])
def test_r9_an_answer_that_is_no_json_is_asked_for_elsewhere(before: int):
    """200, all of the bytes that were announced, and no end of the object."""

    async def go(rig: Rig) -> None:
        for _ in range(before):
            await rig.post(ask(prompt="short"))
        broken = b'{"choices": [{"text": "'

        async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(broken) + broken)
            return True

        rig.decode[0].behave = breaks
        for i in range(6):
            status, body = await rig.post(ask(prompt=f"{i} short"))
            assert (status, json.loads(body)) == (200, {"choices": [{"text": "hello"}]})
        assert len(rig.decode[0].seen) >= 1
        rig.decode[1].behave = breaks
        status, body = await rig.post(ask(prompt="nobody says it"))
        assert (status, "error" in json.loads(body)) in {(502, True), (503, True)}

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


def test_r9_an_event_without_an_end_goes_to_nobody():
    """A stream that nobody can carry on ends with an error event and not with megabytes of nonsense."""

    async def go(rig: Rig) -> None:
        async def huge(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a", "b"], end=False)
            writer.write(b"%x\r\n" % 10**8)
            for _ in range(10**8 // 65_536):
                writer.write(b"x" * 65_536)
                await writer.drain()
            return True

        rig.decode[0].behave = huge
        _, body = await rig.post(ask(prompt="short", stream=True))
        assert b"without an end" in body
        assert body.endswith(b"0\r\n\r\n")
        assert len(body) < 2_000

    run(go)


def test_an_event_that_comes_in_pieces_goes_out_whole():
    """What is held back is neither lost nor said twice, whatever the pieces are."""
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    whole = b"%x\r\n%b\r\n" % (len(event), event) * 3 + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    async def go(rig: Rig) -> None:
        for step in (1, 7, 40, 41, 42, 80):

            async def pieces(_: Any, writer: asyncio.StreamWriter, step: int = step) -> bool:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                for at in range(0, len(whole), step):
                    writer.write(whole[at : at + step])
                    await writer.drain()
                    await asyncio.sleep(0.001)
                return True

            rig.decode[0].behave = pieces
            assert (await rig.post(ask(prompt="short", stream=True)))[1] == whole

    run(go)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("code", [401, 403, 429])
def test_a_worker_that_refuses_us_is_not_quoted(code: int, prefill: bool, stream: bool):
    """The client's key and its share are the router's business: a worker that says 401 or 429 fails, and another one is asked."""

    async def go(rig: Rig) -> None:
        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, code, {"error": {"message": "not you", "code": "invalid_api_key"}})
            return True

        first, second = rig.prefill if prefill else rig.decode
        first.behave = refuses
        for i in range(6):
            status, body = await rig.post(ask(prompt=f"{i}" + (LONG if prefill else " short"), stream=stream))
            assert (status, b"not you" in body) == (200, False)
        assert 1 <= len(first.seen) < 6  # it is left alone soon
        if not prefill:
            second.behave = refuses
            status, body = await rig.post(ask(prompt="nobody takes it", stream=stream))
            assert (status in {502, 503}, b"not you" in body) == (True, False)

    config = msgspec.structs.replace(CONFIG, policy="roundRobin")
    run(go, prefill=2 if prefill else 0, decode=1 if prefill else 2, config=config)


DEEP = b"[" * 5_000 + b"]" * 5_000


@pytest.mark.parametrize(
    ("said", "prefills"),
    [
        pytest.param(b'{"choices": [], "kv_transfer_params": {"lease_id": "\xff"}}', 1, id="a lease that is no UTF-8"),
        pytest.param(b'{"choices": %b, "kv_transfer_params": {"lease_id": "l"}}' % DEEP, 2, id="an answer that is nested deep"),
        pytest.param(b'{"choices": [], "kv_transfer_params": {"a": %b}}' % DEEP, 2, id="a reference that is nested deep"),
        pytest.param(b'{"\xff": [], "b": 1}', 2, id="names that are no UTF-8"),
    ],
)
def test_a_prefill_answer_that_cannot_be_read_holds_nobody_up(said: bytes, prefills: int):
    """Its request waited until the deadline of the first token: the leg was over, and nothing went on."""

    async def go(rig: Rig) -> None:
        async def odd(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            return True

        for worker in rig.prefill:
            worker.behave = odd
        status, body = await rig.post(ask(prompt=LONG))
        assert (status, json.loads(body)) == (200, {"choices": [{"text": "hello"}]})
        assert sum(len(worker.seen) for worker in rig.prefill) == prefills

    run(go, prefill=2)
