"""Of which engine a proof is, and for how long it counts."""

from __future__ import annotations

import pytest

from fleet_operator.cluster.interface import POD, ForbiddenError
from tests.fleet_operator.test_flips import Workers, finish, flipping, lead, play, pods, resize
from tests.fleet_operator.world import World


@pytest.mark.parametrize("phase", ["Serving", "Warming"])
def test_a_proof_is_of_the_engine_that_gave_it(phase: str):
    """Its container began again as its label said, while the API server took no new label: the worker was written down as one of
    the role that it no longer had, for good. An engine of vLLM that is of the wrong role may read wrong KV."""

    async def scenario(world: World, workers: Workers) -> None:
        await lead(world)
        await resize(world, 2, 2)
        await world.step()
        told = await flipping(world)
        assert told is not None
        one = workers.at(told["status"]["podIP"])
        world.api.refuse = lambda verb, kind, name: ForbiddenError("not now") if kind == POD else None
        await world.step()
        await world.step()
        assert one.role == "prefill"
        one.role, one.phase = "decode", phase
        await world.step()
        world.api.refuse = lambda verb, kind, name: None
        world.now += 10
        await world.step()
        marks = (await pods(world))[told["metadata"]["uid"]]["metadata"]["labels"]
        assert (marks["inferencefleet.io/role"], one.role) != ("prefill", "decode")
        one.phase = "Serving"
        await finish(world)
        marks = (await pods(world))[told["metadata"]["uid"]]["metadata"]["labels"]
        assert (marks["inferencefleet.io/role"], one.role) == ("prefill", "prefill")

    play(scenario)
