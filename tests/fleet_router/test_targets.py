"""What is asked for: targets in absolute form, offers of another protocol, one model by its name."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fleet_router.rig import Rig, answer_of, ask, http, run

SHORT = ask(prompt="short")
HEALTH = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"


# -- offers of another protocol (RFC 9110, 7.8) -------------------------------------------------------------------------
@pytest.mark.parametrize("offer", ["h2c", "websocket", "HTTP/3.0, foo"])
def test_an_offer_of_another_protocol_is_passed_over(offer: str):
    """As Java's client and `curl --http2` make one with every request."""
    more = f"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nUPGRADE : {offer}".replace(" :", ":")

    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        for _ in range(3):  # the second time its head is not parsed
            writer.write(http({**SHORT, "prompt": "\r\nupgrade: x\r\n"}, *more.split("\r\n")))
            assert (await answer_of(reader))[0] == 200
        assert json.loads(json.dumps(rig.decode[0].seen[-1]["prompt"])) == "\r\nupgrade: x\r\n"
        writer.write(f"GET /v1/models HTTP/1.1\r\nhost: h\r\n{more}\r\n\r\n".encode() + HEALTH)
        assert b'"id":"m"' in (await answer_of(reader))[2]
        assert (await answer_of(reader))[2] == b"ok\n"

    run(go, prefill=0)


@pytest.mark.parametrize(("path", "status"), [("m", 200), ("%6d", 200), ("other", 404), ("", 404)])
def test_one_model_is_told_by_its_name(path: str, status: int):
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        writer.write(f"GET /v1/models/{path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
        found, _, body = await answer_of(reader)
        assert found == status
        assert json.loads(body)["id"] == "m" if status == 200 else json.loads(body)["error"]["code"] == "model_not_found"

    run(go)


# -- targets in absolute form (RFC 9112, 3.2.2) ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("http://other/v1/models", 200, b'"id":"m"'),
        ("HTTPS://other:8443/v1/models?a=b", 200, b'"id":"m"'),
        ("http://[::1]:80/v1/models", 200, b'"id":"m"'),
        ("http://other/debug/decisions?limit=x", 400, b"limit must be a number"),
        ("http://other", 404, b"no such path: /"),
        ("http://other?a=/v1/models", 404, b"no such path: /"),
    ],
)
def test_a_target_may_name_the_host_before_its_path(target: str, status: int, words: bytes):
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        for size in (10_000, 3):  # in one packet, and cut within the target
            sent = f"GET {target} HTTP/1.1\r\nhost: h\r\n\r\n".encode()
            for at in range(0, len(sent), size):
                writer.write(sent[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            found, _, body = await answer_of(reader)
            assert (found, words in body) == (status, True), body

    run(go)


def test_an_absolute_target_generates_again_and_again_and_its_errors_are_its_dialects():
    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        for _ in range(3):  # the second time its head is not parsed
            writer.write(http(SHORT, path="http://other/v1/completions"))
            assert (await answer_of(reader))[0] == 200
        writer.write(http({"model": "m"}, path="http://other/v1/messages"))
        assert json.loads((await answer_of(reader))[2])["type"] == "error"
        writer.write(http({}, "content-encoding: gzip", path="http://other/v1/messages"))
        assert json.loads((await answer_of(reader))[2])["type"] == "error"

    run(go)
