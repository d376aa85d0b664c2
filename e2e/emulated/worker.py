"""`python -m e2e.emulated.worker HOST PORT UID [CONTROL]`: one worker process. vLLM's dialect on PORT, agent and control on
CONTROL (PORT+1).

KV moves: a prefill leg pins a lease here; the decode leg reads it over TCP from the address in the reference and answers 503
KvTransferError when it cannot. The control port takes POST /fault (JSON, see `Faults`), GET /stats and GET /state, and has the
engine's counters as an agent shows them (GET /metrics).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import uvloop

from e2e.emulated.chat import call_of, choice, deltas, envelope, flat
from e2e.emulated.tokens import after, said, state_of, token_of, word

LEASE_S = 30.0
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HUGE_BYTES = 100 * 1024 * 1024


@dataclass
class Faults:
    """What is wrong with this worker."""

    mode: str = ""
    """errors, hang, not_http: instead of an answer; drip, reset, half_close, bad_json, extra, huge, twice: inside a stream."""
    after_tokens: int = 3
    """Streams break after so many."""
    flap_s: float = 0.0
    """So long up, then as long without a listener and without connections."""
    cut: list[str] = field(default_factory=list)
    """Uids of decode workers that cannot read KV here: their connections are reset."""
    deaf: bool = False
    """It computes the prompt itself and reads no KV, whatever was prefilled for it: right tokens, and nothing disaggregated."""
    tick_s: float = 0.002
    handshake_s: float = 0.0
    """The first time that it reads KV of a worker takes so much longer."""
    prompt_s: float = 0.0
    """Of streams whose prompt nobody has prefilled: their first token comes so much later."""
    compute_token_s: float = 0.0
    """Prompts are computed one after the other and take so long per token; what was prefilled elsewhere is not computed."""
    stall_every: int = 0
    """Of prefill legs every so-many-th takes `stall_s` longer, unless who asked leaves."""
    stall_s: float = 2.0
    weights: int = 0
    model: str = "tiny"


@dataclass
class Stats:
    asked: int = 0
    """Requests for tokens, prefill legs included."""
    finished: int = 0
    faulty: int = 0
    """Times that the fault was shown to somebody."""
    reads: int = 0
    pulled: int = 0
    """Prompts that it read the KV of, as a decode worker."""
    failed_pulls: int = 0
    cut_reads: int = 0
    released: int = 0
    flaps: int = 0
    prefills: int = 0
    stalled: int = 0
    left: int = 0
    """Stalls that nobody waited for to the end."""


class Worker:
    def __init__(self, host: str, port: int, uid: str, control_port: int) -> None:
        self.host, self.port, self.uid, self.control_port = host, port, uid, control_port
        self.faults, self.stats = Faults(), Stats()
        self.leases: dict[str, float] = {}
        self.by_request: dict[str, str] = {}
        self.open: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}
        self.running = 0
        self.numbers = random.SystemRandom()
        self.met: set[str] = set()
        self.core = asyncio.Lock()

    async def serve(self) -> None:
        await asyncio.start_server(self.control, self.host, self.control_port)
        server = await self.listen()
        print("ready", flush=True)
        while True:
            await asyncio.sleep(self.faults.flap_s or 0.05)
            if self.faults.flap_s:
                self.stats.flaps += 1
                server.close()
                for writer in list(self.open):
                    writer.transport.abort()
                await asyncio.sleep(self.faults.flap_s)
                server = await self.listen()

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self.connection, self.host, self.port, backlog=1024)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open[writer] = reader
        try:
            while True:
                method, path, headers, body = await received(reader)
                await self.route(method, path, headers, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self.open.pop(writer, None)
            writer.close()

    async def route(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if path == "/kv/release":
            lease = body.get("lease_id") or self.by_request.get(body.get("request_id", ""), "")
            self.stats.released += self.leases.pop(lease, None) is not None
            answer(writer, 200, {"released": True})
        elif path.startswith("/kv/read/"):
            self.read_by(path.split("/")[3:], writer)
        elif path == "/tokenize":
            answer(writer, 200, {"tokens": ids_of(body)})
        elif method == "POST":
            self.stats.asked += 1
            self.running += 1
            try:
                await self.generate(headers.get("x-request-id", ""), body, writer)
                self.stats.finished += 1
            finally:
                self.running -= 1
        else:
            answer(writer, 200, {"data": []})

    def read_by(self, named: list[str], writer: asyncio.StreamWriter) -> None:
        """A decode worker pulls: the lease is over when it has."""
        lease, reader = named
        if reader in self.faults.cut:
            self.stats.cut_reads += 1
            writer.transport.abort()
            return
        self.stats.reads += 1
        granted = self.leases.pop(lease, 0.0)
        answer(writer, 200 if granted > time.monotonic() else 404, {"uid": self.uid, "weights": self.faults.weights})

    async def generate(self, request_id: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body.get("model") != self.faults.model:
            answer(writer, 404, {"error": {"message": "The model does not exist.", "type": "NotFoundError"}})
            return
        params = body.get("kv_transfer_params") or {}
        if self.faults.mode and await self.broken(body, writer):
            return
        if self.faults.compute_token_s and not params.get("do_remote_prefill"):
            async with self.core:
                await asyncio.sleep(self.faults.compute_token_s * len(ids_of(body)))
        if params.get("do_remote_decode"):
            await self.stall(writer)
            await asyncio.sleep(self.faults.tick_s)
            answer(writer, 200, self.prefilled(request_id, body))
            return
        if params.get("do_remote_prefill") and not self.faults.deaf and not await self.pull(params):
            answer(writer, 503, {"error": {"message": "the KV could not be read", "type": "KvTransferError"}})
            return
        prompt, seed, nonce = ids_of(body), self.seed(body), []
        if seed < 0:  # not determined: the first token says which of its lives this one is
            seed, nonce = 0, [self.numbers.randrange(1_000, 2_000)]
        if (call := call_of(body)) is not None:
            await self.called(body, call, len(prompt), writer)
            return
        if body.get("stream"):
            await self.stream(body, prompt, seed, nonce, writer)
            return
        await asyncio.sleep(self.faults.tick_s * limit_of(body))
        ids = nonce + said([*prompt, *nonce], limit_of(body) - len(nonce), weights=self.faults.weights, seed=seed)
        said_it = choice(body, "".join(map(word, ids)), finish="length", streamed=False) | {"token_ids": ids}
        answer(writer, 200, envelope(body, [said_it], streamed=False) | {"usage": usage(len(prompt), len(ids))})

    async def called(self, body: dict[str, Any], call: dict[str, Any], prompt: int, writer: asyncio.StreamWriter) -> None:
        """The answer is a call of a function."""
        told = usage(prompt, 4)
        if not body.get("stream"):
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            found = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            answer(writer, 200, envelope(body, [found], streamed=False) | {"usage": told})
            return
        writer.write(STREAM)
        for delta in [*deltas(call), {}]:
            one = {"index": 0, "delta": delta, "finish_reason": None if delta else "tool_calls"}
            writer.write(chunk(data_of(envelope(body, [one], streamed=True))))
            await asyncio.sleep(self.faults.tick_s)
        self.end(body, told, writer)

    @staticmethod
    def seed(body: dict[str, Any]) -> int:
        if body.get("seed") is not None:
            return int(body["seed"])
        return 0 if body.get("temperature") == 0 else -1

    def prefilled(self, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
        lease = f"{self.uid}-{self.numbers.getrandbits(64):x}"
        self.leases[lease] = time.monotonic() + LEASE_S
        self.by_request[request_id] = lease
        while len(self.by_request) > 1_000:
            self.by_request.pop(next(iter(self.by_request)))
        reference = {"do_remote_prefill": True, "lease_id": lease, "remote_host": self.host, "remote_port": self.port}
        return {
            "choices": [],
            "usage": usage(len(ids_of(body)), 1),
            "kv_transfer_params": {**reference, "weights": self.faults.weights},
        }

    async def pull(self, params: dict[str, Any]) -> bool:
        """Read what was prefilled elsewhere; False when it could not be proven."""
        if params["remote_host"] not in self.met:
            await asyncio.sleep(self.faults.handshake_s)
            self.met.add(params["remote_host"])
        read = await self.read_from(params)
        self.stats.pulled += read
        self.stats.failed_pulls += not read
        return read

    async def read_from(self, params: dict[str, Any]) -> bool:
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
                writer.write(f"GET /kv/read/{params['lease_id']}/{self.uid} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(length_of(head))
                writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False
        return b" 200 " in head[:16] and json.loads(body)["weights"] == self.faults.weights

    async def stream(
        self, body: dict[str, Any], prompt: list[int], seed: int, nonce: list[int], writer: asyncio.StreamWriter
    ) -> None:
        if self.faults.prompt_s and not body.get("kv_transfer_params"):
            await asyncio.sleep(self.faults.prompt_s)
        writer.write(STREAM)
        state, count = state_of([*prompt, *nonce], self.faults.weights, seed), limit_of(body)
        for i in range(count):
            token = nonce[i] if i < len(nonce) else token_of(state)
            state = state if i < len(nonce) else after(state, token)
            one = chunk(event(body, token, last=i == count - 1))
            writer.write(one)
            await writer.drain()
            if writer.is_closing():
                raise ConnectionResetError
            if self.faults.mode == "twice" and i + 1 == self.faults.after_tokens:
                self.stats.faulty += 1
                writer.write(one)
            elif self.faults.mode and i + 1 == self.faults.after_tokens and await self.broken_stream(body, writer):
                return
            await asyncio.sleep(self.faults.tick_s)
        self.end(body, usage(len(prompt), count), writer)

    @staticmethod
    def end(body: dict[str, Any], told: dict[str, int], writer: asyncio.StreamWriter) -> None:
        """Of a stream that is whole."""
        if (body.get("stream_options") or {}).get("include_usage"):
            writer.write(chunk(data_of(envelope(body, [], streamed=True) | {"usage": told})))
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    # -- faults -----------------------------------------------------------------------------------------------------
    async def stall(self, writer: asyncio.StreamWriter) -> None:
        """Of a prefill leg. Who leaves ends it, as with an engine that aborts a request: no KV stays."""
        self.stats.prefills += 1
        if not self.faults.stall_every or self.stats.prefills % self.faults.stall_every:
            return
        self.stats.stalled += 1
        until = time.monotonic() + self.faults.stall_s
        while time.monotonic() < until:
            await asyncio.sleep(0.01)
            if writer.is_closing() or self.open[writer].at_eof():
                self.stats.left += 1
                raise ConnectionResetError

    async def broken(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Faults before the first byte; True when this was the answer."""
        mode = self.faults.mode
        whole = mode == "bad_json" and not body.get("stream")  # a stream of it breaks later, and is counted there
        self.stats.faulty += whole or mode in ("errors", "hang", "not_http")
        if mode == "errors":
            await asyncio.sleep(0.001)
            answer(writer, 500, {"error": {"message": "out of order"}})
        elif mode == "hang":
            await asyncio.sleep(3600)
        elif mode == "not_http":
            writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        elif whole:
            raw = b'{"choices": [{"text": '
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        else:
            return False
        return True

    async def broken_stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Faults inside a stream; True when it is over by that."""
        mode, one = self.faults.mode, chunk(event(body, 1, last=False))
        if mode not in ("drip", "reset", "half_close", "bad_json", "extra", "huge"):
            return False
        self.stats.faulty += 1
        if mode == "drip":
            for i in range(len(one) * 100):
                writer.write(one[i % len(one) : i % len(one) + 1])
                await writer.drain()
                await asyncio.sleep(1.0)
        elif mode == "reset":
            writer.write(one[: len(one) // 2])
            await writer.drain()
            writer.transport.abort()
        elif mode == "half_close":
            writer.write_eof()
            await asyncio.sleep(30)
        elif mode == "bad_json":
            writer.write(chunk(b'data: {"choices": [{"text": "\n\n'))
        elif mode == "extra":  # an event behind the end of the answer
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" + one)
        else:
            writer.write(b"%x\r\n" % HUGE_BYTES)
            for _ in range(HUGE_BYTES // 65_536):
                writer.write(b"x" * 65_536)
                await writer.drain()
            writer.write(b"\r\n")
        await writer.drain()
        return True

    # -- control ----------------------------------------------------------------------------------------------------
    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, path, _, body = await received(reader)
        if path == "/fault":
            self.faults = Faults(
                **{**asdict(Faults()), **{one.name: body[one.name] for one in fields(Faults) if one.name in body}}
            )
        if path == "/metrics":
            writer.write(self.exposition())
            await writer.drain()
            writer.close()
            return
        now = time.monotonic()
        pinned = sum(until > now for until in self.leases.values())
        answer(writer, 200, {**asdict(self.stats), "pinned": pinned, "running": self.running, "uid": self.uid})
        await writer.drain()
        writer.close()

    def exposition(self) -> bytes:
        """vLLM's names for what an engine holds and what KV it read."""
        rows = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": 0,
            "vllm:nixl_xfer_time_seconds_count": self.stats.pulled,
            "vllm:nixl_bytes_transferred_sum": self.stats.pulled * 1_000,
            "vllm:nixl_num_failed_transfers_total": self.stats.failed_pulls,
        }
        raw = "".join(f"{name} {value}\n" for name, value in rows.items()).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw


async def received(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return method, path, headers, json.loads(raw) if raw else {}


def length_of(head: bytes) -> int:
    return int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


def ids_of(body: dict[str, Any]) -> list[int]:
    """Of a prompt of ids; text and conversations are ids by their bytes."""
    if "messages" in body:
        return list(flat(body["messages"]).encode())
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) else list(prompt.encode())


def limit_of(body: dict[str, Any]) -> int:
    """Tokens to make; chat has two names for it."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)


def usage(prompt: int, count: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def event(body: dict[str, Any], token: int, *, last: bool) -> bytes:
    one = choice(body, word(token), finish="length" if last else None, streamed=True)
    one |= {"token_ids": [token]} if body.get("return_token_ids") else {}
    return data_of(envelope(body, [one], streamed=True))


def data_of(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)


if __name__ == "__main__":
    host, port, uid, *control = sys.argv[1:]
    uvloop.run(Worker(host, int(port), uid, int(control[0]) if control else int(port) + 1).serve())
