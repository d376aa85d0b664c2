"""Role flips on the in-memory store: workers that obey, refuse, lie, hang or die, and what the operator makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator import document_size
from fleet_operator.cluster.interface import CONFIG_MAP, FLEET, POD, ForbiddenError
from fleet_operator.flip.asking import Answer, Ask
from fleet_operator.flip.follow import FlipFollower
from fleet_operator.flip.proof import ATTEMPTS, Canary, Verdict, prove
from fleet_planner.types import TierTelemetry
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest
from tests.fleet_planner.test_reconcile import pod as observed_pod


@dataclass
class Worker:
    """Agent and engine behind one address."""

    role: str = "prefill"
    phase: str = "Serving"
    does: str = "obeys"
    transfers: int = 0
    asked: list[str] = field(default_factory=list)
    answers: bool = True
    uid: str = ""

    def agent(self, path: str, body: dict[str, Any] | None) -> Answer | None:
        if path == "/role" and body is not None:
            self.asked.append(body["role"])
            if self.does == "refuses":
                return reply(409, reason="Draining")
            if self.does == "keeps":
                return reply(409, reason="EngineKeepsRole")
            if self.does == "is-old":
                return reply(404)
            if self.does == "breaks":
                self.phase = "FlippingRole"
            elif self.does != "hangs":
                self.role = body["role"]
            return reply(202)
        problem = "no first token" if self.does == "breaks" and self.asked else ""
        return reply(200, role=self.role, phase=self.phase, flip_problem=problem, uid=self.uid)

    def engine(self, path: str, body: dict[str, Any] | None) -> Answer | None:
        if not self.answers:
            return None
        if body is None:
            return Answer(200, f"vllm:nixl_xfer_time_seconds_count {self.transfers}\n".encode())
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            given = (
                None if self.does == "gives-nothing" else {"do_remote_prefill": True, "remote_block_ids": [1], "by": self.does}
            )
            return reply(200, kv_transfer_params=given)
        if params and self.does == "decodes-nothing":
            return reply(400)
        return reply(200, choices=[{"token_ids": self.tokens(body, params)}])

    def tokens(self, body: dict[str, Any], params: dict[str, Any]) -> list[int]:
        right = [sum(body["prompt"]) % 97 + n for n in range(body["max_tokens"])]
        if not params:
            return right
        liar = "lies" in (self.does, params.get("by"))
        self.transfers += self.does != "computes-itself"
        return [0] * len(right) if liar else right


def reply(status: int, **body: Any) -> Answer:
    return Answer(status, json.dumps(body).encode())


class Workers:
    """Every address has a worker; each begins in the role of its pod's label."""

    def __init__(self, does: str = "obeys") -> None:
        self.does = does
        self.known: dict[str, Worker] = {}

    def at(self, address: str) -> Worker:
        return self.known.setdefault(address, Worker(role="decode"))

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        async def ask(url: str, body: dict[str, Any] | None = None, within_s: float = 0.0) -> Answer | None:
            address, _, rest = url.removeprefix("http://").partition(":")
            port, slash, path = rest.partition("/")
            worker = self.at(address)
            if port == "9000" and path == "role":
                worker.does = self.does
            return worker.agent(slash + path, body) if port == "9000" else worker.engine(slash + path, body)

        yield ask


RATIO = {"prefill": 1, "decode": 3, "min": "1:3", "max": "1:1"}


def sized(prefill: int, decode: int) -> dict[str, Any]:
    sizes = {"prefill": prefill, "decode": decode}
    tier = {"name": "t", "accelerator": {"type": "cpu"}, "ratio": RATIO}
    return {**tier, **{role: {"minReplicas": size, "maxReplicas": size} for role, size in sizes.items()}}


Scenario = Callable[[World, Workers], Awaitable[None]]


def play(scenario: Scenario, does: str = "obeys", **spec: Any) -> None:
    """In a world of one prefill and three decode workers that are ready."""

    async def whole() -> None:
        world, workers = World(), Workers(does)
        world.flips = FlipFollower(workers.connect)
        world.operator = world.new_operator()
        await resize(world, 1, 3, **spec)
        await world.settle()
        world.now += 600  # what is read of them is old: unknown load, a short drain
        await scenario(world, workers)

    asyncio.run(whole())


async def resize(world: World, prefill: int, decode: int, **spec: Any) -> None:
    rollout = {"drainTimeout": "5s"}
    await world.user.apply(manifest(tiers=[sized(prefill, decode)], scaling={"mode": "manual"}, rollout=rollout, **spec))


