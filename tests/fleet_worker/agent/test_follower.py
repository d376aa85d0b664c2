"""The agent of a pod that follows: what ends it, and with which word."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet_worker.agent.command import Place
from fleet_worker.agent.errors import EngineDiedError
from fleet_worker.agent.follower import Follower
from fleet_worker.agent.identity import Identity
from tests.fleet_worker.agent.test_command import config


class Alone(Follower):
    """One of a group that is whole; its engine is started elsewhere, and ends when the test says so."""

    def __init__(self) -> None:
        super().__init__(config(engine="vllm", nodes=2), Identity("p", "u", "127.0.0.1", 1, "leader", "uid"))
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running.process = SimpleNamespace(exited=self.exited, last_words=lambda: "NCCL: peer is gone")  # type: ignore[assignment]

        async def whole(_: object) -> str:
            return "127.0.0.1"

        self._membership.whole = whole  # type: ignore[method-assign,assignment]
        self._membership.leave = lambda: None  # type: ignore[method-assign]

    def _place(self, folder: Path, master: str) -> Place:
        return Place(str(folder), "127.0.0.1", member=1, master=master)

    async def _start_engine(self, place: Place) -> None:
        """It runs."""


async def some_steps() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("released", [True, False])
def test_ranks_that_end_with_a_leader_that_has_drained_are_no_failure(released: bool):
    """The leader's engine ended first, and its ranks here with it: a worker that was scaled down left pods in Error."""

    async def scenario() -> None:
        follower = Alone()
        following = asyncio.create_task(follower._follow(Path("/m")))
        await some_steps()
        assert follower.ready()
        draining = asyncio.create_task(follower.drain())
        await some_steps()
        if released:
            follower._membership.released.set()
            assert await draining == {"drained": True}
        follower.exited.set_result(1)
        await some_steps()
        assert following.done() is not released
        follower._stop.set()
        if released:
            assert await following is None
        else:
            with pytest.raises(EngineDiedError, match=r"exit code 1.*NCCL: peer is gone"):
                await following
        draining.cancel()
        await follower._client.close()
        follower._scratch.cleanup()

    asyncio.run(scenario())
