"""Several router processes before the same workers: evenly loaded workers, quotas that hold over all, and nothing that needs it.

Real router processes; emulated workers. Datagrams of gossip are real as well, those of a stranger too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from e2e.bench.backend import HOLD
from e2e.bench.many import KEY, measured, routers
from e2e.bench.proxies import Proxy, workers
from e2e.test_router_admission import key_of, tenants_file
from fleet_router.gossip.message import Load, Message, Use, name_of, parse_keys, seal

pytestmark = pytest.mark.timeout(300)
WORKERS = ["127.86.2.1:8000", "127.86.2.2:8000"]
MOST_RATIO = 1.1
SECONDS, ROUNDS = 4.0, 3
LIMIT = 6


def metric(proxy: Proxy, name: str) -> float:
    """Sum of all series of this name."""
    text = httpx.get(f"http://{proxy.address}/metrics", trust_env=False).text
    found = re.findall(rf"^{name}(?:\{{.*\}})? ([-0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return sum(float(value) for value in found)


def until(check: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.1)


def all_met(proxies: Sequence[Proxy]) -> None:
    until(lambda: all(metric(proxy, "fleet_router_gossip_peers") == len(proxies) - 1 for proxy in proxies))


async def ask(proxy: Proxy, ticks: int, after_s: float = 0.0) -> int:
    """Status of one request of the tenant that has a limit; it holds a slot for so many ticks."""
    await asyncio.sleep(after_s)
    body = json.dumps({"model": "tiny", "prompt": f"{HOLD} acme", "max_tokens": ticks})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key_of('acme')}\r\nconnection: close\r\n"
    host, _, port = proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        status = int((await reader.readuntil(b"\r\n")).split(b" ")[1])
        await reader.read()
        return status
    finally:
        writer.close()


def in_turn(proxies: Sequence[Proxy], count: int, ticks: int) -> list[int]:
    """So many requests, each at the next router, slower than rounds of gossip."""

    async def go() -> list[int]:
        return await asyncio.gather(*(ask(proxies[i % len(proxies)], ticks, 0.2 * i) for i in range(count)))

    return asyncio.run(go())


def test_three_routers_load_workers_as_evenly_as_one(tmp_path: Path):
    one, three, silent = asyncio.run(measured([(1, False), (3, True), (3, False)], SECONDS, ROUNDS, tmp_path))
    median = [statistics.median(seen.imbalance for seen in runs) for runs in (one, three, silent)]
    print(f"max/mean: one {median[0]:.3f}, three {median[1]:.3f}, three without gossip {median[2]:.3f}")
    assert sum(seen.errors for seen in [*one, *three, *silent]) == 0
    assert all(seen.served > 100 for seen in [*one, *three, *silent])
    assert median[1] <= MOST_RATIO * median[0]


def test_a_tenants_limit_holds_over_three_routers(tmp_path: Path):
    tenants = ["--tenants", str(tenants_file(tmp_path / "tenants.json", acme={"concurrency": LIMIT}))]
    with workers(WORKERS, tmp_path), routers(3, "86.3", tmp_path, WORKERS, gossip=True, more=tenants) as three:
        all_met(three)
        told = in_turn(three, 2 * LIMIT, ticks=1_000)
        assert (told.count(200), told.count(429)) == (LIMIT, LIMIT), told
        assert [metric(proxy, "fleet_router_tenant_inflight") for proxy in three] == [0, 0, 0]


def test_a_router_that_is_killed_holds_nothing_of_a_limit_for_long(tmp_path: Path):
    """R6's other half. Stage one: with one router's request the limit is reached at the other one; stage two: a few seconds
    after its SIGKILL it is not."""
    tenants = ["--tenants", str(tenants_file(tmp_path / "tenants.json", acme={"concurrency": 1}))]
    with workers(WORKERS, tmp_path), routers(2, "86.4", tmp_path, WORKERS, gossip=True, more=tenants) as (first, second):
        all_met([first, second])

        async def go() -> None:
            holding = asyncio.create_task(ask(first, ticks=4_000))
            await asyncio.to_thread(until, lambda: metric(first, "fleet_router_tenant_inflight") == 1)
            end = time.monotonic() + 10
            while await ask(second, ticks=1) != 429:
                assert time.monotonic() < end
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            killed = time.monotonic()
            while await ask(second, ticks=1) != 200:
                assert time.monotonic() < killed + 10
                await asyncio.sleep(0.1)
            assert time.monotonic() - killed < 6
            with pytest.raises(asyncio.IncompleteReadError):
                await holding

        asyncio.run(go())


def test_nobody_without_the_key_is_heard(tmp_path: Path):
    """Noise, a stranger's key, an old datagram and one that was heard before change nothing; with the key it would be heard."""
    ours, strangers = parse_keys(KEY.encode())[0], parse_keys(b"s" * 40)[0]
    with workers(WORKERS, tmp_path), routers(1, "86.5", tmp_path, WORKERS, gossip=True) as (router,):
        host, udp = router.address.partition(":")[0], socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

        def say(key: bytes, number: int = 1, old_s: float = 0.0, sender: int = 7) -> None:
            stamp_ms = int((time.time() - old_s) * 1000)
            loads = (Load(name_of("0"), 999_999, 0, 0, 0),)
            udp.sendto(seal(Message(1, sender, number, stamp_ms, 0, loads, (Use(1, 1, 1, 1),)), key), (host, 8082))

        for noise in (b"", b"x", os.urandom(500), b"\x80\x04\x95cposix\nsystem\n.", os.urandom(9_000)):
            udp.sendto(noise, (host, 8082))
        say(strangers)
        say(ours, old_s=60)
        until(lambda: metric(router, "fleet_router_gossip_received_total") >= 7)
        assert metric(router, "fleet_router_gossip_refused_total") == 7
        assert metric(router, "fleet_router_gossip_peers") == 0
        assert asyncio.run(ask(router, ticks=1)) == 200
        say(ours, number=3)
        until(lambda: metric(router, "fleet_router_gossip_peers") == 1)
        assert metric(router, "fleet_router_worker_inflight") == 0  # of our own: what others have is theirs to tell
        assert asyncio.run(ask(router, ticks=1)) == 200
        udp.close()


def test_a_key_is_changed_while_routers_gossip(tmp_path: Path):
    with workers(WORKERS, tmp_path), routers(2, "86.6", tmp_path, WORKERS, gossip=True) as two:
        all_met(two)
        key = tmp_path / "gossip.key"
        for content in (f"{KEY}\n{'n' * 40}\n", f"{'n' * 40}\n{KEY}\n", f"{'n' * 40}\n"):
            key.write_text(content)
            time.sleep(4.5)  # read every two seconds
        received = metric(two[0], "fleet_router_gossip_received_total")
        until(lambda: metric(two[0], "fleet_router_gossip_received_total") > received)
        assert [metric(proxy, "fleet_router_gossip_refused_total") for proxy in two] == [0, 0]
