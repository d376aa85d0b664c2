"""Several operators, one store, a clock that the test moves: never two that may write, and none that writes after it froze."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_operator.cluster.guarded import GuardedCluster, Write
from fleet_operator.cluster.interface import CONFIG_MAP, ClusterError, ForbiddenError, UnavailableError
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.leader import elector
from fleet_operator.leader.elector import Candidate, Elector, LeadershipLostError
from fleet_operator.leader.fence import Fence, NotLeaderError
from fleet_operator.leader.lease import Terms

TERMS = Terms(lease_s=15, renew_s=10.0, retry_s=2.0)


class Wire:
    """The store behind a network that loses requests or answers when told to."""

    def __init__(self, store: MemoryCluster) -> None:
        self._store = store
        self.loses = ""
        self.answers_lost = 0
        """Of the next so many writes."""
        self.applies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, *where: Any) -> Any:
        if self.loses:
            raise UnavailableError("lost")
        return await self._store.get(*where)

    async def apply(self, obj: dict[str, Any], *, created: bool = False) -> Any:
        if self.loses == "request":
            raise UnavailableError("lost")
        self.applies += 1
        made = await self._store.apply(obj, created=created)
        self.answers_lost, lost = max(0, self.answers_lost - 1), self.answers_lost > 0
        if self.loses == "answer" or lost:
            raise UnavailableError("lost")
        return made


class Process:
    """One operator process: its clock runs at its own rate from its own zero."""

    def __init__(self, world: World, name: str, rate: float = 1.0, zero: float = 0.0) -> None:
        self.name = name
        self.wire = Wire(world.store)
        self.fence = Fence(lambda: zero + rate * world.now)
        births = world.store.writer("births")
        self.elector = Elector(self.wire, births, Candidate("ns", "lease", name, TERMS), self.fence, sleep=world.sleep)  # type: ignore[arg-type]
        self.cluster = GuardedCluster(self.wire, self.fence)  # type: ignore[arg-type]

    async def try_once(self) -> None:
        """One attempt of the loop; like `keep`, it ends the process that could not renew in time."""
        if self.elector.leading and self.fence.open_s <= 0:
            self.elector.leading = False
            self.fence.close()
        with contextlib.suppress(ClusterError):
            await self.elector.attempt()

    async def writes(self) -> bool:
        wish = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}, "data": {"by": self.name}}
        try:
            await self.cluster.apply(wish)
        except NotLeaderError:
            return False
        return True


class World:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.store = MemoryCluster(now=lambda: self.now)
        self.on_sleep: Callable[[], Awaitable[None]] | None = None

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.on_sleep is not None:
            await self.on_sleep()
        await asyncio.sleep(0)


def played(scenario: Callable[[World], Awaitable[None]]) -> None:
    asyncio.run(scenario(World()))


def test_the_first_wins_and_the_second_waits_the_whole_lease():
    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        await b.try_once()
        assert (a.elector.leading, b.elector.leading) == (True, False)
        world.now += 14.9
        await b.try_once()
        assert not b.elector.leading
        assert not await a.writes()  # ten seconds without a renewal: it stopped before b could begin
        world.now += 0.2
        await b.try_once()
        assert b.elector.leading
        assert await b.writes()
        await a.try_once()
        assert not a.elector.leading
        lease = await world.store.get(LEASE, "ns", "lease")
        assert lease["spec"]["holderIdentity"] == "b"
        assert lease["spec"]["leaseTransitions"] == 2

    played(scenario)


@pytest.mark.parametrize("read_s", [6.0, 14.0, 29.0])
def test_a_slow_read_does_not_shorten_the_lease_of_another(read_s: float):
    """The wait began before the question: who read for long took a lease that had just been renewed, and two could write."""

    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        store_get = world.store.get

        async def slow(*where: Any) -> Any:
            for _ in range(round(read_s)):
                world.now += 1.0
                await a.try_once()
            return await store_get(*where)

        b.wire.get = slow  # type: ignore[method-assign]
        await b.try_once()
        b.wire.get = store_get  # type: ignore[method-assign]
        while await a.writes():  # it does not renew any more
            world.now += 0.5
            await b.try_once()
            assert not (b.elector.leading and a.fence.open_s > 0)
        world.now += 6.0
        await b.try_once()
        assert b.elector.leading

    played(scenario)


@pytest.mark.parametrize("answer_s", [4.0, 9.0])
def test_an_answer_that_takes_long_makes_the_lease_no_longer(answer_s: float):
    """Others count from when the renewal was written: who counted from its answer would write when the lease is another's."""

    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        apply = a.wire.apply

        async def late(obj: dict[str, Any], *, created: bool = False) -> Any:
            made = await apply(obj, created=created)
            await b.try_once()
            world.now += answer_s
            return made

        a.wire.apply = late  # type: ignore[method-assign]
        await a.try_once()
        assert a.fence.open_s == pytest.approx(TERMS.renew_s - answer_s)
        world.now += TERMS.lease_s + 0.1 - answer_s
        await b.try_once()
        assert b.elector.leading
        assert not await a.writes()

    played(scenario)


