"""The agent's adapters: which steps follow from what is there, staging that leads nowhere else, a keeper over a fake engine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_worker.agent import adapters as module
from fleet_worker.agent.adapterplan import Failure, Held, Steps, failed_again, plan, report, settled
from fleet_worker.agent.adapters import AdapterKeeper, wished_at_start
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.stage import FILES, prune, stage
from fleet_worker.config import AdapterSettings, AdapterWish, WorkerConfig, decode_adapters, encode_adapters

NO_SPACE = {"no-space": errno.ENOSPC, "over-quota": errno.EDQUOT}


def wish(name: str, source: str = "one") -> AdapterWish:
    return AdapterWish(name=name, source=source)


def held(source: str = "one") -> Held:
    return Held(source, f"digest of {source}", f"/staged/{source}")


ROWS: dict[str, tuple[list[AdapterWish], dict[str, Held], dict[str, Failure], set[str], Steps]] = {
    "nothing": ([], {}, {}, set(), Steps()),
    "a-new-one": ([wish("a")], {}, {}, set(), Steps(load=(wish("a"),))),
    "it-is-there": ([wish("a")], {"a": held()}, {}, set(), Steps()),
    "not-wished-any-more": ([], {"a": held()}, {}, set(), Steps(unload=("a",))),
    "another-source": ([wish("a", "two")], {"a": held()}, {}, set(), Steps(load=(wish("a", "two"),))),
    "under-way": ([wish("a")], {}, {}, {"a"}, Steps()),
    "failed-a-moment-ago": ([wish("a")], {}, {"a": Failure("one", "R", "m", 105.0)}, set(), Steps(wake_at=105.0)),
    "failed-long-ago": ([wish("a")], {}, {"a": Failure("one", "R", "m", 99.0)}, set(), Steps(load=(wish("a"),))),
    "failed-and-its-time-has-come": ([wish("a")], {}, {"a": Failure("one", "R", "m", 100.0)}, set(), Steps(load=(wish("a"),))),
    "going-already": ([], {"a": held()}, {}, {"a"}, Steps()),
    "failed-with-another-source": (
        [wish("a", "two")], {}, {"a": Failure("one", "R", "m", 105.0)}, set(), Steps(load=(wish("a", "two"),)),
    ),
    "one-of-each": (
        [wish("a"), wish("b")], {"b": held(), "c": held()}, {}, set(), Steps(load=(wish("a"),), unload=("c",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_steps(name: str):
    wished, there, failed, busy, expected = ROWS[name]
    assert plan(wished, there, failed, busy, now=100.0) == expected


@given(
    names=st.sets(st.sampled_from("abcd")), there=st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["one", "two"])),
)  # fmt: skip
def test_after_the_steps_there_are_none(names: set[str], there: dict[str, str]):
    wished = [wish(name) for name in sorted(names)]
    holds = {name: held(source) for name, source in there.items()}
    steps = plan(wished, holds, {}, (), 0.0)
    after = {name: found for name, found in holds.items() if name not in steps.unload}
    after |= {one.name: held(one.source) for one in steps.load}
    assert plan(wished, after, {}, (), 0.0) == Steps()
    assert {name: found.source for name, found in after.items()} == {one.name: one.source for one in wished}
    assert settled(wished, after, {})


def test_a_failure_is_tried_again_later_and_later_and_a_new_source_at_once():
    pauses, failure = [], None
    for _ in range(7):
        failure = failed_again(failure, "one", "R", "m", 0.0)
        pauses.append(failure.again_at)
    assert pauses == [5, 10, 20, 40, 80, 120, 120]
    assert failed_again(failure, "two", "R", "m", 0.0).again_at == 5


def test_the_report_says_what_is_there_and_what_is_not():
    wished = [wish("a"), wish("b", "two"), wish("c")]
    failed = {"b": Failure("two", "BadAdapter", "words", 9.0)}
    assert report(wished, {"a": held(), "b": held(), "d": held()}, failed, ()) == [
        {"name": "a", "source": "one", "state": "Loaded", "digest": "digest of one", "reason": "", "message": ""},
        {"name": "b", "source": "two", "state": "Failed", "digest": "digest of one", "reason": "BadAdapter", "message": "words"},
        {"name": "c", "source": "one", "state": "Loading", "digest": "", "reason": "", "message": ""},
        {"name": "d", "source": "", "state": "Unloading", "digest": "digest of one", "reason": "", "message": ""},
    ]


# -- staging ------------------------------------------------------------------------------------------------------------
def folder(path: Path, content: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / FILES[0]).write_bytes(b"{}")
    (path / FILES[1]).write_bytes(content)
    return path


@pytest.mark.parametrize("start", ["pissa_niter_16", "olora", "corda", "LoftQ", "lora_ga"])
def test_one_that_needs_another_base_model_is_given_to_no_engine(tmp_path: Path, start: str):
    """vLLM does not look: over the model that is served it answered 200 with other tokens."""
    config = folder(tmp_path / "root/a") / FILES[0]
    config.write_text(json.dumps({"init_lora_weights": start}))
    with pytest.raises(AdapterError, match=f"init_lora_weights '{start}' changes the base model") as refused:
        stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert (refused.value.reason, list((tmp_path / "into").iterdir())) == ("BadAdapter", [])
    for plain in (True, False, "gaussian", "eva", None):
        config.write_text(json.dumps({"init_lora_weights": plain}))
        assert stage("a", str(tmp_path / "root"), tmp_path / "into").digest
    for odd in (b"[]", b"{", b"[" * 5_000):
        config.write_bytes(odd)
        assert stage("a", str(tmp_path / "root"), tmp_path / "into").digest, "the engine refuses it in its own words"


def test_a_copy_is_named_by_its_content(tmp_path: Path):
    folder(tmp_path / "root/a")
    staged = stage("a", str(tmp_path / "root"), tmp_path / "into")
    parts = hashlib.sha256(b"{}").digest() + hashlib.sha256(b"weights").digest()
    assert staged.digest == hashlib.sha256(parts).hexdigest()
    assert {path.name: path.read_bytes() for path in staged.folder.iterdir()} == {FILES[0]: b"{}", FILES[1]: b"weights"}
    assert stage("a", str(tmp_path / "root"), tmp_path / "into") == staged
    (tmp_path / "root/a" / FILES[1]).write_bytes(b"other")
    other = stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert other.folder != staged.folder
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == sorted([staged.folder.name, other.folder.name])
    prune(tmp_path / "into", {other.folder})
    assert [path.name for path in (tmp_path / "into").iterdir()] == [other.folder.name]


def test_two_adapters_with_one_content_may_be_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second one failed with `Directory not empty` when the first was there between its look and its move."""
    folder(tmp_path / "root/a")
    staged = stage("a", str(tmp_path / "root"), tmp_path / "into")
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path != staged.folder and is_dir(path))
    assert stage("a", str(tmp_path / "root"), tmp_path / "into") == staged
    assert [path.name for path in (tmp_path / "into").iterdir()] == [staged.folder.name]


