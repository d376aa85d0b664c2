"""What a cache looks like in the field: fetches that were killed on the way, disks that others filled, and a library that keeps
the files of all repositories in one place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fleet_worker.agent.hub import LEFT_S, _check_whole, _compare
from tests.fleet_worker.agent.test_stop import preparing
from tests.hub import Hub, HubHandler, etag
from tests.xethub import XetHandler, xet_hash

WEIGHTS = b"weights " * 100_000
FILES = {"config.json": b'{"architectures":["LlamaForCausalLM"]}', "model.safetensors": WEIGHTS}


class Slow(HubHandler):
    """Half of the weights, and nothing more until somebody says so."""

    go_on = threading.Event()

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.command != "GET" or body != WEIGHTS or self.go_on.is_set():
            super().answer(status, body, headers)
            return
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.go_on.wait(30.0)


class SlowXet(XetHandler):
    """The same of Xet's storage."""

    def xorb(self, body: bytes) -> None:
        self.send_response(206)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        Slow.go_on.wait(30.0)


@contextmanager
def slow_hub() -> Iterator[Hub]:
    """One that stops in the middle of a file until `Slow.go_on` is set."""
    server = Hub({"acme/tiny": FILES})
    Slow.go_on = threading.Event()
    server.RequestHandlerClass = Slow
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    Slow.go_on.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with slow_hub() as server:
        yield server


class LostXet(XetHandler):
    """A mirror alone is reached: nothing of Xet's storage is."""

    def respond(self) -> None:
        if "/reconstructions/" in self.path or self.path.startswith("/xorbs/"):
            self.connection.close()
        else:
            super().respond()


def fetch(hub: Hub, cache: Path, out: int | None = None, err: int | None = None, **more: str) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": address(hub), "FLEET_MODEL_CACHE": str(cache), "HF_HOME": str(cache)} | more
    argv = [sys.executable, "-m", "fleet_worker", "fetch"]
    return subprocess.Popen(argv, stdout=out, stderr=err, env={**env, "FLEET_FETCH": "hf://acme/tiny"})


def parts(cache: Path) -> list[Path]:
    return list(cache.glob("models--acme--tiny/blobs/*.incomplete"))


def begun(cache: Path) -> None:
    """Once the weights are on their way."""
    deadline = time.monotonic() + 60.0
    while not any(part.name.startswith(etag("model.safetensors", WEIGHTS)) for part in parts(cache)):
        assert time.monotonic() < deadline, "nothing was begun"
        time.sleep(0.02)


def address(hub: Hub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_fetch_wrote_goes_with_the_next_one(hub: Hub, tmp_path: Path, number: signal.Signals):
    """Each has a name of its own, so that nothing used or removed it: a node's disk was filled by pods that were deleted, or had
    no memory, while they fetched, until no model fitted."""
    killed = fetch(hub, tmp_path)
    begun(tmp_path)
    killed.send_signal(number)
    killed.wait(30.0)
    for left in parts(tmp_path):
        os.utime(left, (time.time() - LEFT_S - 1.0,) * 2)
    blobs = tmp_path / "models--acme--tiny" / "blobs"
    writing = blobs / f"{'f' * 64}.0123abcd.incomplete"
    writing.write_bytes(b"of a process whose lock this file system does not know")
    resumed = blobs / f"{'e' * 64}.incomplete"
    resumed.write_bytes(b"of an older library, which goes on from here")
    os.utime(resumed, (0.0, 0.0))
    Slow.go_on.set()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    assert sorted(parts(tmp_path)) == sorted([writing, resumed])


@pytest.mark.parametrize("stream", ["out", "err"])
@pytest.mark.parametrize("collector", ["full-disk", "does-not-read", "gone"])
def test_a_log_that_cannot_be_written_keeps_nobody_from_the_model(hub: Hub, tmp_path: Path, stream: str, collector: str):
    """It ended with the first line: BadModel, and that the disk of the cache were full, or that the hub could not be reached."""
    Slow.go_on.set()
    reading, writing = os.pipe()
    if collector == "does-not-read":
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"nobody takes it\n" * 256)
        os.set_blocking(writing, True)
    else:
        os.close(reading)
    if collector == "full-disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    assert fetch(hub, tmp_path, **{stream: writing}).wait(60.0) == 0  # type: ignore[arg-type]
    assert list(tmp_path.glob("models--acme--tiny/snapshots/*/model.safetensors"))


def test_a_fetch_says_what_it_did_and_last_why_it_failed(hub: Hub, tmp_path: Path):
    Slow.go_on.set()
    told = fetch(hub, tmp_path, subprocess.PIPE, subprocess.PIPE).communicate(timeout=60.0)[0].decode().splitlines()
    assert told[0] == "fetching hf://acme/tiny"
    assert told[-1].startswith(f"hf://acme/tiny is at {tmp_path}")
    hub.repositories = {}
    _, words = fetch(hub, tmp_path / "other", subprocess.PIPE, subprocess.PIPE).communicate(timeout=60.0)
    assert words.decode().splitlines()[-1].startswith("BadModel: hf://acme/tiny: the hub answered: 404")


