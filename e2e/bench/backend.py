"""Cheap workers for the router benchmark: the same for every router, so that what differs is the router.

Four addresses in one process. An answer is always the same but for its token counts; a stream of N chunks (`max_tokens`) sends
one per tick, as an engine does at each step, each in a packet of its own; when the prompt says FLOOD all at once, one write each.
A prompt that says HOLD is answered whole, after as many ticks. The mark is in the prompt because routers write JSON anew, with
other spaces: a mark that one of them changes would give it other work than the rest.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import httptools
import uvloop

TICK_S = 0.005
TEXT = (
    '{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":" word","logprobs":null,'
)
EVENT = b"data: " + TEXT.encode() + b'"finish_reason":null,"stop_reason":null}]}\n\n'
LAST_EVENT = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"length"')
CHUNK, LAST = (b"%x\r\n%b\r\n" % (len(event), event) for event in (EVENT, LAST_EVENT))
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FLOOD = "FLOOD"
HOLD = "HOLD"
MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
STREAM = re.compile(rb'"stream"\s*:\s*true')
PREFILL = re.compile(rb'"do_remote_decode"\s*:\s*true')


def whole(body: bytes) -> bytes:
    """A 200 answer."""
    return f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


BYTES_PER_TOKEN = 5
"""Of a request's body: routers learn from the counts what a prompt costs."""
USAGE = TEXT + '"finish_reason":"length"}],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}'
REFERENCE = (
    ',"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3],"remote_engine_id":"e",'
    '"remote_request_id":"r","remote_host":"127.83.0.1","remote_port":5600,"remote_num_tokens":%d,"lease_id":"l-1",'
    '"lease_generation":1,"remote_epoch":"p","digest":"00"}'
)


def answered(body: bytes | bytearray) -> bytes:
    """To a request with this body; with a reference to KV where it asks for one."""
    tokens = max(1, len(body) // BYTES_PER_TOKEN)
    if PREFILL.search(body):
        return whole((USAGE % (tokens, tokens + 1, 1) + REFERENCE % tokens + "}").encode())
    return whole((USAGE % (tokens, tokens + 16, 16) + "}").encode())


INFO = whole(
    b'{"model_path":"tiny","tokenizer_path":"","status":"ready","object":"list","data":[{"id":"tiny","object":"model"}]}'
)


class Worker(asyncio.Protocol):
    """One connection of a router (or of the client, when it measures without one)."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body.clear()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.parser.get_method() != b"POST":
            self.transport.write(INFO)
        elif STREAM.search(self.body):
            found = MAX_TOKENS.search(self.body)
            self.transport.write(STREAM_HEAD)
            chunks = int(found[1]) if found else 1
            if FLOOD.encode() in self.body:
                for _ in range(chunks - 1):
                    self.transport.write(CHUNK)
                self.transport.write(LAST)
                self.transport.write(END)
            else:
                self.tick(chunks)
        elif HOLD.encode() in self.body:
            found = MAX_TOKENS.search(self.body)
            asyncio.get_running_loop().call_later(TICK_S * int(found[1] if found else 1), self.answer)
        else:
            self.transport.write(answered(self.body))

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(answered(self.body))

    def tick(self, left: int) -> None:
        if self.transport.is_closing():
            return
        if left == 0:
            self.transport.write(END)
            return
        self.transport.write(CHUNK if left > 1 else LAST)
        asyncio.get_running_loop().call_later(TICK_S, self.tick, left - 1)


async def serve(addresses: list[str]) -> None:
    """Until killed."""
    loop = asyncio.get_running_loop()
    for address in addresses:
        host, _, port = address.rpartition(":")
        await loop.create_server(Worker, host, int(port))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