def test_two_that_begin_at_once_are_one():
    async def scenario(world: World) -> None:
        processes = [Process(world, name) for name in "abcd"]
        await asyncio.gather(*(process.try_once() for process in processes))
        assert sum(process.elector.leading for process in processes) == 1

    played(scenario)


def test_a_process_that_was_frozen_writes_nothing():
    """SIGSTOP for 60 s, SIGCONT: the first thing it does is a write."""

    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        assert await a.writes()
        await b.try_once()
        world.now += 60
        await b.try_once()
        assert await b.writes()
        sent = a.wire.applies
        assert not await a.writes()
        assert a.wire.applies == sent
        data = (await world.store.get(CONFIG_MAP, "ns", "c"))["data"]
        assert data == {"by": "b"}

    played(scenario)


def test_a_write_under_way_gets_no_more_time_than_the_lease_has():
    async def scenario(world: World) -> None:
        fence = Fence(lambda: world.now)
        fence.extend(world.now + 5, world.now + 0.01)
        with pytest.raises(UnavailableError, match="end of the lease"):
            async with asyncio.timeout(5):
                await fence.guard(Write("apply", CONFIG_MAP, "ns", "c"), lambda: asyncio.sleep(3_600))

    played(scenario)


def test_keep_ends_when_somebody_else_holds_it():
    async def scenario(world: World) -> None:
        a = Process(world, "a")
        await a.try_once()
        thief = world.store.writer("thief")
        lease = await world.store.get(LEASE, "ns", "lease")
        lease["spec"]["holderIdentity"] = "thief"
        await thief.apply(lease)
        with pytest.raises(LeadershipLostError, match="thief holds it"):
            await a.elector.keep()
        assert not await a.writes()

    played(scenario)


@pytest.mark.parametrize("loses", ["request", "answer"])
def test_keep_ends_when_the_api_server_is_silent(loses: str):
    async def scenario(world: World) -> None:
        a = Process(world, "a")
        await a.try_once()
        begun = world.now
        a.wire.loses = loses
        with pytest.raises(LeadershipLostError, match="in time"):
            await a.elector.keep()
        assert 10 <= world.now - begun <= 15
        assert not await a.writes()

    played(scenario)


def test_one_lost_answer_is_survived():
    async def scenario(world: World) -> None:
        a = Process(world, "a")
        await a.try_once()
        pauses = 0

        async def on_sleep() -> None:
            nonlocal pauses
            pauses += 1
            a.wire.loses = "answer" if pauses == 1 else ""
            if pauses == 6:
                raise InterruptedError

        world.on_sleep = on_sleep
        with pytest.raises(InterruptedError):
            await a.elector.keep()
        lease = await world.store.get(LEASE, "ns", "lease")
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("a", 1)

    played(scenario)


@pytest.mark.parametrize("asks", ["apply", "get"])
def test_one_question_that_nobody_answers_is_survived(asks: str):
    """A connection to an API server whose machine has died says nothing for ever: the one attempt took all of the time that there
    was, and the leader ended though the others answered."""

    async def scenario(world: World) -> None:
        fence, hung = Fence(), asyncio.Event()
        wire = Wire(world.store)
        terms = Terms(lease_s=2, renew_s=1.2, retry_s=0.1)
        one = Elector(wire, world.store.writer("births"), Candidate("ns", "lease", "a", terms), fence)  # type: ignore[arg-type]
        await one.attempt()
        wire.answers_lost = int(asks == "get")  # then it is read before it is renewed again
        answers = getattr(wire, asks)

        async def silent_once(*args: Any, **more: Any) -> Any:
            if not hung.is_set() and not wire.answers_lost:
                hung.set()
                await asyncio.sleep(3_600)
            return await answers(*args, **more)

        setattr(wire, asks, silent_once)
        keeping = asyncio.ensure_future(one.keep())
        done, _ = await asyncio.wait({keeping}, timeout=2.5)
        assert hung.is_set()
        assert not done
        assert fence.open_s > 0
        keeping.cancel()

    played(scenario)


@pytest.mark.parametrize("emptied", [False, True], ids=["deleted", "emptied"])
def test_a_lease_that_somebody_took_away_is_not_taken_before_its_holder_knows(emptied: bool):
    """Deleted by hand, or replaced by the chart's empty one (`helm upgrade --force`): who stood by took it at once, while the
    leader went on writing until its next renewal, and without an answer until its fence closed."""

    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        await b.try_once()
        if emptied:
            lease = await world.store.get(LEASE, "ns", "lease")
            await world.store.patch(LEASE, "ns", "lease", {"spec": dict.fromkeys(lease["spec"])})
        else:
            await world.store.delete(LEASE, "ns", "lease")
        a.wire.loses = "request"
        for _ in range(7):
            await b.try_once()
            assert not (a.fence.open_s > 0 and b.fence.open_s > 0)
            await world.sleep(2)
        await world.sleep(2)
        await b.try_once()
        assert await b.writes(), "it is over"

    played(scenario)


