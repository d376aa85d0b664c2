"""The in-memory store keeps the contract, and its own bounds."""

import asyncio

import pytest

from fleet_operator.cluster.interface import CONFIG_MAP, EVENT, POD, ConflictError
from fleet_operator.cluster.memory import MemoryCluster, MemoryLimits
from tests.fleet_operator.cluster import contract, contract_status


def store(**options) -> contract.Store:
    cluster = MemoryCluster(**options)
    return contract.Store(cluster, cluster.writer("somebody-else"), "default", 0)


@pytest.mark.parametrize("promise", [*contract.PROMISES, *contract_status.PROMISES], ids=lambda check: check.__name__)
def test_contract(promise):
    asyncio.run(promise(store()))


def test_a_slow_watch_lists_again_and_misses_no_outcome():
    async def scenario() -> None:
        one = store(limits=MemoryLimits(watch_queue=3))
        await one.cluster.apply(contract.config_map(one, "leaves", {}))
        await one.cluster.apply(contract.config_map(one, "stays", {}))
        async with contract.watching(one) as following:
            assert [contract.told(await following())[0] for _ in range(3)] == ["ADDED", "ADDED", "SYNCED"]
            await one.cluster.delete(CONFIG_MAP, "default", "leaves")
            for number in range(20):
                await one.cluster.apply(contract.config_map(one, "stays", {"n": str(number)}))
            assert contract.told(await following()) == ("DELETED", "leaves")
            last = await following()
            assert contract.told(last) == ("MODIFIED", "stays")
            assert last.object["data"] == {"n": "19"}

    asyncio.run(scenario())


def test_a_pod_made_again_between_two_looks_is_a_deletion_and_a_new_pod():
    async def scenario() -> None:
        one = store(limits=MemoryLimits(watch_queue=1))
        await one.cluster.apply(contract.config_map(one, "again", {}))
        async with contract.watching(one) as following:
            assert [contract.told(await following())[0] for _ in range(2)] == ["ADDED", "SYNCED"]
            await one.cluster.delete(CONFIG_MAP, "default", "again")
            await one.cluster.apply(contract.config_map(one, "again", {}))
            assert [contract.told(await following())[0] for _ in range(2)] == ["DELETED", "ADDED"]

    asyncio.run(scenario())


def test_events_are_bounded_and_the_oldest_leave():
    async def scenario() -> None:
        one = store(limits=MemoryLimits(events=2))
        for number in range(4):
            where = {"name": f"event-{number}", "namespace": "default"}
            await one.cluster.apply({"apiVersion": EVENT.api_version, "kind": "Event", "metadata": where, "reason": "Tested"})
        kept = await one.cluster.list(EVENT)
        assert [event["metadata"]["name"] for event in kept] == ["event-2", "event-3"]

    asyncio.run(scenario())


def test_binding_a_pod_happens_once():
    async def scenario() -> None:
        one = store()
        await one.cluster.apply(contract.pod(one, "placed"))
        bound = await one.cluster.bind("default", "placed", "node-a")
        assert bound["spec"]["nodeName"] == "node-a"
        with pytest.raises(ConflictError, match="already assigned"):
            await one.cluster.bind("default", "placed", "node-b")
        kept = await one.cluster.apply(contract.pod(one, "placed"))
        assert kept["spec"]["nodeName"] == "node-a"

    asyncio.run(scenario())


def test_a_pods_grace_can_be_shortened_but_not_stretched():
    async def scenario() -> None:
        one = store(now=lambda: 1_000_000.0)
        await one.cluster.apply(contract.pod(one, "leaving", nodeName="n", terminationGracePeriodSeconds=60))
        for asked, left in [(None, 60), (90, 60), (10, 10)]:
            await one.cluster.delete(POD, "default", "leaving", grace_s=asked)
            metadata = (await one.cluster.get(POD, "default", "leaving"))["metadata"]
            assert metadata["deletionGracePeriodSeconds"] == left
        assert metadata["deletionTimestamp"] == "1970-01-12T13:46:50Z"

    asyncio.run(scenario())


def test_close_ends_watches():
    async def scenario() -> None:
        one = store()
        events = one.cluster.watch(CONFIG_MAP)
        assert (await anext(events)).type == "SYNCED"
        await one.cluster.close()
        assert [event async for event in events] == []

    asyncio.run(scenario())
