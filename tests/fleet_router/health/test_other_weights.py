"""A stream that breaks while workers of other weights serve, too: in the middle of a rollout, or of an adapter's replacement."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.fake_worker import stream as stream_of
from tests.fleet_router.rig import CONFIG, Rig, ask, run

ADAPTED = msgspec.structs.replace(CONFIG, adapters=("a",))


def told(rig: Rig, config: RouterConfig, changes: list[dict[str, Any]]) -> None:
    """The document names its decode workers so; `changes` in their order."""
    found = [worker.endpoint for worker in rig.context.table.workers.values()]
    workers = tuple(msgspec.structs.replace(one, **change) for one, change in zip(found, changes, strict=True))
    rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=workers)))


def breaks_once(rig: Rig, parts: list[str], then: Any = None) -> list[int]:
    """Whoever is asked first says so much, and dies; returns who was asked, in turn."""
    asked: list[int] = []

    def behave_as(number: int) -> Any:
        async def behave(_: Any, writer: asyncio.StreamWriter) -> bool:
            asked.append(number)
            if len(asked) > 1:
                return False
            await stream_of(writer, parts, end=False, gap_s=0.01)
            if then is not None:
                then(number)
            await asyncio.sleep(0.05)
            writer.close()
            return True

        return behave

    for number, worker in enumerate(rig.decode):
        worker.behave = behave_as(number)
    return asked


OTHERS = [
    pytest.param(CONFIG, {"compat": "old"}, {"compat": "new"}, id="another revision of the model"),
    pytest.param(ADAPTED, {"adapters": {"a": "1"}}, {"adapters": {"a": "2"}}, id="another version of the adapter"),
]


@pytest.mark.parametrize(("config", "mine", "other"), OTHERS)
@pytest.mark.parametrize("alike", [False, True])
def test_only_a_worker_of_the_same_weights_carries_a_stream_on(
    config: RouterConfig, mine: dict[str, Any], other: dict[str, Any], alike: bool
):
    """What others say again may well be the same; what follows is another model's, and nobody could tell."""

    async def go(rig: Rig) -> None:
        def then(number: int) -> None:
            told(rig, config, [mine if at == number or (alike and at == (number + 1) % 3) else other for at in range(3)])

        told(rig, config, [mine] * 3)
        asked = breaks_once(rig, ["a"], then)
        model = {"model": "a"} if config.adapters else {}
        _, got = await rig.post(ask(prompt="p", stream=True, temperature=0, **model))
        if alike:
            assert (b"[DONE]" in got, asked[1:]) == (True, [(asked[0] + 1) % 3])
        else:
            assert (b'"error"' in got, b"[DONE]" in got, len(asked)) == (True, False, 1)
        assert rig.context.metrics.resumed == {"done" if alike else "refused": 1}

    run(go, prefill=0, decode=3)


def test_an_adapter_that_is_replaced_under_a_stream_is_another_one_for_its_rest():
    """Its worker has the new version by then, too: what the stream was begun under counts."""

    async def go(rig: Rig) -> None:
        told(rig, ADAPTED, [{"adapters": {"a": "1"}}] * 2)
        asked = breaks_once(rig, ["a"], lambda _: told(rig, ADAPTED, [{"adapters": {"a": "2"}}] * 2))
        _, got = await rig.post(ask(prompt="p", model="a", stream=True, temperature=0))
        assert (b'"error"' in got, b"[DONE]" in got, len(asked)) == (True, False, 1)

    run(go, prefill=0, decode=2)


def test_a_stream_of_which_nothing_was_told_is_begun_anew_by_anybody():
    async def go(rig: Rig) -> None:
        told(rig, CONFIG, [{"compat": "old"}, {"compat": "new"}])
        asked = breaks_once(rig, [])
        _, got = await rig.post(ask(prompt="p", stream=True, temperature=0))
        assert (b"[DONE]" in got, len(asked)) == (True, 2)

    run(go, prefill=0, decode=2)
