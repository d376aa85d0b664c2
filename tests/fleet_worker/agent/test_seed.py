"""Whom a new worker asks for hot prefixes, for how long, and that nothing of it keeps a worker from being ready."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_worker.agent.engine_client import EngineClient
from fleet_worker.agent.seed import LEAST_S, TRIES, Peer, Seeded, SeedKeeper, Try, next_try, parse_peers
from fleet_worker.config import MOST_SEED_PEERS, SEED_PEERS_ENV, KvSettings, SeedSettings
from tests.fleet_worker.agent.test_command import config

OWN = "10.0.0.9"
A, B, C = (Peer(f"10.0.0.{n}", 5600) for n in (1, 2, 3))
GOT = Seeded(blocks=4, nbytes=4096)
FAILED = Seeded(refused=3, reason="digest", message="other bytes")


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("", ()),
        ("10.0.0.1:5600,10.0.0.2:5600", (A, B)),
        (" 10.0.0.1:5600 , 10.0.0.1:5600", (A,)),
        (f"{OWN}:5600,10.0.0.1:5600", (A,)),
        ("[fd00::1]:5608", (Peer("fd00::1", 5608),)),
        ("10.0.0.1,10.0.0.2:0,10.0.0.3:70000,:5600,tcp://x:1,a b:3,[:5600,10.0.0.2:5600", (B,)),
        (",".join(f"10.0.1.{n}:5600" for n in range(99)), tuple(Peer(f"10.0.1.{n}", 5600) for n in range(MOST_SEED_PEERS))),
    ],
)
def test_peers_are_read_and_rubbish_is_passed_over(text: str, peers: tuple[Peer, ...]):
    assert parse_peers(text, OWN) == peers
    assert parse_peers(",".join(map(str, peers)), OWN) == peers


@pytest.mark.parametrize(
    ("peers", "tried", "passed_s", "chosen"),
    [
        ((), [], 0.0, None),
        ((A,), [], 0.0, Try(A, 5.0)),
        ((A, B), [], 0.0, Try(A, 3.0)),
        ((A, B), [GOT], 0.5, None),
        ((A, B), [Seeded()], 0.5, None),  # it has nothing that is shared: nor will its neighbours that saw less
        ((A, B), [FAILED], 1.0, Try(B, 4.0)),
        ((A, B), [FAILED], 4.9, None),
        ((A,), [FAILED], 1.0, None),
        ((A, B, C), [FAILED, FAILED], 1.0, None),
    ],
)
def test_one_more_is_asked_when_one_fails(peers: tuple[Peer, ...], tried: list[Seeded], passed_s: float, chosen: Try | None):
    assert next_try(peers, tried, passed_s, 5.0) == chosen


@given(st.lists(st.sampled_from([A, B, C]), unique=True), st.lists(st.floats(0, 1), max_size=9), st.floats(0.1, 60))
def test_tries_never_take_longer_than_they_may(peers: list[Peer], shares: list[float], timeout_s: float):
    passed_s, tried = 0.0, list[Seeded]()
    for share in shares:
        one = next_try(peers, tried, passed_s, timeout_s)
        if one is None:
            break
        assert one.within_s > 0
        passed_s += share * one.within_s
        tried.append(FAILED)
    assert passed_s <= timeout_s + 1e-9
    assert len(tried) <= TRIES


class Engine:
    """Answers what the test says; an answer that is a number is a time that it takes."""

    def __init__(self, *answers: Seeded | float | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int, float, float]] = []

    async def seed(self, host: str, port: int, most_share: float, within_s: float) -> Seeded:
        self.asked.append((host, port, most_share, within_s))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return GOT
        return answer


def keeper(asked: Engine, peers: str = f"{A},{B}", timeout_s: float = 5.0, **changes) -> SeedKeeper:
    kv = KvSettings(seed=SeedSettings(share=0.1, timeout_s=timeout_s))
    return SeedKeeper(config(**{"kv": kv, **changes}), asked, {SEED_PEERS_ENV: peers}, OWN)


def outcome(made: SeedKeeper) -> str:
    asyncio.run(made.run())
    return made.report()["outcome"]


def test_a_seeded_worker_says_from_whom_and_how_much():
    engine = Engine(FAILED, GOT)
    made = keeper(engine)
    assert made.report()["outcome"] == "Waiting"
    assert outcome(made) == "Seeded"
    report = made.report()
    assert (report["blocks"], report["bytes"], report["from"], report["reason"]) == (4, 4096, [str(A), str(B)], "")
    assert [ask[:3] for ask in engine.asked] == [("10.0.0.1", 5600, 0.1), ("10.0.0.2", 5600, 0.1)]
    text = "\n".join(made.exposition())
    assert 'fleet_agent_seed_info{outcome="Seeded"} 1' in text
    assert "fleet_agent_seed_blocks 4\n" in text + "\n"
    assert "fleet_agent_seed_bytes 4096\n" in text + "\n"
    assert "fleet_agent_seed_refused_blocks 3\n" in text + "\n"


@pytest.mark.parametrize(
    ("engine", "peers", "reason"),
    [
        (Engine(), "", "no worker of its tier, role and revision was ready when its pod was made"),
        (Engine(Seeded()), str(A), f"{A} has no prefix that several prompts shared"),
        (Engine(FAILED), str(A), f"{A}: digest: other bytes"),
        (Engine(FAILED, Seeded(reason="busy", message="not now")), f"{A},{B}", f"{B}: busy: not now"),
        (Engine(ValueError("broken")), str(A), "ValueError: broken"),
    ],
)
def test_a_cold_worker_says_why(engine: Engine, peers: str, reason: str):
    made = keeper(engine, peers)
    assert outcome(made) == "Cold"
    assert (made.report()["blocks"], made.report()["reason"]) == (0, reason)
    assert 'fleet_agent_seed_info{outcome="Cold"} 1' in made.exposition()


def test_a_peers_words_are_no_lines_of_our_log(capsys: pytest.CaptureFixture[str]):
    made = keeper(Engine(Seeded(reason="busy\nSeedSeeded: 9 blocks", message="\x1b[2Jno\r\nKvFault: x")), peers=str(A))
    assert outcome(made) == "Cold"
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert made.report()["reason"].isprintable()


def test_an_engine_that_never_answers_delays_readiness_by_the_timeout_alone():
    made, begun = keeper(Engine(60.0), str(A), timeout_s=0.4), time.monotonic()
    assert outcome(made) == "Cold"
    assert 0.4 <= time.monotonic() - begun < 2.0
    assert made.report()["reason"] == "not done within 0.4 s"


def test_it_is_done_once():
    engine = Engine(GOT)
    made = keeper(engine)
    asyncio.run(made.run())
    asyncio.run(made.run())
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"kv": KvSettings()}, "Off"), ({"engine": "vllm"}, "NotSupported")],
    ids=["off", "vllm"],
)
def test_where_there_is_no_seeding_nobody_is_asked_and_it_is_said(changes: dict, said: str):
    engine = Engine()
    made = keeper(engine, **changes)
    assert outcome(made) == said
    assert made.report()["reason"]
    assert engine.asked == []
    assert made.exposition() == ["# TYPE fleet_agent_seed_info gauge", f'fleet_agent_seed_info{{outcome="{said}"}} 1']


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(200, json={"blocks": 2, "nbytes": 9, "seconds": 0.1}), ""),
        (httpx.Response(200, content=b"[]"), "engine"),
        (httpx.Response(403, json={"error": {"message": "no"}}), "engine"),
        (httpx.ConnectError("gone"), "engine"),
    ],
    ids=["told", "rubbish", "refused", "gone"],
)
def test_what_the_engine_answers_is_read(answer: httpx.Response | Exception, reason: str):
    def handle(request: httpx.Request) -> httpx.Response:
        assert (request.url.path, request.headers["x-fleet-agent"]) == ("/kv/seed", "token")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask() -> Seeded:
        client = EngineClient("http://engine", "token")
        client._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(handle))
        try:
            return await client.seed("10.0.0.1", 5600, 0.25, 1.0)
        finally:
            await client.close()

    found = asyncio.run(ask())
    assert (found.reason, found.blocks) == (reason, 0 if reason else 2)
    assert LEAST_S > 0
