"""Requests for an adapter: only workers that have it, one version on both legs, keys of its own, and what clients are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.follow.documents import Documents
from fleet_router.kvindex.pieces import adapter_seed, key_chain
from fleet_router.policy.adapters import version_of
from fleet_router.policy.chosen import Choice, Refusal
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.fake_worker import FakeWorker, answer
from tests.fleet_router.rig import CONFIG, LONG, Rig

ADAPTED = msgspec.structs.replace(CONFIG, adapters=("a", "b"))


def endpoint(name: str, role: str, port: int = 1, **adapters: str) -> Endpoint:
    return Endpoint(
        name=name, uid=name, address="127.0.0.1", http_port=port, agent_port=1, role=role, tier="t", revision="r", compat="c",
        adapters=adapters,
    )  # type: ignore[arg-type] # fmt: skip


def table(*workers: Endpoint) -> WorkerTable:
    made = WorkerTable()
    made.update(Endpoints(fleet="f", namespace="n", workers=workers))
    return made


def choose(made: WorkerTable, adapter: str, prompt: bytes = LONG.encode(), excluded: frozenset[str] = frozenset()) -> Any:
    return made.choose(prompt, CONFIG, 0.0, excluded, 0, adapter)[0]


@pytest.mark.parametrize(
    ("decodes", "expected"),
    [
        ([], ""),
        ([{}], ""),
        ([{"b": "1"}], ""),
        ([{"a": "1"}, {}], "1"),
        ([{"a": "1"}, {"a": "2"}, {"a": "2"}], "2"),
        ([{"a": "2"}, {"a": "1"}], "1"),
    ],
)
def test_the_version_that_most_have(decodes: list[dict[str, str]], expected: str):
    assert version_of("a", decodes) == expected


def test_both_legs_go_where_the_adapter_is():
    made = table(
        endpoint("p1", "prefill"), endpoint("p2", "prefill", a="1"), endpoint("d1", "decode"), endpoint("d2", "decode", a="1")
    )
    for turn in range(20):
        found = choose(made, "a", f"{turn}{LONG}".encode())
        assert (found.prefill, found.decode) == ("p2", "d2")
    assert isinstance(choose(made, "b"), Refusal)
    assert choose(made, "b").reason == "adapter b is on no decode worker now"
    assert isinstance(choose(made, ""), Choice)


def test_no_prefill_worker_has_it_so_decode_prefills():
    made = table(endpoint("p1", "prefill"), endpoint("d1", "decode", a="1"))
    assert choose(made, "a").prefill is None


def test_kv_never_moves_between_two_versions():
    made = table(
        endpoint("p1", "prefill", a="old"), endpoint("p2", "prefill", a="new"), endpoint("d1", "decode", a="old"),
        endpoint("d2", "decode", a="new"), endpoint("d3", "decode", a="new"),
    )  # fmt: skip
    for turn in range(20):
        found = choose(made, "a", f"{turn}{LONG}".encode())
        assert (found.prefill, found.decode in ("d2", "d3")) == ("p2", True)
    found = choose(made, "a", excluded=frozenset({"d2", "d3"}))
    assert (found.prefill, found.decode) == ("p1", "d1")


def test_prefix_keys_of_adapters_versions_and_tenants_have_nothing_in_common():
    prompt = LONG.encode()
    chains = [key_chain(prompt, adapter_seed(seed, version)) for seed in (0, 7) for version in ("", "a@1", "a@2", "b@1")]
    assert len({key for chain in chains for key in chain}) == sum(len(chain) for chain in chains)
    assert chains[0] == key_chain(prompt)


def test_a_prefix_under_one_adapter_attracts_no_request_of_another():
    made = table(endpoint("d1", "decode", a="1", b="1"), endpoint("d2", "decode", a="1", b="1"))
    _, keys = made.choose(LONG.encode(), CONFIG, 0.0, frozenset(), 0, "a")
    made.routing.index.add(keys, "d1")
    for adapter, known in (("a", True), ("b", False), ("", False)):
        _, asked = made.choose(LONG.encode(), CONFIG, 0.0, frozenset(), 0, adapter)
        assert bool(made.routing.index.depths(asked)) is known


# -- over sockets ---------------------------------------------------------------------------------------------------------
def serve(
    scenario: Callable[[Rig], Awaitable[None]], prefill: list[dict[str, str]], decode: list[dict[str, str]],
    config: RouterConfig = ADAPTED,
) -> None:  # fmt: skip
    async def main() -> None:
        workers = [[await FakeWorker().start() for _ in found] for found in (prefill, decode)]
        rig = Rig([], [], config)
        rows = [
            endpoint(f"{role}-{index}", role, worker.port, **adapters)
            for role, made, held in zip(("prefill", "decode"), workers, (prefill, decode), strict=True)
            for index, (worker, adapters) in enumerate(zip(made, held, strict=True))
        ]
        rig.prefill, rig.decode = workers
        rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=tuple(rows))))
        await rig.start()
        try:
            await asyncio.wait_for(scenario(rig), 30)
        finally:
            for worker in [*workers[0], *workers[1]]:
                await worker.stop()
            rig.server.close()

    asyncio.run(main())


def asked(model: str, prompt: str = LONG) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 4}


def test_clients_are_told_what_there_is():
    async def scenario(rig: Rig) -> None:
        status, body = await rig.post(asked("a"))
        assert status == 200
        assert [b["model"] for w in (rig.prefill[1], rig.decode[1]) for b in w.seen] == ["a", "a"]
        assert rig.prefill[0].seen == rig.decode[0].seen == []
        status, body = await rig.post(asked("nobody"))
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        status, body = await rig.post(asked("b"))
        error = json.loads(body)["error"]
        assert (status, error["code"], error["retryable"]) == (503, "adapter_not_loaded", True)
        assert error["message"] == "adapter b is on no decode worker now"
        listed = rig.router.plain(b"/v1/models")[2]
        assert [(card["id"], card.get("parent")) for card in json.loads(listed)["data"]] == [("m", None), ("a", "m")]
        assert (await rig.post(asked("m")))[0] == 200

    serve(scenario, [{}, {"a": "1"}], [{}, {"a": "1"}])


def lost(adapter: str) -> Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]:
    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body["model"] == adapter:
            answer(writer, 404, {"error": {"message": f"The model `{adapter}` does not exist.", "type": "NotFoundError"}})
        return body["model"] == adapter

    return behave


def test_a_worker_that_lost_it_is_passed_over_and_not_blamed():
    async def scenario(rig: Rig) -> None:
        rig.prefill[0].behave = lost("a")
        rig.decode[0].behave = lost("a")
        for number in range(8):
            status, _ = await rig.post(asked("a", f"{number}{LONG}"))
            assert status == 200
        assert all(worker.breaker.closed and worker.breaker.failures == 0 for worker in rig.context.table.workers.values())
        rig.decode[1].behave = lost("a")
        status, body = await rig.post(asked("a"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "adapter_not_loaded")
        assert all(worker.inflight == 0 for worker in rig.context.table.workers.values())

    serve(scenario, [{"a": "1"}, {"a": "1"}], [{"a": "1"}, {"a": "1"}])


def test_r11_a_404_for_the_model_itself_is_another_workers_answer():
    """The address belongs to somebody else by now: whoever answers there is not asked again."""

    async def scenario(rig: Rig) -> None:
        rig.decode[0].behave = lost("m")
        for _ in range(8):
            assert (await rig.post(asked("m", "short")))[0] == 200
        assert len(rig.decode[0].seen) <= 1
        rig.decode[1].behave = lost("m")
        status, body = await rig.post(asked("m", "short"))
        assert (status, b"does not serve m" in body) == (503, True)

    serve(scenario, [], [{}, {}])


@pytest.mark.parametrize("prompt", ["short", LONG], ids=["decode", "both-legs"])
def test_a_worker_of_the_name_before_is_asked_by_its_own(prompt: str):
    """Incident: servedName was edited, each old worker answered 404 to the new name and was put out: nobody was left to answer
    until the first new workers had loaded the model, or for ever when the rollout was paused or rolled back."""

    async def scenario(rig: Rig) -> None:
        workers = tuple(msgspec.structs.replace(worker.endpoint, model="old") for worker in rig.context.table.workers.values())
        rig.context.table.update(Endpoints(fleet="f", namespace="n", workers=workers))
        for worker in (*rig.prefill, *rig.decode):
            worker.behave = lost("m")
        for number in range(4):
            assert (await rig.post(asked("m", f"{number}{prompt}")))[0] == 200
        seen = [body for worker in (*rig.prefill, *rig.decode) for body in worker.seen]
        assert {body["model"] for body in seen} == {"old"}
        assert bool(rig.prefill[0].seen) is (prompt == LONG)

    serve(scenario, [{}], [{}])


def test_an_adapter_keeps_its_name_on_a_worker_of_the_name_before():
    async def scenario(rig: Rig) -> None:
        workers = tuple(msgspec.structs.replace(worker.endpoint, model="old") for worker in rig.context.table.workers.values())
        rig.context.table.update(Endpoints(fleet="f", namespace="n", workers=workers))
        assert (await rig.post(asked("a", "short")))[0] == 200
        assert [body["model"] for worker in rig.decode for body in worker.seen] == ["a"]

    serve(scenario, [], [{"a": "1"}])