async def pods(world: World) -> dict[str, dict[str, Any]]:
    found = await world.store.list(POD, NAMESPACE)
    return {pod["metadata"]["uid"]: pod for pod in found if "inferencefleet.io/tier" in pod["metadata"]["labels"]}


async def states(world: World) -> dict[str, str]:
    document = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
    return {worker["uid"]: worker["state"] for worker in json.loads(document["data"][ENDPOINTS_KEY])["workers"]}


async def flipping(world: World) -> dict[str, Any] | None:
    found = [pod for pod in (await pods(world)).values() if "inferencefleet.io/flip" in pod["metadata"]["annotations"]]
    assert len(found) <= 1
    return found[0] if found else None


async def lead(world: World, seconds: int = 60) -> None:
    """Cold starts took that long."""
    for pod in (await pods(world)).values():
        status = pod["status"]
        ready = [{**c, "lastTransitionTime": rfc(world, pod, seconds)} for c in status["conditions"]]
        await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {**status, "conditions": ready})
    await world.settle()


async def finish(world: World) -> None:
    """Workers are heard, and then nothing is written."""
    for _ in range(6):
        await world.step()
    await world.settle()


def rfc(world: World, pod: dict[str, Any], seconds: int) -> str:
    from fleet_api.conditions import rfc3339
    from fleet_operator.observe import timestamp

    return rfc3339((timestamp(pod["metadata"]["creationTimestamp"]) or 0) + seconds)


def test_a_pair_becomes_a_flip_of_the_same_pod_and_then_nothing_is_written():
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        before = await pods(world)
        await resize(world, 2, 2)
        await world.step()
        told = await flipping(world)
        assert told is not None
        assert told["metadata"]["annotations"]["inferencefleet.io/flip"] == "prefill"
        uid, address = told["metadata"]["uid"], told["status"]["podIP"]
        assert (await states(world))[uid] == "draining"
        assert workers.at(address).asked == [], "routers first: its document and its mark were written in this pass"
        await finish(world)
        after = await pods(world)
        assert after.keys() == before.keys()
        assert await world.workers() == {"prefill": 2, "decode": 2}
        flipped = after[uid]["metadata"]
        pool = await world.pool("prefill")
        assert flipped["labels"]["inferencefleet.io/role"] == "prefill"
        assert flipped["labels"]["inferencefleet.io/pool"] == pool["metadata"]["name"]
        assert [owner["uid"] for owner in flipped["ownerReferences"]] == [pool["metadata"]["uid"]]
        assert "inferencefleet.io/flip" not in flipped["annotations"]
        assert "inferencefleet.io/flipped-at" in flipped["annotations"]
        assert "-decode-" in flipped["name"], "it keeps its name"
        assert (await states(world))[uid] == "serving"
        assert workers.at(address).asked == ["prefill"]
        note = next(event for event in await world.events() if " Flipped " in event)
        assert "decode → prefill in" in note
        assert "8 tokens equal a partner's after a KV transfer" in note
        assert await world.touch() == []
        world.operator = world.new_operator()
        assert await world.touch() == []

    play(scenario)


@pytest.mark.parametrize(
    ("engine_s", "flips"),
    [pytest.param(30.0, True, id="sooner"), pytest.param(58.0, False, id="later"), pytest.param(None, False, id="not-known")],
)
def test_a_vllm_worker_flips_when_its_engine_is_known_to_start_sooner_than_a_cold_one_is_there(
    engine_s: float | None, flips: bool
):
    engine = {"type": "vllm"}

    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        before = await pods(world)
        world.load = {"t": TierTelemetry(engine_start_s=engine_s)}
        world.now += 60  # it is read
        await world.step()
        await resize(world, 2, 2, engine=engine)
        await world.step()
        assert (await flipping(world) is not None) == flips
        await finish(world)
        assert ((await pods(world)).keys() == before.keys()) == flips
        assert await world.workers() == {"prefill": 2, "decode": 2}

    play(scenario, engine=engine)


def test_a_worker_flips_again_and_again():
    """What it said at its first flip was kept: at the second it was never told, and deleted when its time was up."""

    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        before = await pods(world)
        for prefill, decode in ((2, 2), (1, 3)) * 3:
            await resize(world, prefill, decode)
            await finish(world)
            world.now += 700
            await world.touch()
            await finish(world)
            assert await world.workers() == {"prefill": prefill, "decode": decode}
            assert (await pods(world)).keys() == before.keys()

    play(scenario)


