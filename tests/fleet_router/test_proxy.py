"""The data plane on real sockets against workers that speak the dialect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.health.breaker import Breaker
from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until


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


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({"max_completion_tokens": 40}, {"max_tokens": 40}),
        ({"max_completion_tokens": 40, "max_tokens": None}, {"max_tokens": 40}),
        ({"max_completion_tokens": None}, {}),
        ({"max_completion_tokens": 40, "max_tokens": 9}, {"max_completion_tokens": 40, "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize("prompt", ["one", "x" * 4_000], ids=["short", "long"])
def test_a_completions_limit_is_told_by_the_name_that_engines_know(limits: dict[str, Any], sent: dict[str, Any], prompt: str):
    """vLLM knows `max_completion_tokens` in chat alone: a completion that asked for 40 tokens so was given OpenAI's default of
    16, after we had looked at the limit and counted on it."""

    async def go(rig: Rig) -> None:
        for _ in range(2):  # what was learnt of the first is not told of the second
            assert (await rig.post(ask(prompt=prompt, **limits)))[0] == 200
        for body in rig.decode[0].seen:
            assert {name: body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None} == sent
            assert body["prompt"] == prompt
        chat = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_completion_tokens": 40}
        await rig.post(chat, "/v1/chat/completions")
        assert rig.decode[0].seen[-1].items() >= chat.items()

    run(go, prefill=0)


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
        assert sum(rig.context.metrics.of("t", "r").ttft.fold()) == 0  # a refusal is no first token

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


def test_k12_a_worker_that_sends_no_token_is_given_up_at_the_deadline():
    async def go(rig: Rig) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(30)
            return True

        rig.decode[0].behave = hang
        posted = asyncio.create_task(rig.post(ask(prompt="short", stream=True)))
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


def test_a_prefill_leg_asks_for_one_sequence_and_its_decode_leg_for_all():
    """Every other one would pin KV on the prefill worker that nobody reads."""
    more = {"n": 4, "best_of": 4, "use_beam_search": False, "prompt_logprobs": 1, "echo": True}

    async def go(rig: Rig) -> None:
        assert (await rig.post(ask(**more, temperature=0.5)))[0] == 200
        (prefill,), (decode,) = rig.prefill[0].seen, rig.decode[0].seen
        assert not more.keys() & prefill.keys()
        assert prefill["temperature"] == 0.5
        assert more.items() <= decode.items()

    run(go)
