"""What an engine did of which it gave no good answer, copies that it refused or still reads, and the end of a keeper in the
midst of news."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fleet_worker.agent import adapters
from fleet_worker.agent.adapters import AdapterKeeper
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.stage import FILES
from fleet_worker.config import AdapterWish
from tests.fleet_worker.agent.test_adapters import Engine, folder, keep, states, until, wish


def silenced(act: Callable[[str], Awaitable[None]]) -> Callable[[str], Awaitable[None]]:
    """It unloads, but not in time for its answer."""

    async def unload(name: str) -> None:
        await act(name)
        raise AdapterError("EngineSilent", "no answer")

    return unload


Change = tuple[str, str, tuple[AdapterWish, ...]]
"""Engine, what of it is silent, what is wished meanwhile."""
CHANGES: dict[str, Change] = {
    "replaced": ("torch", "load", (wish("a", "two"),)),
    "taken": ("torch", "unload", ()),
    "taken-by-vllm": ("vllm", "unload", ()),
    "taken-for-another": ("vllm", "unload", (wish("a", "two"),)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_version_before_that_is_wished_again_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """It was told as loaded with its own digest while the engine had the other version, or none: answers came under the wrong
    weights, or 404, until the worker began anew."""
    engine, silent, meanwhile = CHANGES[name]
    for source in ("one", "two"):
        folder(tmp_path / "root" / source, source.encode())

    async def scenario(keeper: AdapterKeeper, fake: Engine) -> None:
        await keeper.first_round()
        before, sound = keeper.report(), fake.unload_adapter
        fake.silent = silent == "load"
        if silent == "unload":
            monkeypatch.setattr(fake, "unload_adapter", silenced(sound))
        calls = len(fake.calls)
        keeper.wish(meanwhile)
        await until(lambda: len(fake.calls) > calls and [one["digest"] for one in keeper.report()] == [""] * len(meanwhile))
        keeper.wish([wish("a")])
        fake.silent = False
        monkeypatch.setattr(fake, "unload_adapter", sound)
        await until(lambda: states(keeper) == {"a": "Loaded"})
        assert keeper.report() == before
        assert {key: Path(path).name for key, path in fake.loaded.items()} == {"a": before[0]["digest"][:32]}

    keep(tmp_path, scenario, (wish("a"),), engine=engine)


def test_one_that_the_engine_refuses_keeps_the_version_before(tmp_path: Path):
    folder(tmp_path / "root/one", b"one")
    folder(tmp_path / "root/two", b"bad")

    async def scenario(keeper: AdapterKeeper, fake: Engine) -> None:
        await keeper.first_round()
        before = keeper.report()
        keeper.wish([wish("a", "two")])
        await until(lambda: states(keeper) == {"a": "Failed"})
        assert keeper.report()[0]["digest"] == before[0]["digest"]
        keeper.wish([wish("a")])
        assert keeper.report() == before
        assert fake.calls == ["load a", "replace a"]

    keep(tmp_path, scenario, (wish("a"),))


def test_a_copy_that_the_engine_refused_goes(tmp_path: Path):
    """It stayed until another adapter came or went: gigabytes maybe, for which others found no room."""
    folder(tmp_path / "root/one", b"one")
    folder(tmp_path / "root/two", b"bad")

    async def scenario(keeper: AdapterKeeper, fake: Engine) -> None:
        await keeper.first_round()
        kept = list((tmp_path / "staged").iterdir())
        keeper.wish([wish("a"), wish("b", "two")])
        await until(lambda: states(keeper) == {"a": "Loaded", "b": "Failed"})
        await until(lambda: list((tmp_path / "staged").iterdir()) == kept)
        assert fake.calls == ["load a", "load b"]

    keep(tmp_path, scenario, (wish("a"),))


@pytest.mark.parametrize("turns", range(6))
def test_a_keeper_that_hears_news_as_it_ends_does_end(tmp_path: Path, turns: int):
    """An engine that dies fails what it is given: both at once. The keeper went on for ever, its agent waited for it, and told
    probes what was true before."""

    async def scenario(keeper: AdapterKeeper, _: Engine) -> None:
        await until(lambda: states(keeper) == {"a": "Failed"})  # the next try is seconds away
        running = [asyncio.create_task(keeper.run()), asyncio.create_task(for_ever(keeper))]
        keeper._settled.clear()
        for _ in range(20):
            await asyncio.sleep(0)
        keeper.wish([wish("a"), wish("b")])
        keeper._settled.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in running:
            task.cancel()
        done, _ = await asyncio.wait(running, timeout=3)
        for task in running:
            task.cancel()
        assert done == set(running)

    async def for_ever(keeper: AdapterKeeper) -> None:
        while True:
            await keeper.first_round()
            await asyncio.sleep(0)

    keep(tmp_path, scenario, (wish("a"),))


def test_an_adapter_that_the_engine_does_not_give_up_is_said_once_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One line a second, for ever, and none of them said which adapter."""
    folder(tmp_path / "root" / "one", b"one")
    monkeypatch.setattr(adapters, "UNLOAD_AGAIN_S", 0.01)

    async def scenario(keeper: AdapterKeeper, fake: Engine) -> None:
        await keeper.first_round()
        sound = fake.unload_adapter
        monkeypatch.setattr(fake, "unload_adapter", silenced(sound))
        keeper.wish([])
        await until(lambda: fake.calls.count("unload a") > 5)
        monkeypatch.setattr(fake, "unload_adapter", sound)
        await until(lambda: not keeper._unsure)

    keep(tmp_path, scenario, (wish("a"),))
    assert capsys.readouterr().out.splitlines() == ["EngineSilent: adapter a is not unloaded yet: no answer"]