def test_a_worker_that_declined_once_is_asked_again():
    """Ten minutes later its first answer was told as its second, for as long as the operator ran."""

    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        asked = []
        for _ in range(2):
            found = [pod["metadata"] for pod in (await pods(world)).values()]
            lost = next(meta["name"] for meta in found if meta["labels"]["inferencefleet.io/role"] == "prefill")
            await world.user.delete(POD, NAMESPACE, lost, grace_s=0)
            await finish(world)
            asked.append(sum(len(worker.asked) for worker in workers.known.values()))
            world.now += 700
            await world.touch()
            await finish(world)
        assert asked == [1, 2]

    play(scenario, "refuses")


def test_an_operator_that_restarts_half_way_goes_on():
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        before = await pods(world)
        await resize(world, 2, 2)
        await world.step()
        assert await flipping(world) is not None
        world.operator = world.new_operator()
        await finish(world)
        assert (await pods(world)).keys() == before.keys()
        assert await world.workers() == {"prefill": 2, "decode": 2}

    play(scenario)


def test_a_lost_prefill_worker_is_repaired_by_a_flip_and_the_name_of_the_flipped_one_stays_taken():
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        lost = (await world.pool("prefill"))["metadata"]["name"] + "-0"
        await world.user.delete(POD, NAMESPACE, lost, grace_s=0)
        await finish(world)
        assert await world.workers() == {"prefill": 1, "decode": 3}
        roles = {p["metadata"]["name"]: p["metadata"]["labels"]["inferencefleet.io/role"] for p in (await pods(world)).values()}
        decodes = (await world.pool("decode"))["metadata"]["name"]
        assert sorted(roles) == [f"{decodes}-{n}" for n in range(4)]
        assert list(roles.values()).count("prefill") == 1

    play(scenario)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        pytest.param("lies", "other tokens than its partner's", id="wrong-kv"),
        pytest.param("gives-nothing", "it gives no KV reference", id="no-references"),
        pytest.param("breaks", "no first token", id="an-engine-that-broke"),
    ],
)
def test_a_worker_that_cannot_prove_its_role_is_deleted_and_made_cold(does: str, told: str):
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        before = await pods(world)
        await resize(world, 2, 2)
        await world.step()
        victim = await flipping(world)
        assert victim is not None
        await finish(world)
        assert await world.workers() == {"prefill": 2, "decode": 2}
        assert before.keys() - (await pods(world)).keys() == {victim["metadata"]["uid"]}
        events = await world.events()
        assert any(event.startswith("Warning FlipFailed") and told in event for event in events), events
        assert not any(" Flipped " in event for event in events)

    play(scenario, does)


@pytest.mark.parametrize(("does", "answer"), [("refuses", "409 Draining"), ("keeps", "409 EngineKeepsRole"), ("is-old", "404")])
def test_a_worker_that_declines_is_left_alone_and_the_cold_way_is_taken(does: str, answer: str):
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        lost = (await world.pool("prefill"))["metadata"]["name"] + "-0"
        before = await pods(world)
        await world.user.delete(POD, NAMESPACE, lost, grace_s=0)
        await finish(world)
        assert await world.workers() == {"prefill": 1, "decode": 3}
        assert await flipping(world) is None
        gone = before.keys() - (await pods(world)).keys()
        assert {before[uid]["metadata"]["name"] for uid in gone} >= {lost}
        assert any("Warning FlipFailed" in event and answer in event for event in await world.events())
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]["flip"]
        assert answer in status["message"]
        world.now += 601
        await world.touch()
        assert "flip" not in (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]

    play(scenario, does)


def test_a_worker_that_hangs_is_asked_again_until_its_time_is_up():
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        await resize(world, 2, 2)
        await world.step()
        victim = await flipping(world)
        assert victim is not None
        for _ in range(5):
            await world.step()
        assert len(workers.at(victim["status"]["podIP"]).asked) >= 3
        assert await flipping(world) is not None
        world.now += 60
        await world.touch()
        await finish(world)
        assert victim["metadata"]["uid"] not in await pods(world)
        assert await world.workers() == {"prefill": 2, "decode": 2}
        assert any("Warning FlipFailed" in event and "not done within" in event for event in await world.events())

    play(scenario, "hangs")