@pytest.mark.parametrize("code", NO_SPACE.values(), ids=NO_SPACE)
@pytest.mark.parametrize("at", ["tempfile.mkdtemp", "fleet_worker.agent.stage._copy"])
def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, code: int):
    """Without room for a folder it was an InternalError, and a quota that is used up one of the source."""

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    folder(tmp_path / "root/a")
    monkeypatch.setattr(at, full)
    with pytest.raises(AdapterError, match=f"a: {os.strerror(code)}") as told:
        stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert told.value.reason == "DiskFull"


@pytest.mark.parametrize("source", ["../secret", "/etc", "a/../../secret", "link", "nested/link"])
def test_nothing_outside_of_the_root_is_ever_read(tmp_path: Path, source: str):
    folder(tmp_path / "secret")
    (tmp_path / "root/nested").mkdir(parents=True)
    for at in ("root/link", "root/nested/link"):
        (tmp_path / at).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError) as refused:
        stage(source, str(tmp_path / "root"), tmp_path / "into")
    assert refused.value.reason == "BadSource"
    assert not (tmp_path / "into").exists() or not list((tmp_path / "into").iterdir())


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_a_link_to_outside_of_the_root(tmp_path: Path, name: str):
    """The folder lay inside, and its files were links to anything that the worker may read."""
    (tmp_path / "secret").write_bytes(b"{}")
    at = folder(tmp_path / "root/a") / name
    at.unlink()
    at.symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError, match=f"a/{name} leads outside of the adapter root") as refused:
        stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert refused.value.reason == "BadSource"


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str):
    """Incident: who opens a pipe waits for its writer; four of them held every place for loading, for ever."""
    at = folder(tmp_path / "root/a") / name
    at.unlink()
    if kind == "pipe":
        os.mkfifo(at)
        writer = os.open(at, os.O_RDWR)  # whoever reads it all the same does not wait for ever, and this test ends
        os.set_blocking(writer, False)
        os.write(writer, b"{}")
        threading.Timer(1.0, os.close, (writer,)).start()
    elif kind == "folder":
        at.mkdir()
    else:
        at.symlink_to(name)
    with pytest.raises(AdapterError, match=name) as refused:
        stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert refused.value.reason == "AdapterNotReadable"