def test_a_leader_whose_lease_was_deleted_keeps_it():
    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        for process in (a, b):
            await process.try_once()
        await world.store.delete(LEASE, "ns", "lease")
        for _ in range(20):
            await world.sleep(2)
            for process in (b, a):
                await process.try_once()
            assert (await a.writes(), await b.writes()) == (True, False)
        assert (await world.store.get(LEASE, "ns", "lease"))["spec"]["holderIdentity"] == "a"

    played(scenario)


def test_a_released_lease_is_taken_at_once():
    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        await a.elector.release()
        assert not await a.writes()
        await b.try_once()
        assert b.elector.leading

    played(scenario)


def test_a_frozen_leader_does_not_even_try_to_give_the_lease_back():
    async def scenario(world: World) -> None:
        a = Process(world, "a")
        await a.try_once()
        sent = a.wire.applies
        world.now += 60
        await a.elector.release()
        assert a.wire.applies == sent

    played(scenario)


@pytest.mark.parametrize("led", [True, False], ids=["a renewal", "the take"])
@pytest.mark.parametrize("lost", [True, False], ids=["the answer was lost", "the end came first"])
def test_a_lease_whose_last_write_was_not_answered_is_given_back(led: bool, lost: bool):
    """Told to stop while a write was under way: the version was another one's, and the next operator waited the whole lease."""

    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        if led:
            await a.try_once()
        if lost:
            a.wire.answers_lost = 1
            await a.try_once()
        else:
            await written_without_an_answer(a)
        await a.elector.release()
        assert not await a.writes()
        await b.try_once()
        assert b.elector.leading

    played(scenario)


async def written_without_an_answer(process: Process) -> None:
    """The store has it, the process is cancelled before it knows."""
    apply, arrived = process.wire.apply, asyncio.Event()

    async def late(obj: dict[str, Any], *, created: bool = False) -> Any:
        await apply(obj, created=created)
        arrived.set()
        await asyncio.sleep(3_600)

    process.wire.apply = late  # type: ignore[method-assign]
    attempt = asyncio.ensure_future(process.elector.attempt())
    await arrived.wait()
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    process.wire.apply = apply  # type: ignore[method-assign]


def test_a_silent_api_server_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The line said: could not give the lease back, and then nothing."""
    monkeypatch.setattr(elector, "RELEASE_S", 0.01)

    async def scenario(world: World) -> None:
        a = Process(world, "a")
        await a.try_once()

        async def silent(*_: Any) -> None:
            await asyncio.sleep(3_600)

        a.wire.apply = silent  # type: ignore[method-assign]
        await asyncio.wait_for(a.elector.release(), 2)

    played(scenario)
    assert "could not give the lease back: no answer in time" in caplog.text


def test_release_leaves_somebody_elses_lease_alone():
    async def scenario(world: World) -> None:
        a, b = Process(world, "a"), Process(world, "b")
        await a.try_once()
        await b.try_once()
        world.now += 20
        await b.try_once()
        await a.elector.release()
        assert (await world.store.get(LEASE, "ns", "lease"))["spec"]["holderIdentity"] == "b"

    played(scenario)


def test_without_the_right_to_leases_the_process_says_so():
    async def scenario(world: World) -> None:
        a = Process(world, "a")

        async def forbidden(*_: Any) -> None:
            raise ForbiddenError("leases is forbidden")

        a.wire.get = forbidden  # type: ignore[method-assign]
        with pytest.raises(ForbiddenError):
            await a.elector.win()

    played(scenario)


ACTS = st.lists(
    st.tuples(
        st.floats(0.0, 12.0),
        st.integers(0, 2),
        st.sampled_from(["", "", "", "request", "answer"]),
        st.sampled_from(["try", "try", "try", "write", "release"]),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(acts=ACTS, rates=st.tuples(*[st.floats(0.97, 1.03)] * 3))
def test_at_no_instant_may_two_write(acts: list[tuple[float, int, str, str]], rates: tuple[float, ...]):
    """Frozen for any time, requests and answers lost, clocks that run at other rates: at most one fence is open."""

    async def scenario(world: World) -> None:
        processes = [Process(world, name, rate, zero) for name, rate, zero in zip("abc", rates, (0.0, 5e4, -1e3), strict=True)]
        for pause_s, index, loses, act in acts:
            world.now += pause_s
            process = processes[index]
            process.wire.loses = loses
            match act:
                case "try":
                    await process.try_once()
                case "release":
                    await process.elector.release()
                    process.elector.leading = False
                case _:
                    process.wire.loses = ""
                    await process.writes()
            assert sum(one.fence.open_s > 0 for one in processes) <= 1

    played(scenario)
