"""What every engine must do, whoever wrote it. Collected through test_torch.py here and e2e/test_conformance_vllm.py there.

`pair` is a fixture of (prefill worker, decode worker), both ready, both serving the tiny model under the name "tiny".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import zmq

from fleet_wire.events import TOPIC, BlockStored, decode
from tests.conformance.workers import Worker

PROMPT = "The router moves a block of keys and values before noon. " * 24
Pair = tuple[Worker, Worker]


def completion(prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **more}


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def prefill_leg(worker: Worker, **more: Any) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = worker.post("/v1/completions", completion(max_tokens=1, kv_transfer_params=params, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def events(worker: Worker, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", worker.engine + path, json={**body, "stream": True}, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def eventually(check, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.05)


@contextmanager
def subscribed(worker: Worker) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber whose subscription the engine has seen: a message of its own came through."""
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.RCVTIMEO, 10_000)
        live.setsockopt(zmq.LINGER, 0)
        live.connect(f"tcp://{worker.ip}:{worker.config.ports.kv_events}")
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.setsockopt(zmq.RCVTIMEO, 200)
        for first in range(50):  # joining takes a moment, and nothing tells when it is over
            tokens(worker.post("/v1/completions", completion([20 + first] * 200, max_tokens=1)))
            try:
                live.recv_multipart()
                break
            except zmq.Again:
                continue
        live.setsockopt(zmq.RCVTIMEO, 10_000)
        yield live


def blocks_until(live: zmq.Socket[bytes], prompt: list[int]) -> tuple[list[BlockStored], int]:
    """The prompt's blocks in order as they were published, and the number of the last batch."""
    found: list[BlockStored] = []
    while True:
        topic, number, payload = live.recv_multipart()
        assert topic == TOPIC
        for event in decode(payload).events:
            if isinstance(event, BlockStored) and (found or event.token_ids == prompt[: len(event.token_ids)]):
                found.append(event)
        if found and sum(len(event.token_ids) for event in found) + found[0].block_size > len(prompt):
            return found, int.from_bytes(number, "big")


