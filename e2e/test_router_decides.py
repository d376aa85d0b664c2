"""`routing.remotePrefill.decide: cost` on real engines: nobody's time is spent on moving KV where nobody waits, and a prompt that
would wait behind another one on the decode worker is prefilled elsewhere. Tokens are the same either way.

Two fleets of the same weights, one after the other: the first decides by cost, in the second every prompt is prefilled remotely.
And emulated workers, of which the time of a prompt and of a token is known: whole answers teach the same as streams.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from e2e.emulated.asking import Ask, Ledger, ask
from e2e.emulated.fleet import CONFIG, Emulated
from e2e.fleet_up import free_port, gone, running
from e2e.test_router_explain import explain
from fleet_cli.up.bundled import bundled_manifest, tiny_model

pytestmark = pytest.mark.timeout(600)
AT_ONCE = 4
BURSTS = 4
"""After so many it is known how fast these workers are: slower by far than was guessed."""
LOCAL, REMOTE = "local prefill costs less", "remote prefill"
MOVED = re.compile(r"stopped; KV moved: (?:(\d+) transfers|nothing)")


def wish(decide: str) -> dict[str, Any]:
    made = bundled_manifest(tiny_model())
    made["spec"]["engine"]["maxModelLen"] = 4_096
    tier = made["spec"]["tiers"][0]
    tier |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:1", "max": "1:1"}}
    tier["prefill"], tier["decode"] = ({"minReplicas": 1, "maxReplicas": 1} for _ in range(2))
    made["spec"]["routing"] = {"remotePrefill": {"decide": decide, "minUncachedTokens": 16}}
    return made


def prompt(number: int, words: int) -> str:
    """No two have a beginning in common: nothing of them is cached anywhere."""
    return f"{number} " + " ".join(f"word{(number * 7 + k) % 97}" for k in range(words))


SHORT = {f"short-{i}": prompt(i, 24) for i in range(4)}


def burst(number: int) -> dict[str, str]:
    return {f"long-{number}-{i}": prompt(100 + number * AT_ONCE + i, 300) for i in range(AT_ONCE)}


LONG = burst(0) | burst(1)


class Client:
    """What came of requests: text by id, and the reason by which the router chose."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.texts: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    async def ask(self, client: httpx.AsyncClient, name: str, said: str) -> None:
        body = {"model": "tiny", "prompt": said, "max_tokens": 8, "temperature": 0, "stream": True}
        headers = {"x-request-id": name, "x-fleet-explain": "1"}
        answer = await client.post(f"{self.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        self.texts[name] = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        self.reasons[name] = answer.headers["x-fleet-decision"].partition('reason="')[2].partition('"')[0]

    async def all(self, asked: dict[str, str], at_once: int) -> None:
        names = list(asked)
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            for start in range(0, len(names), at_once):
                some: Sequence[str] = names[start : start + at_once]
                await asyncio.gather(*(self.ask(client, name, asked[name]) for name in some))

    def counted(self, name: str) -> int:
        found = re.search(rf"^fleet_router_{name}_total (\d+)$", httpx.get(f"{self.url}/metrics", trust_env=False).text, re.M)
        assert found is not None
        return int(found[1])


def fleet_of(folder: Path, decide: str) -> list[str]:
    folder.mkdir()
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(wish(decide)))
    return [str(path), "--port", str(free_port()), "--state", str(folder / "state")]


def by_cost(arguments: list[str]) -> tuple[Client, int, int]:
    """(answers and reasons, prompts that went elsewhere, transfers that the engines counted)."""
    url = f"http://127.0.0.1:{arguments[2]}"
    with running(*arguments) as fleet:
        fleet.until("curl")
        client = Client(url)
        asyncio.run(client.all(SHORT, 1))
        assert set(client.reasons.values()) == {LOCAL}, client.reasons
        assert client.counted("remote_prefill") == 0
        for number in (0, *range(2, BURSTS), 1):
            asyncio.run(client.all(burst(number), AT_ONCE))
        for name in (next(iter(SHORT)), next(n for n, why in client.reasons.items() if why == REMOTE)):
            told = explain(url, name)
            assert told.returncode == 0, told.stderr
            assert client.reasons[name] in told.stdout, told.stdout
        twice(url, client)
        remote = client.counted("remote_prefill")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    found = MOVED.search("".join(fleet.lines))
    assert found is not None, "".join(fleet.lines)
    return client, remote, int(found[1] or 0)


def twice(url: str, client: Client) -> None:
    """Of two fields of one name the engine takes the one that we have checked: the last."""
    body = b'{"model":"tiny","prompt":"%b","prompt":"%b","max_tokens":99,"temperature":1.5,"temperature":0,"max_tokens":8}'
    name, said = next(iter(SHORT.items()))
    headers = {"content-type": "application/json"}
    filled = body % (b"another one", said.encode())
    answer = httpx.post(f"{url}/v1/completions", content=filled, headers=headers, timeout=60, trust_env=False)
    assert answer.json()["choices"][0]["text"] == client.texts[name], answer.text


def test_decided_by_cost_kv_moves_when_somebody_would_wait_and_tokens_are_the_same(tmp_path: Path):
    client, remote, moved = by_cost(fleet_of(tmp_path / "cost", "cost"))
    whys = list(client.reasons.values())
    print(f"{whys.count(LOCAL)} on the decode worker, {whys.count(REMOTE)} elsewhere; {moved} transfers")
    assert {client.reasons[name] for name in burst(1)} == {LOCAL, REMOTE}, client.reasons
    assert moved == remote == whys.count(REMOTE)
    arguments = fleet_of(tmp_path / "threshold", "threshold")
    other = Client(f"http://127.0.0.1:{arguments[2]}")
    with running(*arguments) as fleet:
        fleet.until("curl")
        asyncio.run(other.all(SHORT | LONG, 1))
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    assert set(other.reasons.values()) == {REMOTE}
    assert other.texts == {name: client.texts[name] for name in SHORT | LONG}
    assert gone(tmp_path / "cost/state")
    assert gone(tmp_path / "threshold/state")


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole answers"])
def test_bursts_spread_to_the_prefill_worker_however_they_are_answered(tmp_path: Path, stream: bool):
    """A prompt takes 0.3 s, seven times what a router guesses. While nothing was learnt of whole answers all of them waited for
    the decode worker."""
    config = msgspec.structs.replace(CONFIG, decide="cost", min_uncached_tokens=16)
    with Emulated(tmp_path, 141 + stream, prefill=1, decode=1, config=config) as fleet:
        for worker in fleet.workers:
            worker.fault(compute_token_s=1e-3)
        ledger, before = Ledger(), 0.0
        for number in range(8):
            before = fleet.metric("remote_prefill_total")
            prompts = [(number * AT_ONCE + i, *range(299)) for i in range(AT_ONCE)]
            asks = [Ask(one, max_tokens=8, stream=stream, ids=False) for one in prompts]
            asyncio.run(together(fleet.address, asks, ledger))
        moved, last = fleet.metric("remote_prefill_total"), fleet.metric("remote_prefill_total") - before
        print(f"{ledger.right} of {ledger.all} right, {moved:.0f} prefilled elsewhere, {last:.0f} of the last four")
        assert (ledger.right, ledger.all) == (8 * AT_ONCE, 8 * AT_ONCE), ledger
        assert 1 <= last <= 3
        assert moved == sum(worker.stats()["pulled"] for worker in fleet.decode)
        fleet.quiet()


async def together(address: str, asks: Sequence[Ask], ledger: Ledger) -> None:
    """All at once."""
    await asyncio.gather(*(ask(address, one, ledger) for one in asks))