@pytest.mark.parametrize("kind", [Slow, SlowXet])
def test_a_worker_that_downloads_ends_when_it_is_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[HubHandler]
):
    """It loaded what it had begun to its end first, which nobody needed any more, and kept its GPUs until it was killed."""
    hub.RequestHandlerClass = kind
    for name, value in {"HF_ENDPOINT": address(hub), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = preparing(tmp_path, port, model="hf://acme/tiny")
    try:
        begun(tmp_path)
        worker.terminate()
        assert worker.wait(15.0) == 0
    finally:
        worker.kill()
        worker.wait()


def test_on_a_full_disk_a_model_that_is_there_is_enough(tmp_path: Path):
    """Of a cache that something else had filled, or whose marks an older worker wrote: when others filled the node's disk no
    worker started again, for a mark of some bytes."""
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_bytes(FILES["config.json"])
    (tmp_path / "mark.part").symlink_to("/dev/full")
    _check_whole("hf://acme/tiny", folder, ["config.json"], tmp_path / "mark.files")
    _compare("hf://acme/tiny", folder, tmp_path / "mark.compared")
    assert not list(tmp_path.glob("mark.[fc]*")), "it looks again at the next start"


@pytest.mark.parametrize("before", ["compared", "by-an-older-worker"])
def test_a_file_that_was_cut_after_it_was_compared_is_fetched_again(hub: Hub, tmp_path: Path, before: str):
    """A node that lost its power before the file's end was on the disk, but after the mark: its engine refused the file at each
    start, and nobody fetched it again until somebody removed it by hand."""
    Slow.go_on.set()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    for sizes in (tmp_path / ".inferencefleet").glob("*.sizes") if before != "compared" else ():
        sizes.unlink()
        assert fetch(hub, tmp_path).wait(60.0) == 0
    (blob,) = (path.resolve() for path in tmp_path.glob("models--acme--tiny/snapshots/*/model.safetensors"))
    os.truncate(blob, len(WEIGHTS) // 2)
    assert fetch(hub, tmp_path).wait(60.0) == 2
    assert not blob.exists()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    assert blob.read_bytes() == WEIGHTS


def kept_in_one_place(cache: Path) -> Path:
    """As huggingface_hub has it since 2.4 for whatever comes by Xet, which is all of huggingface.co: the file lies in a store of
    the whole cache, under Xet's hash, and the repository's blob, called by its sha256, is a link to it."""
    (blob,) = (path.resolve() for path in cache.glob("models--acme--tiny/snapshots/*/model.safetensors"))
    store = cache / "blobs" / "ab" / ("ab" * 32)
    store.parent.mkdir(parents=True)
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    blob.rename(store)
    blob.symlink_to(os.path.relpath(store, blob.parent))
    for mark in (cache / ".inferencefleet").glob("*.compared"):
        mark.unlink()
    return store


@pytest.mark.parametrize("is_right", [True, False])
def test_what_lies_in_the_librarys_store_is_compared_by_the_hash_that_the_hub_named(hub: Hub, tmp_path: Path, is_right: bool):
    """Xet's hash was taken for a sha256: no model of huggingface.co was right, and each start removed and fetched it again."""
    Slow.go_on.set()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    store = kept_in_one_place(tmp_path)
    if not is_right:
        store.write_bytes(b"W" + WEIGHTS[1:])
    hub.sent.clear()
    assert fetch(hub, tmp_path).wait(60.0) == (0 if is_right else 2)
    assert (hub.sent, store.exists()) == ([], is_right), "wrong bytes go, or the library would link to them once more"
    assert fetch(hub, tmp_path).wait(60.0) == 0
    assert hub.sent == ([] if is_right else ["model.safetensors"])


def test_what_really_comes_by_xet_is_compared_and_kept(hub: Hub, tmp_path: Path):
    """By hf_xet itself, from the hub's first word to the library's store."""
    hub.RequestHandlerClass = XetHandler
    hub.lies.add("model.safetensors")
    assert fetch(hub, tmp_path).wait(60.0) == 2, "other bytes than the hub's hash"
    hub.lies.clear()
    hub.sent.clear()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    assert hub.sent == ["model.safetensors"]
    (weights,) = tmp_path.glob("models--acme--tiny/snapshots/*/model.safetensors")
    assert (weights.read_bytes(), weights.resolve().name) == (WEIGHTS, xet_hash(WEIGHTS))
    hub.sent.clear()
    assert fetch(hub, tmp_path).wait(60.0) == 0
    assert hub.sent == []


def test_where_a_mirror_alone_is_reached_files_come_by_it_when_xet_is_off(hub: Hub, tmp_path: Path):
    """What README says to set."""
    hub.RequestHandlerClass = LostXet
    assert fetch(hub, tmp_path, HF_HUB_DISABLE_XET="1").wait(60.0) == 0
    (weights,) = tmp_path.glob("models--acme--tiny/snapshots/*/model.safetensors")
    assert weights.read_bytes() == WEIGHTS
