"""The data plane on real sockets against workers that speak the dialect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.health.breaker import Breaker
from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import BOUNDS, CONFIG, Rig, ask, run, until


def test_a_long_prompt_takes_two_legs_and_unknown_fields_pass_through():
    async def go(rig: Rig) -> None:
        status, body = await rig.post(ask(max_tokens=7, top_secret=1, stream=False))
        assert (status, b"hello" in body) == (200, True)
        first, second = rig.prefill[0].seen[0], rig.decode[0].seen[0]
        assert (first["max_tokens"], first["stream"], first["top_secret"]) == (1, False, 1)
        assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False, "max_tokens": 7}
        assert (second["max_tokens"], second["kv_transfer_params"]["lease_id"]) == (7, "lease-1")
        assert rig.prefill[0].released == []  # the decode worker took it

    run(go)


def test_a_short_prompt_is_prefilled_where_it_is_decoded():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        assert (len(rig.prefill[0].seen), "kv_transfer_params" in rig.decode[0].seen[0]) == (0, False)

    run(go)


def test_streams_are_spliced_to_the_end():
    async def go(rig: Rig) -> None:
        _, body = await rig.post(ask(stream=True))
        assert body.count(b"data: ") == 4
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    run(go)


def test_h7_clients_cannot_set_internal_fields():
    async def go(rig: Rig) -> None:
        ours: dict[str, Any] = {
            "kv_transfer_params": {"do_remote_prefill": True}, "priority": 9, "cache_salt": "x", "session_id": "s",
            "ec_transfer_params": {}, "vllm_xargs": {"kv_transfer_params": "x"},
        }  # fmt: skip
        await rig.post(ask(prompt="short", **ours))
        assert not ours.keys() & rig.decode[0].seen[0].keys()

    run(go)


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_prefill_worker_is_replaced_once(status: int):
    async def go(rig: Rig) -> None:
        async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, status, {})
            return True

        rig.prefill[0].behave = rig.prefill[1].behave = refuse
        found, _ = await rig.post(ask())
        assert found == 200  # the decode worker is healthy: it prefills
        assert sum(len(w.seen) for w in rig.prefill) == 2
        assert "kv_transfer_params" not in rig.decode[0].seen[0]
        rig.prefill[1].behave = None
        for worker in rig.context.table.workers.values():
            worker.breaker = Breaker()
        assert (await rig.post(ask()))[0] == 200

    run(go, prefill=2)


def test_two_failed_prefills_and_two_failed_decodes_are_the_most_that_is_tried():
    async def go(rig: Rig) -> None:
        async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 500, {})
            return True

        for worker in rig.prefill + rig.decode:
            worker.behave = refuse
        status, body = await rig.post(ask())
        assert (status, b"two workers failed; the last one was decode-" in body) == (502, True)
        assert [sum(len(w.seen) for w in role) for role in (rig.prefill, rig.decode)] == [2, 2]

    run(go, prefill=3, decode=3)


def test_nulls_are_absent_and_a_list_of_one_prompt_is_that_prompt():
    async def go(rig: Rig) -> None:
        nulls = dict.fromkeys(["stream", "max_tokens", "min_tokens", "stream_options"])
        for prompt in ("one", ["one"], [[1, 2, 3]]):
            assert (await rig.post(ask(prompt=prompt, **nulls)))[0] == 200
        assert [body["prompt"] for body in rig.decode[0].seen] == ["one", "one", [1, 2, 3]]

    run(go)


def test_what_decode_would_refuse_is_told_to_prefill():
    async def go(rig: Rig) -> None:
        await rig.post(ask(max_tokens=9, min_tokens=3, max_completion_tokens=None, stream=True, stream_options={}))
        told = rig.prefill[0].seen[0]
        assert told["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "max_tokens": 9, "min_tokens": 3,
        }  # fmt: skip
        assert (told["max_tokens"], told["stream"], "min_tokens" in told) == (1, False, False)

    run(go)


def test_without_another_prefill_worker_the_decode_worker_prefills():
    async def go(rig: Rig) -> None:
        await rig.prefill[0].stop()
        assert (await rig.post(ask()))[0] == 200
        assert "kv_transfer_params" not in rig.decode[0].seen[0]

    run(go)


def test_a_decode_worker_that_dies_before_its_first_byte_is_replaced_and_the_lease_released():
    async def go(rig: Rig) -> None:
        async def die(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.close()
            return True

        rig.decode[0].behave = die
        for _ in range(4):
            assert (await rig.post(ask()))[0] == 200
        if rig.decode[0].seen:
            await until(lambda: rig.prefill[0].released == ["lease-1"] * len(rig.decode[0].seen))

    run(go, decode=2)


def test_kv_that_cannot_be_proven_is_prefilled_again_where_it_is_decoded():
    async def go(rig: Rig) -> None:
        async def unproven(body: Any, writer: asyncio.StreamWriter) -> bool:
            if "kv_transfer_params" not in body:
                return False
            answer(writer, 503, {"error": {"type": "KvTransferError"}})
            return True

        rig.decode[0].behave = unproven
        assert (await rig.post(ask()))[0] == 200
        assert len(rig.decode[0].seen) == 2
        await until(lambda: rig.prefill[0].released == ["lease-1"])

    run(go)


def test_a_workers_refusal_reaches_the_client_as_it_is():
    async def go(rig: Rig) -> None:
        async def too_long(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, 400, {"error": {"message": "1203 tokens"}})
            return True

        rig.prefill[0].behave = too_long
        status, body = await rig.post(ask())
        assert (status, b"1203 tokens" in body, len(rig.decode[0].seen)) == (400, True, 0)

    run(go)


@pytest.mark.parametrize("status", [400, 404, 413])
def test_a_decode_workers_refusal_gives_the_prefilled_kv_back(status: int):
    """Else each such request holds KV until its lease runs out, and other requests wait for room."""

    async def go(rig: Rig) -> None:
        async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, status, {"error": {"message": "no"}})
            return True

        rig.decode[0].behave = refuse
        assert (await rig.post(ask()))[0] == status
        await until(lambda: rig.prefill[0].released == ["lease-1"])

    run(go)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_k8_a_client_that_leaves_ends_the_leg(leg: str):
    async def go(rig: Rig) -> None:
        started = asyncio.Event()

        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            started.set()
            await asyncio.sleep(30)
            return True

        worker = getattr(rig, leg)[0]
        worker.behave = hang
        raw = json.dumps(ask()).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
        await asyncio.wait_for(started.wait(), 3)
        writer.close()

        def gone() -> bool:
            rig.sweep()
            return rig.idle()

        await until(gone)
        expected = ["lease-1"] if leg == "decode" else rig.prefill[0].request_ids[:1]
        await until(lambda: rig.prefill[0].released == expected)

    run(go)


def test_two_requests_that_a_client_calls_the_same_are_two_for_a_worker():
    """Else giving back one of them would end the other."""

    async def go(rig: Rig) -> None:
        raw = json.dumps(ask()).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nx-request-id: mine\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        )
        got = [await rig.raw(head % len(raw) + raw) for _ in range(2)]
        assert all(b"x-request-id: mine\r\n" in answer for answer in got)
        ids = rig.decode[0].request_ids
        assert len(set(ids)) == 2
        assert all(found.endswith(".mine") for found in ids)

    run(go)


def test_r1_no_worker_is_503_with_retry_after():
    async def go(rig: Rig) -> None:
        got = await rig.raw(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 26\r\n\r\n"
                            b'{"model":"m","prompt":"a"}')  # fmt: skip
        assert got.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in got

    run(go, prefill=1, decode=0)


def test_a_removed_worker_gets_nothing_new_and_its_stream_goes_on():
    async def go(rig: Rig) -> None:
        async def slow(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["a"] * 20, gap_s=0.02)
            return True

        for worker in rig.decode:
            worker.behave = slow
        running = asyncio.create_task(rig.post(ask(prompt="short", stream=True)))
        await until(lambda: any(worker.seen for worker in rig.decode))
        old, other = sorted(rig.decode, key=lambda worker: -len(worker.seen))
        other.behave = None
        rig.apply(rig.prefill, [other])
        for _ in range(5):
            assert (await rig.post(ask(prompt="short")))[0] == 200
        assert len(old.seen) == 1
        assert (await running)[1].endswith(b"0\r\n\r\n")

    run(go, decode=2)


def test_a_reload_changes_new_requests_only():
    async def go(rig: Rig) -> None:
        rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(CONFIG, max_output_tokens=3))
        status, body = await rig.post(ask(max_tokens=4))
        assert (status, b"allowed are 1 to 3" in body) == (400, True)

    run(go)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not a JSON object"),
        (b"[]", 400, "not a JSON object"),
        (b'{"model":"m"}', 400, "prompt is required"),
        (b'{"model":"x","prompt":"a"}', 404, "The model `x` does not exist."),
        (b'{"model":7,"prompt":"a"}', 400, "model: Expected `str`, got `int`"),
        (b'{"model":"m","prompt":null}', 400, "prompt is required"),
        (b'{"prompt":"a"}', 400, "model is required"),
        (b'{"model":null,"prompt":"a"}', 400, "model is required"),
        (b'{"model":"m","prompt":{}}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":7}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":[1,"a"]}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":[["a"]]}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":[[[1]]]}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":[[]]}', 400, "prompt is empty"),
        (b'{"model":"m","prompt":[1.5]}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":[-1]}', 400, "prompt must be text or a list of token ids"),
        (b'{"model":"m","prompt":["a","b"]}', 400, "prompt holds several prompts; one per request is served"),
        (b'{"model":"m","prompt":"a","min_tokens":9,"max_tokens":8}', 400, "min_tokens is 9; allowed are 0 to max_tokens"),
        (b'{"model":"m","prompt":"a","min_tokens":-1}', 400, "min_tokens is -1"),
        (b'{"model":"m","prompt":"a","stream_options":{}}', 400, "stream_options is only allowed when stream is true"),
        (b'{"model":"m","prompt":"a","stream":true,"stream_options":7}', 400, "stream_options: Expected `object`, got `int`"),
        (b'{"model":"m","prompt":[]}', 400, "prompt is empty"),
        (b'{"model":"m","prompt":"a","max_tokens":0}', 400, "max_tokens is 0; allowed are 1 to 4096"),
        (b'{"model":"m","prompt":"a","stream":"yes"}', 400, "stream: Expected `bool`, got `str`"),
        (b'{"model":"m","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, ""),
        (b'{"model":"m","prompt":"' + b"a" * 30_000 + b'"}', 413, "larger than 20000 bytes"),
        (json.dumps({"model": "m", "prompt": [1] * 3000}).encode(), 400, "prompt has 3000 tokens; allowed are 2048"),
        (b'\xff\xfe{"model"', 400, ""),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_h5_bad_bodies_are_told_what_is_wrong(body: bytes, status: int, words: str):
    async def go(rig: Rig) -> None:
        found, answered = await rig.post(body)
        error = json.loads(answered)["error"]
        assert (found, words in error["message"]) == (status, True), error
        assert error["request_id"]
        assert (await rig.post(ask()))[0] == 200

    run(go)


SIMPLE = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400, id="both"
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400, id="two-lengths"
        ),
        pytest.param(b"GET /health HTTP/1.1\r\n\r\n", 400, id="no-host"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, id="two-hosts"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: a/b?c=\r\n\r\n", 400, id="host-with-a-path"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\n folded: x\r\n\r\n", 400, id="obs-fold"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400, id="odd-encoding"),
        pytest.param(b"GET /health HTTP/1.0\r\nhost: h\r\n\r\n", 505, id="http-1.0"),
        pytest.param(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: h\r\n\r\n", 414, id="long-url"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431, id="h1-ten-thousand-headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 431, id="h1-long-header"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 200000000\r\n\r\n", 413, id="h3-lying-length"),
        pytest.param(b"GET /v1/completions HTTP/1.1\r\nhost: h\r\n\r\n", 405, id="method"),
        pytest.param(b"GET //v1/models HTTP/1.1\r\nhost: h\r\n\r\n", 404, id="double-slash"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="connect"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 400, id="upgrade"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 26\r\n\r\n"
            b'{"model":"m","prompt":"a"}',
            400,
            id="upgrade-with-a-body",
        ),
        pytest.param(b"\x16\x03\x01\x00\xa5\x01\x00", 400, id="tls-hello"),
        pytest.param(CLOSING, 200, id="a-good-one"),
    ],
)
def test_h4_requests_that_could_be_read_in_two_ways_are_refused(request_bytes: bytes, status: int):
    async def go(rig: Rig) -> None:
        got = await rig.raw(request_bytes, 2.0)
        assert got.startswith(b"HTTP/1.1 %d " % status), got[:200]
        assert (await rig.raw(CLOSING)).startswith(b"HTTP/1.1 200")

    run(go)


def test_h3_endless_chunks_are_cut_at_the_bound():
    async def go(rig: Rig) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        got = await rig.raw(
            head + b"1000\r\n" + (b"a" * 4096) + b"\r\n" + b"1000\r\n" * 1 + (b"b" * 4096 + b"\r\n1000\r\n") * 5, 1.0
        )
        assert got.startswith(b"HTTP/1.1 413 ")

    run(go)


def test_h2_a_slow_request_is_closed_at_its_deadline():
    async def go(rig: Rig) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET /health HTTP/1.1\r\nho")
        await until(lambda: len(rig.connections) == 1)
        await asyncio.sleep(0.05)
        connection = next(iter(rig.connections))
        connection.sweep(rig.context.clock() + BOUNDS.header_deadline_s - 1)
        connection.sweep(rig.context.clock() + BOUNDS.header_deadline_s + 1)
        assert (await reader.read(100)).startswith(b"HTTP/1.1 408 ")
        writer.close()

    run(go)


def test_k12_a_worker_that_sends_no_token_is_given_up_at_the_deadline():
    async def go(rig: Rig) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(30)
            return True

        rig.decode[0].behave = hang
        posted = asyncio.create_task(rig.post(ask(prompt="short")))
        await until(lambda: len(rig.decode[0].seen) == 1)
        for connection in list(rig.connections):
            connection.sweep(rig.context.clock() + CONFIG.first_token_deadline_s + 1)
        assert (await posted)[0] == 504

    run(go)


def test_only_answers_after_a_remote_prefill_count_as_handed_over():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        text = (await rig.raw(b"GET /metrics HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")).decode()
        handed = [line for line in text.splitlines() if line.startswith("fleet_router_handed_over_total")]
        assert handed == ['fleet_router_handed_over_total{tier="t"} 0']

    run(go)


def test_metrics_and_models_and_ready():
    async def go(rig: Rig) -> None:
        await rig.post(ask())
        text = (await rig.raw(b"GET /metrics HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")).decode()
        assert 'fleet_router_requests_total{code="200"} 1' in text
        assert "fleet_router_remote_prefill_total 1" in text
        assert 'fleet_router_handed_over_total{tier="t"} 1' in text
        assert 'fleet_router_inflight{role="decode",tier="t"} 0' in text
        assert b'"id":"m"' in await rig.raw(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        assert (await rig.raw(b"GET /ready HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(go)
