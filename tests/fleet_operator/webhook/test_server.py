"""The webhook server over real TLS: rotation under open connections, bounds on bodies, connections, heads and time."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from fleet_operator.certs.issue import Material, carry_out
from fleet_operator.certs.keeper import _load
from fleet_operator.certs.plan import Lifetimes, Work
from fleet_operator.cluster.interface import FLEET, POOL, UnavailableError
from fleet_operator.webhook.server import Limits, admission_app, admission_server
from tests.fleet_operator.webhook.test_judge import VLLM, fleet, pool, review

DEFAULTS = Limits()
NAMES = frozenset({"localhost", "127.0.0.1"})


class Api:
    """Reads of a pool and its fleet."""

    silent = False

    async def get(self, kind: Any, namespace: str, name: str) -> dict[str, Any]:
        if self.silent:
            raise UnavailableError("gone")
        return {FLEET: fleet(), POOL: pool()}[kind]


@dataclass
class Server:
    port: int
    context: ssl.SSLContext
    material: Material
    api: Api

    def trust(self, bundle: bytes | None = None) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=(bundle or self.material.bundle).decode())

    def turn(self, step: str) -> None:
        """One step of a renewal, and the server gets the result."""
        self.material = carry_out(Work(step, ""), self.material, NAMES, time.time(), Lifetimes())  # type: ignore[arg-type]
        _load(self.context, self.material)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust())


@asynccontextmanager
async def serving(limits: Limits = DEFAULTS) -> AsyncIterator[Server]:
    material = carry_out(Work("everything", ""), None, NAMES, time.time(), Lifetimes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, material)
    api = Api()
    async with admission_server(admission_app(api, limits), context, 0, "127.0.0.1", limits) as port:  # type: ignore[arg-type]
        yield Server(port, context, material, api)


def run(scenario: Callable[[Server], Awaitable[None]], limits: Limits = DEFAULTS) -> None:
    async def whole() -> None:
        async with serving(limits) as server:
            await scenario(server)

    asyncio.run(whole())


async def ask(session: aiohttp.ClientSession, server: Server, path: str, body: Any, **how: Any) -> tuple[int, Any]:
    url = f"https://127.0.0.1:{server.port}{path}"
    how.setdefault("ssl", server.trust())
    async with session.post(url, data=body if isinstance(body, bytes) else json.dumps(body), **how) as answer:
        return answer.status, json.loads(await answer.read() or b"{}")


def test_the_three_webhooks_answer():
    async def scenario(server: Server) -> None:
        async with aiohttp.ClientSession() as session:
            status, answer = await ask(session, server, "/validate/fleet", review(object=fleet(engine=VLLM)))
            assert (status, answer["response"]["allowed"]) == (200, False)
            _, answer = await ask(session, server, "/mutate/fleet", review())
            assert answer["response"]["patchType"] == "JSONPatch"
            too_many = review(object={"spec": {"replicas": 9}}, name="p", operation="UPDATE", subResource="scale")
            _, answer = await ask(session, server, "/validate/scale", too_many)
            assert "between 2 (minReplicas) and 4" in answer["response"]["status"]["message"]
            server.api.silent = True
            _, answer = await ask(session, server, "/validate/scale", too_many)
            assert answer["response"]["allowed"]

    run(scenario)


def test_a_new_certificate_under_open_connections():
    """An open connection goes on, a new one sees the new certificate, and both are trusted all the way through."""

    async def scenario(server: Server) -> None:
        old_bundle = server.material.bundle
        async with aiohttp.ClientSession() as kept:
            assert (await ask(kept, server, "/mutate/fleet", review()))[0] == 200
            server.turn("authority")
            both = server.trust()
            async with aiohttp.ClientSession() as new:
                assert (await ask(new, server, "/mutate/fleet", review(), ssl=server.trust(old_bundle)))[0] == 200
            server.turn("serving")
            async with aiohttp.ClientSession() as new:
                assert (await ask(new, server, "/mutate/fleet", review(), ssl=both))[0] == 200
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await ask(new, server, "/mutate/fleet", review(), ssl=server.trust(old_bundle))
            server.turn("prune")
            assert (await ask(kept, server, "/mutate/fleet", review()))[0] == 200
            async with aiohttp.ClientSession() as new:
                assert (await ask(new, server, "/mutate/fleet", review(), ssl=server.trust()))[0] == 200

    run(scenario)


def test_old_protocols_and_plain_http_get_nothing():
    async def scenario(server: Server) -> None:
        old = server.trust()
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=old)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /mutate/fleet HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200" not in await reader.read()
        writer.close()

    with pytest.warns(DeprecationWarning, match="TLS"):
        run(scenario)


def test_a_body_is_bounded():
    async def scenario(server: Server) -> None:
        async with aiohttp.ClientSession() as session:
            assert (await ask(session, server, "/validate/fleet", json.dumps(review()).encode()))[0] == 200
            with_padding = json.dumps(review(object={"spec": "x" * 20_000})).encode()
            status = 0
            try:
                url = f"https://127.0.0.1:{server.port}/validate/fleet"
                async with session.post(url, data=with_padding, ssl=server.trust()) as answer:
                    status = answer.status
            except aiohttp.ClientError:
                status = 413
            assert status == 413

    run(scenario, Limits(body_bytes=10_000))


def test_garbage_is_answered_and_the_server_goes_on():
    async def scenario(server: Server) -> None:
        async with aiohttp.ClientSession() as session:
            for body in (b"", b"{}", b"\xff" * 1_000, b"[" * 50_000):
                assert (await ask(session, server, "/validate/fleet", body))[0] == 400
            assert (await ask(session, server, "/validate/fleet", review()))[0] == 200

    run(scenario)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("levels", [100, 500, 700, 900])
@pytest.mark.parametrize("place", ["annotations", "spec", "status"])
def test_what_is_nested_deeply_is_refused_in_words(levels: int, place: str):
    """It was answered 500, or 400 as no JSON: whoever applied it read of a webhook that failed."""

    async def scenario(server: Server) -> None:
        odd = fleet()
        if place == "annotations":
            odd["metadata"]["annotations"] = nested(levels)
        else:
            odd[place] = {**odd.get(place, {}), "x": nested(levels)}
        async with aiohttp.ClientSession() as session:
            status, answer = await ask(session, server, "/validate/fleet", review(object=odd))
            assert (status, answer["response"]["allowed"]) == (200, False)
            assert answer["response"]["status"]["message"]
            assert (await ask(session, server, "/mutate/fleet", review(object=odd)))[0] == 200

    run(scenario)


def test_a_body_that_is_nested_too_deeply_to_be_read_says_so():
    async def scenario(server: Server) -> None:
        async with aiohttp.ClientSession() as session:
            status, answer = await ask(session, server, "/validate/fleet", b'{"a":' * 5_000 + b"1" + b"}" * 5_000)
            assert (status, answer) == (400, {"error": "the body is nested too deeply"})

    run(scenario)


def test_who_sends_nothing_or_drips_its_head_leaves():
    async def scenario(server: Server) -> None:
        reader, writer = await server.raw()
        dripping, drips = await server.raw()
        for letter in b"POST /validate":
            drips.write(bytes([letter]))
            await asyncio.sleep(0.05)
        for stream in (reader, dripping):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
                await asyncio.wait_for(stream.readexactly(1), 5)
        writer.close()
        drips.close()

    run(scenario, Limits(review_s=0.3))


def test_who_sends_nothing_after_a_slow_handshake_leaves_too():
    """Protocols are made before the handshake: who took longer for it than a review may take was never looked at again, and 128
    of those kept every review from being answered."""

    async def scenario(server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0.5)  # longer than a review, shorter than a handshake may last
        await writer.start_tls(server.trust(), server_hostname="127.0.0.1")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()

    run(scenario, Limits(review_s=0.3, handshake_s=1.0))


def test_a_body_that_drips_is_not_waited_for():
    async def scenario(server: Server) -> None:
        reader, writer = await server.raw()
        writer.write(b"POST /validate/fleet HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b"503" in answer
        assert b"not judged in time" in answer
        writer.close()

    run(scenario, Limits(review_s=0.3))


def test_connections_are_bounded():
    async def scenario(server: Server) -> None:
        held = [await server.raw() for _ in range(4)]

        async def one_more() -> None:
            reader, _ = await server.raw()
            await reader.readexactly(1)

        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):  # a TimeoutError is an OSError, too
            await asyncio.wait_for(one_more(), 5)
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.2)
        async with aiohttp.ClientSession() as session:
            assert (await ask(session, server, "/validate/fleet", review()))[0] == 200

    run(scenario, Limits(connections=4, review_s=30.0))


def test_a_slow_judge_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch):
    """The operator reconciles in the same process."""
    import fleet_operator.webhook.server as module

    def slow(request: Any) -> Any:
        time.sleep(0.5)
        return module.ALLOWED

    monkeypatch.setattr(module, "judge_fleet", slow)

    async def scenario(server: Server) -> None:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        turning = asyncio.create_task(turn())
        async with aiohttp.ClientSession() as session:
            assert (await ask(session, server, "/validate/fleet", review()))[0] == 200
        turning.cancel()
        assert turns >= 20

    run(scenario)
