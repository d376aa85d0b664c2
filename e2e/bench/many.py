"""Many routers before the same workers: how evenly the workers are loaded, next to one router. `python -m e2e.bench.many`

Real router processes; the workers and the clients are in this process, so that what every worker runs is seen at one moment. The
measure is the mean over time of (most requests at a worker) / (mean of all workers), in a closed loop over prompts of a few
families, with the routers' default policy. Clients take the routers in turn, request by request, as a Service would at its worst.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httptools

from e2e.bench.backend import answered
from e2e.bench.proxies import Proxy, ours
from fleet_router.config import RouterConfig

WORKERS: Final = 8
CLIENTS: Final = 64
FAMILIES: Final = 24
SECONDS: Final = 5.0
WARM_S: Final = 1.0
SAMPLE_S: Final = 0.01
HOLD_S: Final = (0.15, 0.45)
ROUNDS: Final = 5
CONFIG: Final = RouterConfig(fleet="bench", served_name="tiny", slow_start_s=0.0)
KEY: Final = "k" * 40


class Worker(asyncio.Protocol):
    """Answers each request after a random time and says how many it has."""

    def __init__(self, running: list[int], at: int, rng: random.Random) -> None:
        self.running, self.at, self.rng = running, at, rng
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.running[self.at] += 1
        asyncio.get_running_loop().call_later(self.rng.uniform(*HOLD_S), self.answer)

    def answer(self) -> None:
        self.running[self.at] -= 1
        if not self.transport.is_closing():
            self.transport.write(answered(b""))  # type: ignore[attr-defined]


@dataclass
class Seen:
    """One run."""

    ratios: list[float] = field(default_factory=list)
    served: int = 0
    errors: int = 0

    @property
    def imbalance(self) -> float:
        """Mean of max/mean."""
        return statistics.mean(self.ratios)


@contextmanager
def routers(
    count: int, base: str, folder: Path, workers: Sequence[str], *, gossip: bool, more: Sequence[str] = ()
) -> Iterator[list[Proxy]]:
    """Router processes at 127.BASE.1, .2, ..., which gossip by a static list of peers, or do not."""
    key = folder / "gossip.key"
    key.write_text(KEY + "\n")
    hosts = [f"127.{base}.{i + 1}" for i in range(count)]
    peers = ",".join(f"{host}:8082" for host in hosts)
    extra = ["--gossip-key", str(key), "--gossip-peers", peers] if gossip else []
    with ExitStack() as stack:
        yield [
            stack.enter_context(ours(f"router-{i}", f"{host}:8080", [], workers, folder, CONFIG, extra=[*extra, *more]))
            for i, host in enumerate(hosts)
        ]


async def load(proxies: Sequence[Proxy], running: list[int], seconds: float, seed: int) -> Seen:
    """A closed loop through these routers."""
    seen, rng = Seen(), random.Random(seed)
    families = [f"family {i} " + "x" * 2_000 for i in range(FAMILIES)]
    weights = [1 / (i + 1) for i in range(FAMILIES)]
    end = asyncio.get_running_loop().time() + WARM_S + seconds

    async def client(number: int) -> None:
        links = [await asyncio.open_connection(*p.address.rsplit(":", 1)) for p in proxies]
        turn = number
        while asyncio.get_running_loop().time() < end:
            reader, writer = links[turn % len(links)]
            turn += 1
            prompt = rng.choices(families, weights)[0] + f" tail {rng.random()}"
            body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 16}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            seen.served += 1
            seen.errors += " 200 " not in head.split("\r\n")[0]
        for _, writer in links:
            writer.close()

    async def sample() -> None:
        await asyncio.sleep(WARM_S)
        while asyncio.get_running_loop().time() < end:
            if any(running):
                seen.ratios.append(max(running) / statistics.mean(running))
            await asyncio.sleep(SAMPLE_S)

    await asyncio.gather(sample(), *(client(i) for i in range(CLIENTS)))
    return seen


async def measured(counts: Sequence[tuple[int, bool]], seconds: float, rounds: int, folder: Path) -> list[list[Seen]]:
    """Of each (routers, gossip), alternating; new processes each time."""
    running, rng = [0] * WORKERS, random.Random(1)
    addresses = [f"127.86.0.{i + 1}:8000" for i in range(WORKERS)]
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda at=at: Worker(running, at, rng), *address.split(":"))  # type: ignore[misc]
        for at, address in enumerate(addresses)
    ]
    found: list[list[Seen]] = [[] for _ in counts]
    for turn in range(rounds):
        for at, (count, gossip) in enumerate(counts):
            inside = folder / f"{turn}-{at}"
            inside.mkdir()
            stack = ExitStack()
            proxies = await asyncio.to_thread(stack.enter_context, routers(count, "86.1", inside, addresses, gossip=gossip))
            try:
                found[at].append(await load(proxies, running, seconds, turn))
            finally:
                await asyncio.to_thread(stack.close)
    for server in servers:
        server.close()
    return found


def main() -> int:
    """A table, and one JSON object as the last line."""
    wanted = [(1, False), (3, True), (3, False)]
    with tempfile.TemporaryDirectory() as folder:
        one, three, silent = asyncio.run(measured(wanted, SECONDS, ROUNDS, Path(folder)))
    by_name = {"one": one, "three": three, "three_without_gossip": silent}
    imbalance = {name: statistics.median(seen.imbalance for seen in runs) for name, runs in by_name.items()}
    for name, value in imbalance.items():
        print(f"{name:22} max/mean {value:.3f}  {sum(s.served for s in by_name[name])} requests")
    ratios = {f"{name}_vs_one": round(value / imbalance["one"], 3) for name, value in imbalance.items() if name != "one"}
    errors = sum(seen.errors for runs in by_name.values() for seen in runs)
    print(json.dumps({**{k: round(v, 3) for k, v in imbalance.items()}, **ratios, "rounds": ROUNDS, "errors": errors}))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
