"""Large bodies are read by a process of their own: the answers of here, and whatever becomes of it, one request's failure."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet_worker.engine.errors import BadRequestError, OverloadedError, UnknownModelError
from fleet_worker.engine.reader import Reader
from fleet_worker.engine.reading import Read, Terms, What, packed, read_request, tell, unpacked
from fleet_worker.engine.text import text_digest
from tests.fleet_worker.engine.test_server import FOLDER, TEXT, until

TERMS = Terms(("tiny", "lora"), 1024, 512)
REFERENCE: dict[str, Any] = {
    "do_remote_prefill": True, "remote_block_ids": [1, 2, [3]], "remote_engine_id": "e", "remote_request_id": "r",
    "remote_host": "h", "remote_port": 5600, "digest": "0" * 32, "lease_id": "a-1.b",
}  # fmt: skip
SAID: list[tuple[What, dict[str, Any]]] = [
    ("completion", {"prompt": "the router " * 30}),
    ("completion", {"prompt": [1, 2, 1023], "stop": "x", "temperature": 0.1, "seed": -5, "stream": True, "max_tokens": 9}),
    ("completion", {"prompt": "a " * 4_000, "kv_transfer_params": REFERENCE, "cache_salt": "é\0s", "model": "lora"}),
    ("completion", {"prompt": "a", "stop": ["x"] * 16, "stop_token_ids": [3], "stream_options": {"include_usage": True}}),
    ("completion", {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True, "max_tokens": 4}, "top_p": None}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "min_tokens": 2, "top_k": -1}),
]


def raw(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"model": "tiny", **fields})


def run(scenario: Callable[[Reader], Awaitable[None]], folder: Path = FOLDER, **given: Any) -> None:
    async def main() -> None:
        reader = Reader(folder, given.pop("digest", TEXT.digest), **given)
        try:
            await asyncio.wait_for(scenario(reader), 60)
        finally:
            reader.close()

    asyncio.run(main())


async def begun(reader: Reader, then: signal.Signals | None = None) -> subprocess.Popen[bytes]:
    """Its process, which has read something."""
    assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is not None
    process = reader._process
    assert process is not None
    if then is not None:
        process.send_signal(then)
    return process


def lean(read: Read) -> tuple[Any, ...]:
    """Of a request all that is looked at once it is read."""
    fields = msgspec.structs.asdict(read.asked)
    kept = {name: value for name, value in fields.items() if name not in ("prompt", "messages", "kv_transfer_params")}
    return type(read.asked), kept, read.kv, read.reference, read.count, list(read.tokens)


@pytest.mark.parametrize(("what", "fields"), SAID)
def test_what_is_read_elsewhere_is_what_is_read_here(what: What, fields: dict[str, Any]):
    told = msgspec.msgpack.decode(
        msgspec.msgpack.encode(packed(raw(fields), what, TEXT, TERMS)), type=type(packed(b"", what, TEXT, TERMS))
    )
    found = unpacked(told, what)
    assert isinstance(found, Read)
    assert lean(found) == lean(read_request(raw(fields), what, TEXT, TERMS))
    assert len(found.tokens) in (found.count, 0)


def test_one_process_reads_what_comes_and_its_errors_are_the_requests_own():
    async def scenario(reader: Reader) -> None:
        for what, fields in SAID:
            found = await reader.read(raw(fields), what, TERMS)
            assert isinstance(found, Read)
            assert lean(found) == lean(read_request(raw(fields), what, TEXT, TERMS))
        process = reader._process
        for fields, error, param in (
            ({"model": "x" * 500}, UnknownModelError, "model"),
            ({"stop": [""]}, BadRequestError, "stop"),
            ({"prompt": [1024]}, BadRequestError, "prompt"),
            ({"tools": [{}]}, BadRequestError, "tools"),
        ):
            with pytest.raises(error) as caught:
                await reader.read(raw({"prompt": "a", **fields}), "completion", TERMS)
            assert caught.value.param == param
        asked = raw({"prompt": "a b " * 9_000})
        assert await reader.read(asked, "tokenize", TERMS) == tell(asked, "tokenize", TEXT, TERMS)
        assert reader._process is process

    run(scenario)


def test_one_that_is_killed_fails_its_request_alone():
    async def scenario(reader: Reader) -> None:
        first = await begun(reader, signal.SIGSTOP)
        reading = asyncio.create_task(reader.read(raw({"prompt": "a " * 500_000}), "completion", TERMS))
        await asyncio.sleep(0.05)
        first.kill()
        with pytest.raises(OverloadedError):
            await reading
        assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is not None
        assert reader._process is not first

    run(scenario)


def test_one_that_comes_to_no_end_is_ended():
    async def scenario(reader: Reader) -> None:
        process = await begun(reader, signal.SIGSTOP)
        with pytest.raises(OverloadedError, match="took longer than"):
            await reader.read(raw({"prompt": "a"}), "completion", TERMS)
        assert process.poll() == -signal.SIGKILL

    run(scenario, most_s=3.0)


def test_it_ends_when_nothing_large_came_for_a_while():
    async def scenario(reader: Reader) -> None:
        assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is not None
        await until(lambda: reader._process is None)
        assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is not None

    run(scenario, idle_s=0.0)


def test_a_folder_with_another_tokenizer_by_now_is_never_read_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The engine has the one of its start: tokens of two tokenizers are two models. It is looked at once: each large body began
    another process, which loaded the tokenizer, to be ended for the same reason, and a line of the log."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    digest = text_digest(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    async def scenario(reader: Reader) -> None:
        for _ in range(2):
            assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is None
            assert reader._process is None

    run(scenario, folder, digest=digest)
    assert capfd.readouterr().err.count("another tokenizer") == 1


def test_it_does_not_outlive_its_engine():
    """Whatever ended that: its pipe ends."""

    async def scenario(reader: Reader) -> None:
        process = await begun(reader)
        assert process.stdin is not None
        process.stdin.close()
        end = time.monotonic() + 10
        while process.poll() is None:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert process.returncode == 0

    run(scenario)


def test_large_bodies_that_wait_are_bounded_by_their_bytes():
    """One is read at a time, 4 MB of text for up to 10 s, and each of 2,048 connections may bring one: that were 8 GB."""

    async def scenario(reader: Reader) -> None:
        process = await begun(reader, signal.SIGSTOP)
        asked = raw({"prompt": "a " * 2_000})
        many = [asyncio.create_task(reader.read(asked, "completion", TERMS)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="large bodies wait"):
            await asyncio.wait_for(reader.read(asked, "completion", TERMS), 1.0)
        process.send_signal(signal.SIGCONT)
        assert all(isinstance(read, Read) for read in await asyncio.gather(*many))
        assert isinstance(await reader.read(asked, "completion", TERMS), Read)  # whose turn is over counts no more

    run(scenario, most_bytes=5 * 4_100)


@pytest.mark.parametrize(("argv", "words"), [("/nowhere/python", "cannot be started"), ("/bin/false", "ended at its start")])
def test_without_a_process_the_engine_reads_by_itself_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], argv: str, words: str
):
    async def scenario(reader: Reader) -> None:
        assert await reader.read(raw({"prompt": "a"}), "completion", TERMS) is None
        assert reader._process is None

    monkeypatch.setattr(sys, "executable", argv)
    run(scenario)
    assert words in capfd.readouterr().err