def test_nobody_is_told_before_the_routers_are():
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        await resize(world, 2, 2)
        world.api.refuse = lambda verb, kind, name: ForbiddenError("not now") if kind == CONFIG_MAP else None
        await world.step()
        assert await flipping(world) is None
        world.api.refuse = lambda verb, kind, name: None
        world.now += 60
        await world.touch()
        assert await flipping(world) is not None

    play(scenario)


def test_nobody_is_told_while_the_routers_document_is_too_large(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        await resize(world, 2, 2)
        with monkeypatch.context() as small:
            small.setattr(document_size, "MOST_BYTES", 10)
            await world.step()
            assert await flipping(world) is None
        world.now += 60
        await world.touch()
        assert await flipping(world) is not None

    play(scenario)


@pytest.mark.parametrize(("serving", "asked"), [(True, []), (False, ["prefill"])])
def test_a_worker_is_told_only_when_the_routers_document_lets_it_serve_no_more(serving: bool, asked: list[str]):
    workers = Workers()
    one = observed_pod("d", "decode", 0, flipping="prefill", serving=serving, ip="w")
    asyncio.run(FlipFollower(workers.connect).follow(parse_fleet(manifest()), [one], {}, {}, {one.uid}))
    assert workers.at("w").asked == asked


def judged(role: str, does: str = "obeys", partner: Worker | None = None) -> Verdict:
    """A flipped worker at address w, its partner at p."""
    workers = Workers()
    workers.known = {"w": Worker(role=role, does=does)} | ({"p": partner} if partner is not None else {})

    async def no_sleep(_: float) -> None: ...

    async def whole() -> Verdict:
        async with workers.connect() as ask:
            where = "http://p:8000" if partner is not None else None
            return await prove(ask, "http://w:8000", role, where, Canary("m", "seed"), no_sleep)  # type: ignore[arg-type]

    return asyncio.run(whole())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("does", "partner", "proof", "problem"),
    [
        pytest.param("obeys", Worker(), "8 tokens equal", "", id="equal-tokens"),
        pytest.param("lies", Worker(), "", "other tokens", id="other-tokens"),
        pytest.param("obeys", Worker(answers=False), "", "", id="a-silent-partner-convicts-nobody"),
        pytest.param("obeys", None, "KV references alone", "", id="no-partner"),
        pytest.param("gives-nothing", None, "", "no KV reference", id="no-partner-and-no-reference"),
    ],
)
def test_the_proof(role: str, does: str, partner: Worker | None, proof: str, problem: str):
    found = judged(role, does, partner)
    assert (bool(found.proof), bool(found.problem)) == (bool(proof), bool(problem))
    assert proof in found.proof
    assert problem in found.problem


def test_a_decode_worker_that_computes_by_itself_instead_of_reading_is_caught():
    assert "no KV transfer was counted" in judged("decode", "computes-itself", Worker()).problem
    assert "it cannot decode: HTTP 400" in judged("decode", "decodes-nothing", Worker()).problem


def test_every_attempt_is_another_prompt_and_the_same_for_the_same_worker():
    prompts = [tuple(Canary("m", "seed").body(attempt)["prompt"]) for attempt in range(ATTEMPTS)]
    assert len(set(prompts)) == ATTEMPTS
    assert prompts[0] == tuple(Canary("m", "seed").body(0)["prompt"]) != tuple(Canary("m", "other").body(0)["prompt"])
    assert len(prompts[0]) < 16, "shorter than a block"


def test_a_worker_of_the_name_before_is_asked_by_its_own():
    """servedName edited, the rollout rolled back: 404 to each attempt, and obedient workers were deleted."""
    asked: list[str] = []

    @asynccontextmanager
    async def connect() -> AsyncIterator[Ask]:
        async def ask(url: str, body: dict[str, Any] | None = None, within_s: float = 0.0) -> Answer | None:
            asked.append((body or {}).get("model", ""))
            return reply(200, role="prefill", phase="Serving")

        yield ask

    one = observed_pod("d", "decode", 0, flipping="prefill", ip="w", revision="r")
    marks = {"inferencefleet.io/tier": "t", "inferencefleet.io/revision": "r"}
    data = {
        "pods": {"prefill": {}, "decode": {}},
        "compat": "c",
        "gpus": [0, 0],
        "nodes": [1, 1],
        "inputs": {"servedName": "old"},
    }
    stored = {("ControllerRevision", "f-t-r"): {"metadata": {"name": "f-t-r", "labels": marks}, "data": data}}
    asyncio.run(FlipFollower(connect).follow(parse_fleet(manifest()), [one], stored, {}, {one.uid}))
    assert asked == ["", "old"]
