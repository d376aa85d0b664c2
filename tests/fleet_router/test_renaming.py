"""The model is renamed (servedName) while requests under the old name wait or are tried again: no worker knows that name any more
but those of the revision before, and nothing is wrong with the others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig
from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.fake_worker import FakeWorker, answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, answer_of, ask, http, run, until

RENAMED = msgspec.structs.replace(CONFIG, served_name="new")


def knows(worker: FakeWorker, name: str) -> None:
    """Another name is 404, as engines say it."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body["model"] != name:
            answer(writer, 404, {"error": {"message": "The model does not exist.", "type": "NotFoundError"}})
        return body["model"] != name

    worker.behave = behave


def renamed(rig: Rig, config: RouterConfig = RENAMED, *old: FakeWorker) -> None:
    """The operator's documents after it: who is `old` serves the name before."""
    rig.apply(rig.prefill, rig.decode, config)
    ports = {worker.port for worker in old}
    rows = tuple(
        msgspec.structs.replace(worker.endpoint, model="m" if worker.endpoint.http_port in ports else "")
        for worker in rig.context.table.workers.values()
    )
    rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=rows)))


@pytest.mark.parametrize("prompt", ["short", LONG], ids=["decode", "both-legs"])
def test_what_was_held_under_the_old_name_is_answered(prompt: str):
    """Incident: each new worker answered 404 and was put out for it, one after the other; then the client had a 503."""

    async def go(rig: Rig) -> None:
        resting = Endpoints(fleet="f", namespace="n", at_zero=(AtZero(tier="t"),))
        rig.router.apply(Documents(CONFIG, resting))
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt=prompt)))
        await until(lambda: len(rig.context.holding) == 1)
        for worker in (*rig.prefill, *rig.decode):
            knows(worker, "new")
        renamed(rig)
        assert (await answer_of(reader))[0] == 200
        assert {body["model"] for worker in (*rig.prefill, *rig.decode) for body in worker.seen} == {"new"}
        assert rig.context.table.trouble.ejections == 0

    run(go)


def test_what_is_tried_again_has_the_name_of_whom_it_is_asked():
    """The first worker, of the old name, dies under it after the renaming."""

    async def go(rig: Rig) -> None:
        old, new = rig.decode
        asked = asyncio.Event()

        async def dies(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            asked.set()
            await go_on.wait()
            writer.transport.abort()
            return True

        go_on = asyncio.Event()
        old.behave = dies
        knows(new, "new")
        reader, writer, _ = await rig.connect()
        rig.apply([], [old])
        writer.write(http(ask(prompt="short")))
        await asked.wait()
        renamed(rig, RENAMED, old)
        go_on.set()
        assert (await answer_of(reader))[0] == 200
        assert [body["model"] for body in new.seen] == ["new"]
        status, _ = await rig.post(ask(prompt="short", model="m"))
        assert status == 404  # who comes now must know it

    run(go, prefill=0, decode=2)