@pytest.mark.parametrize("source", ["a\0b", "loop", "x" * 300])
def test_a_source_that_is_no_path_is_named(tmp_path: Path, source: str):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/loop").symlink_to("loop")
    with pytest.raises(AdapterError) as refused:
        stage(source, str(tmp_path / "root"), tmp_path / "into")
    assert refused.value.reason in ("BadSource", "AdapterNotReadable")


def test_a_link_inside_of_the_root_is_followed(tmp_path: Path):
    folder(tmp_path / "root/versions/7")
    (tmp_path / "root/current").symlink_to("versions/7")
    assert stage("current", str(tmp_path / "root"), tmp_path / "into").digest


def test_what_is_missing_or_not_readable_is_said(tmp_path: Path):
    (tmp_path / "root").mkdir()
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist") as refused:
        stage("a", str(tmp_path / "root"), tmp_path / "into")
    assert refused.value.reason == "AdapterNotFound"
    with pytest.raises(AdapterError, match="has no folder for adapters"):
        stage("a", None, tmp_path / "into")


# -- the keeper -----------------------------------------------------------------------------------------------------------
class Engine:
    """Remembers what it was told; refuses content that begins with "bad"."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.lies = False
        self.silent = False
        """It loads, but not in time for its answer."""

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> str | None:
        self.calls.append(f"{'replace' if inplace else 'load'} {name}")
        await self.gate.wait()
        if name in self.loaded and not inplace:
            raise AdapterError("BadAdapter", f"The lora adapter '{name}' has already been loaded.")
        content = await asyncio.to_thread((Path(path) / FILES[1]).read_bytes)
        if content.startswith(b"bad"):
            raise AdapterError("BadAdapter", "it is bad")
        self.loaded[name] = path
        if self.silent:
            raise AdapterError("EngineSilent", "no answer")
        return "another digest" if self.lies else None

    async def unload_adapter(self, name: str) -> None:
        self.calls.append(f"unload {name}")
        self.loaded.pop(name, None)


Wishes = tuple[AdapterWish, ...]
Scenario = Callable[[AdapterKeeper, Engine], Awaitable[None]]


def keep(
    tmp_path: Path, scenario: Scenario, wished: tuple[AdapterWish, ...] = (), *, engine: str = "torch", most: int = 4
) -> None:
    config = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="m", served_name="tiny",
        engine=engine, adapters=AdapterSettings(most=most, root=str(tmp_path / "root")),  # type: ignore[arg-type]
    )  # fmt: skip

    async def main() -> None:
        fake = Engine()
        keeper = AdapterKeeper(config, fake, tmp_path / "staged", wished)
        running = asyncio.create_task(keeper.run())
        try:
            await asyncio.wait_for(scenario(keeper, fake), 20)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


def states(keeper: AdapterKeeper) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in keeper.report()}


def test_it_goes_where_it_is_told(tmp_path: Path):
    for name in ("one", "two"):
        folder(tmp_path / "root" / name, name.encode())

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        assert states(keeper) == {"a": "Loaded"}
        first = keeper.report()[0]["digest"]
        keeper.wish([wish("a", "two"), wish("b", "one")])
        await until(lambda: states(keeper) == {"a": "Loaded", "b": "Loaded"})
        assert keeper.report()[0]["digest"] != first
        assert keeper.report()[1]["digest"] == first
        keeper.wish([wish("b", "one")])
        await until(lambda: states(keeper) == {"b": "Loaded"})
        assert sorted(engine.calls) == ["load a", "load b", "replace a", "unload a"]
        keeper.wish([])
        await until(lambda: not list((tmp_path / "staged").iterdir()))

    keep(tmp_path, scenario, (wish("a"),))


def test_an_engine_that_was_started_anew_is_given_everything_again(tmp_path: Path):
    """vLLM for another role: it had no adapter, and its agent told of those that the one before had."""
    folder(tmp_path / "root/one", b"one")

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        engine.loaded.clear()
        keeper.engine_gone()
        assert states(keeper) != {"a": "Loaded"}
        await keeper.engine_there()
        assert states(keeper) == {"a": "Loaded"}
        assert (engine.calls, set(engine.loaded)) == (["load a", "load a"], {"a"})

    keep(tmp_path, scenario, (wish("a"),), engine="vllm")


def test_one_name_with_two_contents_is_no_wish(tmp_path: Path):
    """Told by an annotation that somebody edited: each took the other's place, copied and loaded anew without end."""
    for name in ("one", "two"):
        folder(tmp_path / "root" / name, name.encode())
    said = '[{"name":"a","source":"one"},{"name":"a","source":"two"}]'
    with pytest.raises(msgspec.ValidationError, match="several adapters are called a"):
        decode_adapters(said)
    wished = wished_at_start({"FLEET_ADAPTERS": said})

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        await asyncio.sleep(0.2)
        assert engine.calls == []

    keep(tmp_path, scenario, wished)


