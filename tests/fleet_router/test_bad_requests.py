"""Requests that a client must not be able to send: each is told what is wrong, or is closed at its bound."""

from __future__ import annotations

import asyncio
import contextlib
import json

import msgspec
import pytest

from fleet_router.config import HttpBounds, RouterConfig
from fleet_router.errors import RequestError
from fleet_router.inbound import Inbound
from fleet_router.receiving import PIECE_BYTES, PIECES_FEW
from fleet_router.request import parse_body
from tests.fleet_router.rig import BOUNDS, CONFIG, Rig, ask, run, until


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not a JSON object"),
        (b"[]", 400, "not a JSON object"),
        (b'{"model":"m"}', 400, "prompt is required"),
        (b'{"model":"x","prompt":"a"}', 404, "The model `x` does not exist."),
        (b'{"model":"' + b"x" * 9_000 + b'","prompt":"a"}', 404, f"The model `{'x' * 200}` does not exist."),
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
        (
            b'{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":"off"}}',
            400,
            "stream_options.include_usage must be true or false",
        ),
        (b'{"model":"m","prompt":"a","stream":true,"stream_options":{"a":1e999}}', 400, "stream_options: Number out of range"),
        (
            b'{"model":"m","prompt":"a","stream":true,"stream_options":' + b'{"a":' * 940 + b"1" + b"}" * 940 + b"}",
            400,
            "stream_options has 5641 bytes; allowed are 1024",
        ),
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


@pytest.mark.parametrize("depth", [450, 900, 979, 980, 981])
def test_options_that_are_nested_deep_are_refused_before_somebody_reads_them_from_deeper_down(depth: int):
    """Between 979 and 981 they were read where the request came in, and not where its usage is asked for: no answer at all."""
    options = b'{"a":' * depth + b"1" + b"}" * depth
    with pytest.raises(RequestError):
        parse_body(b'{"model":"m","prompt":"a","stream":true,"stream_options":' + options + b"}", False, CONFIG)


DEEP = {
    "stop_token_ids": (b"[", b"]"), "allowed_token_ids": (b"[", b"]"), "chat_template_kwargs": (b'{"a":', b"}"),
    "tools": (b"[", b"]"), "content": (b'[{"text":', b"}]"),
}  # fmt: skip
LIMITED = msgspec.structs.replace(CONFIG, max_input_tokens=100)


