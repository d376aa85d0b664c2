"""Pods of one worker that fetched a branch, which moved between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fleet_worker.agent import agent
from fleet_worker.agent.errors import GroupLostError
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.prepare import version_of
from tests.fleet_worker.agent.test_command import config
from tests.fleet_worker.agent.test_follower import Alone, some_steps
from tests.fleet_worker.agent.test_group import World, play, quiet


@pytest.mark.parametrize(
    ("leads", "follows"), [("a" * 40, "b" * 40), ("a" * 40, "a" * 40), ("a" * 40, ""), ("", "b" * 40), ("", "")]
)
def test_pods_with_two_commits_of_a_model_are_no_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leads: str, follows: str
):
    """vLLM looks at nothing: half of each layer, or of the layers, came from another version, and answers were 200. Both start
    again, and fetch what the branch is by then. A folder has no version, and the torch engine's followers no model."""

    async def scenario(world: World) -> None:
        world.leader._version = leads
        member = world.member(1)
        member.version = follows
        both = await asyncio.gather(world.leader.whole(quiet), member.whole(quiet), return_exceptions=True)
        if leads == follows or "" in (leads, follows):
            assert both == ["127.0.0.1", "127.0.0.1"]
        else:
            assert [type(one) for one in both] == [GroupLostError, GroupLostError]
            assert all("commit" in str(one) for one in both), both
            assert all(commit in str(both[0]) for commit in (leads, follows)), both
        await member.close()

    play(2, scenario, monkeypatch, tmp_path)


def test_a_stranger_with_another_commit_ends_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def scenario(world: World) -> None:
        world.leader._version = "a" * 40
        stranger, member = world.member(1, "uid-of-another-life"), world.member(1)
        stranger.version, member.version = "b" * 40, "a" * 40
        trying = asyncio.create_task(stranger.whole(quiet))
        leading = asyncio.create_task(world.leader.whole(quiet))
        await asyncio.sleep(0.5)
        assert not leading.done()
        assert await asyncio.gather(leading, member.whole(quiet)) == ["127.0.0.1", "127.0.0.1"]
        trying.cancel()
        await member.close()

    play(2, scenario, monkeypatch, tmp_path)


def test_a_commit_is_what_a_hubs_model_is_known_by():
    assert version_of("hf://acme/tiny@main", Path("/models/hf/models--acme--tiny/snapshots") / ("c" * 40)) == "c" * 40
    assert version_of("/models/claim/tiny", Path("/models/claim/tiny")) == ""
    assert version_of("hf://acme/tiny@main", Path()) == ""


FETCHED = Path("/models/hf/models--acme--tiny/snapshots") / ("c" * 40)


def test_a_follower_says_which_commit_it_fetched():
    async def scenario() -> None:
        follower = Alone()
        follower._config = msgspec.structs.replace(follower._config, model="hf://acme/tiny@main")
        following = asyncio.create_task(follower._follow(FETCHED))
        await some_steps()
        assert follower._membership.version == FETCHED.name
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await follower._client.close()
        follower._scratch.cleanup()

    asyncio.run(scenario())


def test_a_leader_knows_which_commit_it_fetched(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []

    async def at_once(*_: object) -> str:
        return "127.0.0.1"

    def leader(*given: object) -> SimpleNamespace:
        made.append(given[-1])
        return SimpleNamespace(open=at_once, whole=at_once)

    async def scenario() -> None:
        leads = agent.Agent(config(engine="vllm", nodes=2, model="hf://acme/tiny@main"), Identity("p", "u", "127.0.0.1"))
        leads._folder = FETCHED
        assert await leads._gathered() == "127.0.0.1"
        await leads._client.close()
        leads._scratch.cleanup()

    monkeypatch.setattr(agent, "Leader", leader)
    asyncio.run(scenario())
    assert made == [FETCHED.name]