def test_vllm_is_never_told_to_replace_under_running_requests(tmp_path: Path):
    for name in ("one", "two"):
        folder(tmp_path / "root" / name, name.encode())

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        keeper.wish([wish("a", "two")])
        await until(lambda: engine.calls == ["load a", "unload a", "load a"] and states(keeper) == {"a": "Loaded"})

    keep(tmp_path, scenario, (wish("a"),), engine="vllm")


def test_one_that_fails_holds_up_nobody_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder(tmp_path / "root/one")
    folder(tmp_path / "root/broken", b"bad weights")
    monkeypatch.setattr("fleet_worker.agent.adapterplan.AGAIN_FIRST_S", 0.05)

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        await until(lambda: states(keeper) == {"a": "Loaded", "b": "Failed"})
        entry = keeper.report()[1]
        assert (entry["reason"], entry["message"], entry["digest"]) == ("BadAdapter", "it is bad", "")
        await asyncio.to_thread((tmp_path / "root/broken" / FILES[1]).write_bytes, b"mended")
        await until(lambda: states(keeper) == {"a": "Loaded", "b": "Loaded"})

    keep(tmp_path, scenario, (wish("a"), wish("b", "broken")))


def test_a_new_version_that_fails_leaves_the_old_one(tmp_path: Path):
    folder(tmp_path / "root/one")
    folder(tmp_path / "root/broken", b"bad weights")

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        await keeper.first_round()
        digest, path = keeper.report()[0]["digest"], engine.loaded["a"]
        keeper.wish([wish("a", "broken")])
        await until(lambda: states(keeper) == {"a": "Failed"})
        assert (keeper.report()[0]["digest"], engine.loaded["a"]) == (digest, path)

    keep(tmp_path, scenario, (wish("a"),))


def test_a_slow_one_holds_up_nobody_but_the_first_readiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder(tmp_path / "root/one")
    monkeypatch.setattr(module, "FIRST_ROUND_S", 0.2)

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        engine.gate.clear()
        await keeper.first_round()
        assert states(keeper) == {"a": "Loading"}
        keeper.wish([wish("a"), wish("b")])
        await until(lambda: "load b" in engine.calls)
        engine.gate.set()
        await until(lambda: states(keeper) == {"a": "Loaded", "b": "Loaded"})

    keep(tmp_path, scenario, (wish("a"),))


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("fault", ["silent", "lies"])
def test_what_the_engine_loaded_without_a_good_answer_is_loaded_again_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, fault: str
):
    """Incident: an adapter that took longer to load than its answer was waited for "has already been loaded" for ever after, and
    stayed in its place when nobody wished for it any more."""
    folder(tmp_path / "root/one")
    monkeypatch.setattr("fleet_worker.agent.adapterplan.AGAIN_FIRST_S", 0.05)

    async def scenario(keeper: AdapterKeeper, fake: Engine) -> None:
        setattr(fake, fault, True)
        keeper.wish([wish("a"), wish("b")])
        await until(lambda: states(keeper) == {"a": "Failed", "b": "Failed"})
        keeper.wish([wish("a")])
        await until(lambda: "b" not in fake.loaded)
        setattr(fake, fault, False)
        await until(lambda: states(keeper) == {"a": "Loaded"})
        assert fake.loaded.keys() == {"a"}

    keep(tmp_path, scenario, engine=engine)


def test_an_engine_that_loaded_other_bytes_is_not_believed(tmp_path: Path):
    folder(tmp_path / "root/one")

    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        engine.lies = True
        keeper.wish([wish("a")])
        await until(lambda: states(keeper) == {"a": "Failed"})
        assert keeper.report()[0]["reason"] == "DigestMismatch"

    keep(tmp_path, scenario)


def test_a_worker_without_room_for_adapters_says_so(tmp_path: Path):
    async def scenario(keeper: AdapterKeeper, engine: Engine) -> None:
        keeper.wish([wish("a")])
        await until(lambda: states(keeper) == {"a": "Failed"})
        assert keeper.report()[0]["reason"] == "AdaptersDisabled"

    keep(tmp_path, scenario, most=0)


def test_the_wishes_travel_as_json_in_order_of_names():
    wishes = [wish("b"), wish("a", "hf://org/name@main")]
    assert decode_adapters(encode_adapters(wishes)) == (wishes[1], wishes[0])
    for raw in (
        '[{"name":"a"}]',
        '[{"name":"","source":"x"}]',
        '[{"name":"a","source":"x","more":1}]',
        '[{"name":"a","source":"x"},{"name":"b","source":"x"},{"name":"a","source":"y"}]',
        "[" + "0," * 65 + "0]",
        "{",
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_adapters(raw)
    assert os.environ.get("FLEET_ADAPTERS") is None