def copies(tmp_path: Path) -> set[bytes]:
    return {(path / FILES[1]).read_bytes() for path in (tmp_path / "staged").iterdir()}


async def replaced(keeper: AdapterKeeper, *sources: str) -> None:
    """By these, one after the other: of the adapter that is called by their first letter."""
    for source in sources:
        others = [one for one in keeper._wished if one.name != source[0]]
        keeper.wish([*others, wish(source[0], source)])
        await until(lambda: "Loading" not in states(keeper).values() and not keeper._busy and not keeper._untidy)
        await asyncio.sleep(0.05)


def test_of_copies_that_vllm_may_read_again_those_stay_that_were_in_use_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest ones stayed: the first copy of an adapter went as it was replaced, when another one had been replaced often.
    vLLM 0.32 reads it again, in a step, for a stream that goes on under it, and ends with all streams when it is not there."""
    monkeypatch.setattr(adapters, "LEFT_S", 0.0)
    for name in ("a1", "a2", "b1", "b2", "b3", "c-bad"):
        folder(tmp_path / "root" / name, name.removeprefix("c-").encode())

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        await replaced(keeper, "b1", "b2", "b3", "a2")
        assert copies(tmp_path) == {b"a1", b"a2", b"b2", b"b3"}
        await replaced(keeper, "c-bad")
        assert copies(tmp_path) == {b"a1", b"a2", b"b2", b"b3"}, "one that vllm refused takes no place of theirs"

    keep(tmp_path, scenario, (wish("a", "a1"),), engine="vllm", most=2)


@pytest.mark.parametrize(("engine", "left"), [("vllm", {b"a1", b"a2", b"a3"}), ("torch", {b"a3"})])
def test_a_copy_stays_for_as_long_as_streams_may_go_on_under_it(tmp_path: Path, engine: str, left: set[bytes]):
    """An adapter that was replaced twice within a minute ended vLLM."""
    for name in ("a1", "a2", "a3"):
        folder(tmp_path / "root" / name, name.encode())

    async def scenario(keeper: AdapterKeeper, _: Engine) -> None:
        await keeper.first_round()
        await replaced(keeper, "a2", "a3")
        assert copies(tmp_path) == left

    keep(tmp_path, scenario, (wish("a", "a1"),), engine=engine, most=1)