@pytest.mark.parametrize("field", DEEP)
def test_whatever_is_nested_deep_is_the_clients_fault_and_none_of_ours(field: str):
    """Of one depth a field was read with the body, and not where it was looked at by itself: 500, and counted as a bug."""
    opens, closes = DEEP[field]
    long = b'{"role":"user","content":"%b"}' % (b"a" * 2_000)
    for depth in range(300, 1_000):
        deep = b'"%b":%b1%b' % (field.encode(), opens * depth, closes * depth)
        ours, others = (b'{"role":"user",%b},' % deep, b"") if field == "content" else (b"", b"," + deep)
        with contextlib.suppress(RequestError):
            parse_body(b'{"model":"m","messages":[%b%b]%b}' % (ours, long, others), True, LIMITED if ours else CONFIG)


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
        pytest.param(b"OPTIONS /health HTTP/1.0\r\n\r\n", 505, id="http-1.0-of-haproxy"),
        pytest.param(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: h\r\n\r\n", 414, id="long-url"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431, id="h1-ten-thousand-headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 431, id="h1-long-header"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 200000000\r\n\r\n", 413, id="h3-lying-length"),
        pytest.param(b"GET /v1/completions HTTP/1.1\r\nhost: h\r\n\r\n", 405, id="method"),
        pytest.param(b"GET //v1/models HTTP/1.1\r\nhost: h\r\n\r\n", 404, id="double-slash"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="connect"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 26\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
            b'{"model":"m","prompt":"a"}',
            400,
            id="upgrade-with-two-lengths",
        ),
        pytest.param(b"\x16\x03\x01\x00\xa5\x01\x00", 400, id="tls-hello"),
        pytest.param(b"GET http:///health HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="absolute-without-a-host"),
        pytest.param(b"GET http://u:p@h/health HTTP/1.1\r\nhost: h\r\n\r\n", 400, id="absolute-with-a-user"),
        pytest.param(b"GET http://h/health HTTP/1.1\r\n\r\n", 400, id="absolute-and-no-host"),
        pytest.param(b"GET http://h/health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, id="absolute-and-two-hosts"),
        pytest.param(b"GET ftp://h/health HTTP/1.1\r\nhost: h\r\n\r\n", 404, id="absolute-of-another-scheme"),
        pytest.param(CLOSING, 200, id="a-good-one"),
    ],
)
def test_h4_requests_that_could_be_read_in_two_ways_are_refused(request_bytes: bytes, status: int):
    async def go(rig: Rig) -> None:
        got = await rig.raw(request_bytes, 2.0)
        assert got.startswith(b"HTTP/1.1 %d " % status), got[:200]
        assert (await rig.raw(CLOSING)).startswith(b"HTTP/1.1 200")

    run(go)


@pytest.mark.parametrize("version", ["0.9", "1.0"])
def test_who_speaks_an_older_http_is_told_what_to_do(version: str):
    async def go(rig: Rig) -> None:
        head, _, body = (await rig.raw(f"GET /health HTTP/{version}\r\nhost: h\r\n\r\n".encode(), 2.0)).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        assert (error["code"], error["retryable"]) == ("http_version", False)
        assert error["message"] == f"HTTP/{version} is not served: send HTTP/1.1 (in nginx: proxy_http_version 1.1)"

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


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_model_without_a_name_is_nobodys_fault_but_the_clients(path: str, more: dict):
    """A worker that was asked for it would say that it does not know the model, and be put out for everybody."""

    async def go(rig: Rig) -> None:
        for model in ("", " ", "x"):
            status, body = await rig.post({"model": model, **more}, path)
            assert (status, json.loads(body)["error"].get("type")) in {(404, "invalid_request_error"), (404, "not_found_error")}
        assert sum(len(worker.seen) for worker in rig.decode) == 0

    run(go)


@pytest.mark.parametrize(
    "trailer",
    ["x-slo-class: none", "host: other", "authorization: Bearer k", "x-slo-ttft-ms: x", "x-request-id: theirs"],
)
def test_what_stands_behind_a_chunked_body_is_no_header(trailer: str):
    """Incident: a class, a key and a request id were taken from trailers, which no proxy before us looks at (RFC 9110, 6.5.1)."""
    raw = json.dumps({"model": "m", "prompt": "short"}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
    request += b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(raw), raw, trailer.encode())

    async def go(rig: Rig) -> None:
        inbound = Inbound()
        inbound.feed(request, rig.context.config.bounds)
        (found,) = inbound.requests
        assert (found.request_id, found.key, found.slo_class, found.slo_ttft_ms, inbound.error) == ("mine", b"", b"", 0, None)
        got = await rig.raw(request * 2, 0.3)
        assert got.count(b"HTTP/1.1 200 ") == got.count(b"x-request-id: mine\r\n") == 2

    run(go, prefill=0)


def test_trailers_without_end_are_refused():
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    inbound = Inbound()
    inbound.feed(head + b"a: b\r\n" * 10_000, HttpBounds())
    assert (inbound.error is not None, inbound.error and inbound.error.status) == (True, 431)


@pytest.mark.parametrize("begun", [b"0\r\nx-t: ", b"2;a="], ids=["trailer", "extension"])
def test_a_trailer_that_does_not_end_is_refused(begun: bytes):
    """Incident: the parser keeps a field until it is whole; one behind a body grew for the 30 s that a body has, and each read of
    it was copied with all before it: 39 MB held the loop up for 5 s."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    inbound, bounds = Inbound(), HttpBounds()
    inbound.feed(head + begun, bounds)
    for _ in range((bounds.header_bytes + bounds.url_bytes) // 1_000):
        inbound.feed(b"a" * 1_000, bounds)
        assert inbound.error is None
    inbound.feed(b"a" * 1_000, bounds)
    assert (inbound.error is not None, inbound.error and inbound.error.status) == (True, 431)


def test_chunks_whose_framing_comes_apart_are_no_header():
    """However many: only what comes without a byte of a body between is counted."""
    inbound, bounds = Inbound(), HttpBounds()
    inbound.feed(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n", bounds)
    for _ in range(20_000):
        for piece in (b"2\r\n", b"{}", b"\r\n"):
            inbound.feed(piece, bounds)
    inbound.feed(b"0\r\n\r\n", bounds)
    assert (len(inbound.requests), inbound.error) == (1, None)


def test_a_body_in_small_chunks_takes_no_more_memory_than_it_has_bytes():
    """Incident: 4 MiB in chunks of two bytes were two million objects, 120 MB for each connection."""
    body = b'{"model":"m","prompt":"' + b"ab" * 50_000 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + 2]), body[at : at + 2]) for at in range(0, len(body), 2))
    inbound, most = Inbound(), 0
    for at in range(0, len(head + chunks), 4_096):
        inbound.feed((head + chunks)[at : at + 4_096], HttpBounds())
        assert inbound.current is not None
        most = max(most, len(inbound.current.body))
    assert most <= PIECES_FEW + len(body) // PIECE_BYTES
    inbound.feed(b"0\r\n\r\n", HttpBounds())
    (found,) = inbound.requests
    assert b"".join(found.body) == body


def test_a_router_that_was_told_of_no_fleet_yet_says_so():
    """It answered 404, "The model `m` does not exist", not retryable: SDKs gave up on a router that had just started."""
    with pytest.raises(RequestError) as caught:
        parse_body(b'{"model":"m","prompt":"a"}', False, RouterConfig(fleet="", served_name=""))
    assert (caught.value.status, caught.value.code) == (503, "not_ready")