def replayed(worker: Worker, number: int) -> Any:
    """The last event of batch `number`, asked for as a subscriber does that missed it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{worker.ip}:{worker.config.ports.kv_replay}")
        asking.send_multipart([b"", number.to_bytes(8, "big")])
        frames = asking.recv_multipart()
        assert int.from_bytes(frames[-2], "big") == number
        return decode(frames[-1]).events[-1]


class Conformance:
    """One engine conformance suite."""

    def test_models_lists_the_served_name(self, pair: Pair):
        for worker in pair:
            card = httpx.get(worker.engine + "/v1/models", timeout=10).json()["data"][0]
            assert (card["id"], card["max_model_len"]) == ("tiny", 1024)

    def test_a_stream_says_the_same_as_a_whole_answer(self, pair: Pair):
        whole = pair[1].post("/v1/completions", completion()).json()
        parts = events(pair[1], "/v1/completions", completion(stream_options={"include_usage": True}))
        assert "".join(p["choices"][0]["text"] for p in parts if p["choices"]) == whole["choices"][0]["text"]
        assert [t for p in parts if p["choices"] for t in p["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
        assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12
        assert [p["choices"][0]["finish_reason"] for p in parts if p["choices"]][-1] == "length"

    def test_chat_streams_and_answers(self, pair: Pair):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        whole = pair[1].post("/v1/chat/completions", body).json()
        parts = events(pair[1], "/v1/chat/completions", body)
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts) == whole["choices"][0]["message"]["content"]

    def test_text_and_token_ids_are_the_same_prompt(self, pair: Pair):
        answer = pair[1].post("/v1/completions", completion())
        ids = answer.json()["choices"][0]["prompt_token_ids"]
        assert tokens(pair[1].post("/v1/completions", completion(ids))) == tokens(answer)

    def test_tokens_are_counted_as_the_engine_counts_them(self, pair: Pair):
        counted = pair[1].post("/tokenize", {"model": "tiny", "prompt": PROMPT}).json()
        used = pair[1].post("/v1/completions", completion(max_tokens=1)).json()["usage"]["prompt_tokens"]
        assert counted["count"] == len(counted["tokens"]) == used
        assert PROMPT.strip() in pair[1].post("/detokenize", {"model": "tiny", "tokens": counted["tokens"]}).json()["prompt"]
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "What moves?"}]}
        counted = pair[1].post("/tokenize", asked).json()
        used = pair[1].post("/v1/chat/completions", {**asked, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert counted["count"] == used

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [("/tokenize", {"model": "tiny"}, 400), ("/tokenize", {"model": "tiny", "prompt": 7}, 400),
         ("/tokenize", {"model": "no", "prompt": "a"}, 404), ("/detokenize", {"model": "tiny", "tokens": "a"}, 400)],
    )  # fmt: skip
    def test_bad_tokenise_requests_are_refused(self, pair: Pair, path: str, body: dict[str, Any], status: int):
        assert pair[1].post(path, body).status_code == status

    def test_stop_string_ends_the_answer_before_it(self, pair: Pair):
        text = pair[1].post("/v1/completions", completion(max_tokens=24)).json()["choices"][0]["text"]
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        choice = pair[1].post("/v1/completions", completion(max_tokens=24, stop=[stop])).json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)

    def test_a_seed_makes_a_sample_repeatable(self, pair: Pair):
        body = completion(temperature=0.9, seed=7)
        assert tokens(pair[1].post("/v1/completions", body)) == tokens(pair[1].post("/v1/completions", body))

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"prompt": [5] * 2000}, 400),
            ({"model": "nobody"}, 404),
            ({"max_tokens": -1}, 400),
            ({"temperature": "hot"}, 400),
            ({"kv_transfer_params": "yes"}, 400),
        ],
        ids=["longer-than-the-model", "unknown-model", "negative", "wrong-type", "kv-params-no-object"],
    )
    def test_bad_requests_are_refused_in_vllms_shape(self, pair: Pair, change: dict[str, Any], status: int):
        answer = pair[1].post("/v1/completions", completion(**change))
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]

    def test_a_prompt_that_is_too_long_is_told_the_numbers(self, pair: Pair):
        message = pair[1].post("/v1/completions", completion([5] * 2000)).json()["error"]["message"]
        assert "1024" in message
        assert "2000" in message or "2012" in message or "1012" in message

    def test_invalid_json_is_400(self, pair: Pair):
        answer = httpx.post(
            pair[1].engine + "/v1/completions", content=b'{"model": "tiny",', headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400

    def test_prefill_there_decode_here_equals_one_process(self, pair: Pair):
        prefill, decode = pair
        moved = decode.metric("vllm:nixl_xfer_time_seconds_count"), decode.metric("vllm:nixl_bytes_transferred_sum")
        alone = tokens(prefill.post("/v1/completions", completion()))
        there = tokens(decode.post("/v1/completions", completion(kv_transfer_params=prefill_leg(prefill))))
        assert there == alone
        eventually(lambda: decode.metric("vllm:nixl_xfer_time_seconds_count") > moved[0])
        assert decode.metric("vllm:nixl_bytes_transferred_sum") > moved[1]

    def test_a_streamed_decode_leg_says_the_same(self, pair: Pair):
        prefill, decode = pair
        other = "A worker keeps two replicas again and again! " * 30
        alone = tokens(prefill.post("/v1/completions", completion(other)))
        reference = prefill_leg(prefill, prompt=other)
        parts = events(decode, "/v1/completions", completion(other, kv_transfer_params=reference))
        assert [t for p in parts if p["choices"] for t in p["choices"][0]["token_ids"]] == alone

    def test_a_client_that_leaves_frees_the_engine(self, pair: Pair):
        worker = pair[1]
        body = completion("hello", max_tokens=900, ignore_eos=True, stream=True)
        with httpx.stream("POST", worker.engine + "/v1/completions", json=body, timeout=60) as answer:
            parts = answer.iter_raw()  # held: dropping the iterator would already leave
            next(parts)
            running = worker.metric("vllm:num_requests_running")
            assert running == 1, (answer.status_code, running)
        eventually(lambda: worker.metric("vllm:num_requests_running") + worker.metric("vllm:num_requests_waiting") == 0)

    def test_metrics_move(self, pair: Pair):
        worker = pair[1]
        names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"]
        names += [
            "vllm:e2e_request_latency_seconds_count",
            "vllm:inter_token_latency_seconds_count",
            "vllm:request_success_total",
        ]
        before = {name: worker.metric(name) for name in names}
        tokens(worker.post("/v1/completions", completion("something new to say")))
        eventually(lambda: all(worker.metric(name) > before[name] for name in names))

    def test_kv_events_say_which_blocks_hold_which_tokens(self, pair: Pair):
        """A subscriber learns the whole prompt as a chain of blocks; one that missed it gets the same by replay."""
        worker, prompt = pair[1], [11 + i % 700 for i in range(400)]
        with subscribed(worker) as live:
            tokens(worker.post("/v1/completions", completion(prompt)))
            stored, number = blocks_until(live, prompt)
        assert stored[0].parent_block_hash is None
        assert stored[0].block_size in (16, 128)
        covered = [token for event in stored for token in event.token_ids]
        assert covered == prompt[: len(covered)]
        assert len(covered) >= len(prompt) - stored[0].block_size
        parents = [stored[0].block_hashes[-1], *(event.block_hashes[-1] for event in stored[1:])]
        assert [event.parent_block_hash for event in stored[1:]] == parents[:-1]
        assert replayed(worker, number) == stored[-1]

    def test_the_agent_reports_its_engine(self, pair: Pair):
        for worker, role in zip(pair, ("prefill", "decode"), strict=True):
            state = httpx.get(worker.agent + "/state", timeout=10).json()
            assert (state["phase"], state["role"], state["engine"]) == ("Serving", role, worker.config.engine)
            assert "fleet_agent_engine_up 1" in httpx.get(worker.agent + "/metrics", timeout=10).text
