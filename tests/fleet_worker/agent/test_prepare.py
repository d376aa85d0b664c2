"""A model source becomes a folder, or an error that names the cause. hf:// is fetched from a hub on this machine."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.hub import _check_whole, _in_short, split_source
from fleet_worker.agent.prepare import MAX_CONFIG_BYTES, check_folder, prepare_model
from tests.hub import Hub, HubHandler

COMMIT = "c" * 40
PR_CAPBSET_DROP = 24  # linux/prctl.h
CAP_DAC_OVERRIDE = 1  # linux/capability.h
FILES = {
    "config.json": b'{"architectures":["LlamaForCausalLM"]}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"raise SystemExit",
    "training/optimizer.pt": b"another pickle",
    "original/model.safetensors": b"the same weights, as their makers have them",
}
PREPARE = """
import sys
from fleet_worker.agent.errors import ModelError
from fleet_worker.agent.prepare import prepare_model
try:
    print(prepare_model(sys.argv[1], lambda _: None))
except ModelError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub({"acme/tiny": FILES}, COMMIT)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def prepare(source: str, port: int, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its environment when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "FLEET_MODEL_CACHE": str(cache), "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", PREPARE, source], env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("source", ["hf://acme/tiny", "hf://acme/tiny@v2"])
def test_a_repository_is_fetched_without_pickles_or_code(hub: Hub, tmp_path: Path, source: str):
    done = prepare(source, hub.server_address[1], tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_second_start_fetches_nothing_again(hub: Hub, tmp_path: Path):
    assert prepare("hf://acme/tiny", hub.server_address[1], tmp_path).returncode == 0
    hub.sent.clear()
    assert prepare("hf://acme/tiny", hub.server_address[1], tmp_path).returncode == 0
    assert hub.sent == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://acme/nobody", "hf://acme/nobody: the hub answered: 404 Client Error. Repository Not Found"),
        ("hf://acme/tiny@v9", "hf://acme/tiny@v9: the hub answered: 404 Client Error. Revision Not Found"),
        ("hf://a/b/c", "hf://a/b/c: not a repository name"),
    ],
    ids=["unknown-repository", "unknown-revision", "no-name"],
)
def test_the_hubs_refusal_is_named(hub: Hub, tmp_path: Path, source: str, words: str):
    done = prepare(source, hub.server_address[1], tmp_path)
    assert done.returncode == 1
    assert words in done.stderr


def test_a_hub_that_is_away_is_named(hub: Hub, tmp_path: Path):
    done = prepare("hf://acme/tiny", 1, tmp_path)
    assert done.returncode == 1
    assert "hf://acme/tiny: the hub cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "does not exist"),
        ({}, "holds no config.json"),
        ({"config.json": b"{"}, "is not valid JSON"),
        ({"config.json": b"[]"}, "names no architectures"),
        ({"config.json": b" " * (MAX_CONFIG_BYTES + 1)}, f"is larger than {MAX_CONFIG_BYTES} bytes"),
        ({"config.json": FILES["config.json"], "model.bin": b""}, "holds no *.safetensors file"),
        ({"config.json": b"[" * 100_000}, "is not valid JSON"),
        ({"config.json": b'{"a":"\xff"}'}, "is not valid JSON"),
    ],
    ids=["missing", "empty", "no-json", "no-object", "huge", "pickles-only", "deep", "no-utf-8"],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, files: dict[str, bytes] | None, words: str):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match="model") as caught:
        prepare_model(str(folder), lambda _: None)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["link-to-nowhere", "link-to-itself", "folder", "pipe"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_lies_in_a_files_place_is_named(tmp_path: Path, name: str, kind: str):
    """It ended the worker with a traceback."""
    for file in {"config.json", "model.safetensors"} - {name}:
        (tmp_path / file).write_bytes(FILES[file])
    if kind == "folder":
        (tmp_path / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
        threading.Timer(0.5, lambda: os.close(os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK))).start()
    else:
        (tmp_path / name).symlink_to("nowhere" if kind == "link-to-nowhere" else name)
    with pytest.raises(ModelError, match=f"{name} is not a file" if kind in ("folder", "pipe") else name):
        check_folder(tmp_path)


def test_a_path_with_a_null_byte_is_named():
    with pytest.raises(ModelError, match="null byte"):
        prepare_model("/models/a\0b", lambda _: None)


@pytest.mark.parametrize("left", [b"", b"[", b"\xff", b"{}", b"[1]"])
def test_a_list_of_files_that_a_broken_disk_left_says_nothing(tmp_path: Path, left: bytes):
    """It ended each start of the worker with a traceback."""
    mark = tmp_path / "mark.files"
    mark.write_bytes(left)
    with pytest.raises(ModelError, match="was never fetched whole"):
        _check_whole("hf://acme/tiny", tmp_path, None, mark)
    (tmp_path / "config.json").write_bytes(b"{}")
    _check_whole("hf://acme/tiny", tmp_path, ["config.json"], mark)
    _check_whole("hf://acme/tiny", tmp_path, None, mark)


@pytest.mark.parametrize(
    ("source", "split"),
    [("hf://a/b", ("a/b", None)), ("hf://a/b@main", ("a/b", "main")), ("hf://a/b@refs/pr/1", ("a/b", "refs/pr/1"))],
)
def test_split_source(source: str, split: tuple[str, str | None]):
    assert split_source(source) == split


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not read")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_the_worker_may_not_read_is_said_to_be_not_readable(name: str):
    """Not that it does not exist: safetensors says that of whatever it cannot open."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        folder = Path(made)
        folder.chmod(0o755)
        as_another_user(folder, name)


def as_another_user(folder: Path, name: str) -> None:
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes(FILES[file])
    check_folder(folder)  # what it imports is loaded while this user may read it
    (folder / name).chmod(0o600)
    os.seteuid(65532)
    try:
        with pytest.raises(ModelError, match=f"{name} is not readable by user"):
            check_folder(folder)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/models/hf/blob.incomplete"), "/models/hf/blob.incomplete"),
        (RuntimeError("Task error: File reconstruction error: IO Error: No space left on device (os error 28)"), None),
    ],
    ids=["http", "xet"],
)
def test_a_disk_that_fills_up_on_the_way_is_not_called_an_absent_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str | None
):
    """Of Xet's storage, which has all of huggingface.co's large files, the hub was said to answer as none does."""

    def downloads(*_: object, dry_run: bool = False, **__: object) -> list[object]:
        if dry_run:
            return [SimpleNamespace(commit_hash="c" * 40, filename="config.json", file_size=1, will_download=True)]
        raise error

    monkeypatch.setenv("FLEET_MODEL_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", downloads)
    with pytest.raises(ModelError) as caught:
        prepare_model("hf://acme/tiny", lambda _: None)
    assert str(caught.value) == f"hf://acme/tiny: model cache {place or tmp_path}: No space left on device"


def test_a_cache_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Incident: a cache that was mounted read-only ended the worker with a traceback."""
    (tmp_path / "cache").write_bytes(b"no folder")
    monkeypatch.setenv("FLEET_MODEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"hf://acme/tiny: model cache \S+: (Not a directory|File exists)"):
        prepare_model("hf://acme/tiny", lambda _: None)


# -- the cache --------------------------------------------------------------------------------------------------------------
def fetch(
    port: int, cache: Path, source: str = "hf://acme/tiny", before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    """`fleet-worker fetch`, as a prefetch pod runs it; `before` runs in the child, before the command."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "FLEET_MODEL_CACHE": str(cache), "HF_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-m", "fleet_worker", "fetch"], env={**env, "FLEET_FETCH": source}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=before,  # noqa: PLW1509 - two prctl calls
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def test_two_that_meet_fetch_once(hub: Hub, tmp_path: Path):
    both = [fetch(hub.server_address[1], tmp_path) for _ in range(2)]
    assert [ended(process)[0] for process in both] == [0, 0]
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_wrong_bytes_are_found_removed_and_fetched_again(hub: Hub, tmp_path: Path):
    hub.lies.add("model.safetensors")
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert code == 2
    assert "BadModel: hf://acme/tiny: model.safetensors has other bytes than the hub's hash" in words
    hub.lies.clear()
    assert ended(fetch(hub.server_address[1], tmp_path))[0] == 0
    assert hub.sent.count("model.safetensors") == 2


@pytest.mark.parametrize("wrong", ["model.safetensors", "fp16/model.safetensors"])
def test_files_of_one_name_in_two_folders_are_both_compared(hub: Hub, tmp_path: Path, wrong: str):
    """Of two with one name the last that was found was compared, and the mark said that all were right."""
    hub.repositories = {"acme/tiny": {**FILES, "fp16/model.safetensors": b"others"}}
    hub.lies.add(wrong)
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert code == 2
    assert f"BadModel: hf://acme/tiny: {wrong} has other bytes than the hub's hash" in words


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(hub: Hub, tmp_path: Path):
    hub.sizes["model.safetensors"] = 2**60
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert code == 2
    assert "the disk is too small" in words
    assert hub.sent == []


def test_without_the_hub_what_is_there_is_enough(hub: Hub, tmp_path: Path):
    assert ended(fetch(hub.server_address[1], tmp_path))[0] == 0
    assert ended(fetch(1, tmp_path))[0] == 0


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_without_the_hub_a_part_of_a_model_is_refused(hub: Hub, tmp_path: Path, missing: str):
    """Incident: a download that was cut, then a hub that was away: the part was served, and even marked as compared."""
    port = hub.server_address[1]
    hub.lies.add(missing)
    hub.repositories = {"acme/tiny": {name: body for name, body in FILES.items() if name != missing}}
    assert ended(fetch(port, tmp_path))[0] == (0 if missing == "tokenizer.json" else 2)
    for list_of_files in [*(tmp_path / ".inferencefleet").glob("*.files"), *tmp_path.glob("models--*/trees")]:
        shutil.rmtree(list_of_files, ignore_errors=True) if list_of_files.is_dir() else list_of_files.unlink()
    code, words = ended(fetch(1, tmp_path))
    assert code == 2
    assert "the hub cannot be reached, and" in words
    assert "was never fetched whole" in words


def test_without_the_hub_a_file_that_went_missing_is_named(hub: Hub, tmp_path: Path):
    assert ended(fetch(hub.server_address[1], tmp_path))[0] == 0
    (lost,) = tmp_path.glob("models--acme--tiny/snapshots/*/tokenizer.json")
    lost.unlink()
    code, words = ended(fetch(1, tmp_path))
    assert code == 2
    assert "tokenizer.json" in words


def test_a_list_of_files_belongs_to_its_commit(hub: Hub, tmp_path: Path):
    """A branch that moved, and a download of its new commit that was cut: the old commit's list says nothing of it."""
    port = hub.server_address[1]
    assert ended(fetch(port, tmp_path))[0] == 0
    hub.commit = "d" * 40
    hub.lies.add("model.safetensors")
    hub.repositories = {"acme/tiny": {**FILES, "model.safetensors": b"other weights", "extra.json": b"{}"}}
    assert ended(fetch(port, tmp_path))[0] == 2
    assert ended(fetch(1, tmp_path))[0] == 2
    hub.lies.clear()
    assert ended(fetch(port, tmp_path))[0] == 0
    assert ended(fetch(1, tmp_path))[0] == 0


def test_only_a_hub_source_can_be_fetched(tmp_path: Path):
    code, words = ended(fetch(1, tmp_path, "file:///etc"))
    assert (code, "FLEET_FETCH is 'file:///etc'" in words) == (2, True)


def no_override() -> None:
    """From the next program on, modes bind root too (CAP_DAC_OVERRIDE leaves the bounding set, capabilities(7)).

    Not another user: incident, a machine whose Python lies below /root, which nobody else may run.
    """
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Path]:
    """A cache that `read_only` may close, and that is open again when pytest removes it."""
    cache = tmp_path / "shown"
    cache.mkdir()
    yield cache
    close(cache, 0o755, 0o644)


def close(cache: Path, folder: int, file: int) -> None:
    for path in [cache, *cache.rglob("*")]:
        if not path.is_symlink():
            path.chmod(folder if path.is_dir() else file)


def read_only(port: int, cache: Path) -> tuple[int, str]:
    """`fleet-worker fetch` by a user who may read all of the cache, and write nothing."""
    close(cache, 0o555, 0o444)
    return ended(fetch(port, cache, before=no_override))


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("hub_is_there", [True, False])
def test_a_cache_that_cannot_be_written_is_enough_when_the_whole_model_is_in_it(
    hub: Hub, shown: Path, marks: bool, hub_is_there: bool
):
    """A shared cache is mounted read-only into workers; without the hub only our own list says that it is whole."""
    port = hub.server_address[1]
    assert ended(fetch(port, shown))[0] == 0
    if not marks:
        shutil.rmtree(shown / ".inferencefleet")
    hub.sent.clear()
    code, words = read_only(port if hub_is_there else 1, shown)
    assert hub.sent == []
    assert code == (0 if marks or hub_is_there else 2), words
    if code:
        assert "was never fetched whole" in words


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("missing", f"is not writable by user {os.geteuid()}"),
        ("bytes", "has other bytes than the hub's hash"),
        ("branch", "is not writable"),
    ],
)
def test_a_cache_that_cannot_be_written_is_refused_when_it_is_not_the_model(hub: Hub, shown: Path, spoil: str, words: str):
    assert ended(fetch(hub.server_address[1], shown))[0] == 0
    (weights,) = shown.glob("models--acme--tiny/snapshots/*/model.safetensors")
    if spoil == "bytes":
        shutil.rmtree(shown / ".inferencefleet")
        weights.write_bytes(b"weighty")
    elif spoil == "missing":
        weights.resolve().unlink()
        weights.unlink()
    else:
        hub.commit = "d" * 40
        hub.repositories = {"acme/tiny": {**FILES, "model.safetensors": b"other weights"}}
    code, said = read_only(hub.server_address[1], shown)
    assert code == 2
    assert words in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "403: Cannot access http://user:s3cret@hub.lan:80/api/models/a. Ask",
            "403: Cannot access http://hub.lan:80/api/models/a. Ask",
        ),
        ("for url 'https://s3cret@hub/x'", "for url 'https://hub/x'"),
        ("at https://cdn/x?X-Amz-Signature=s3cret&b=1: 403", "at https://cdn/x?... 403"),
        ("header 'Bearer hf_s3cret'", "header 'Bearer ***'"),
        ("no secret: a?b@c", "no secret: a?b@c"),
    ],
)
def test_no_secret_of_the_way_to_the_hub_is_told(monkeypatch: pytest.MonkeyPatch, words: str, told: str):
    """Incident: a mirror's password stood in the pod's log and in its termination message, with the hub's refusal."""
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    assert _in_short(RuntimeError(words)) == told


@pytest.mark.parametrize("given", ["hf_s3cret\n", " hf_s3\r\ncret "])
def test_a_token_is_not_told_as_the_library_sends_it(monkeypatch: pytest.MonkeyPatch, given: str):
    """A Secret that was made by `echo` ends with a line's end, which the library leaves out; so the token was not found."""
    monkeypatch.setenv("HF_TOKEN", given)
    assert _in_short(RuntimeError("header 'Bearer hf_s3cret'")) == "header 'Bearer ***'"


@pytest.mark.parametrize(("source", "how"), [("hf://acme/none", ""), ("hf://acme/tiny", "cut")], ids=["refused", "cut"])
def test_a_mirrors_password_is_in_no_word(hub: Hub, tmp_path: Path, source: str, how: str):
    """Also of the library's own: it warned of each download that was cut, with its whole address. Of the hub's own storage that
    is one whose query opens the file."""
    hub.RequestHandlerClass = type("Broken", (Broken,), {"how": how})
    env = {**os.environ, "HF_ENDPOINT": f"http://user:s3cret@127.0.0.1:{hub.server_address[1]}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fleet_worker", "fetch"]
    env |= {"FLEET_FETCH": source, "FLEET_MODEL_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}  # `make test` says 1
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode, "s3cret" in said) == (2, False)
    assert ("Error while downloading from http://127.0.0.1:" in said) is (how == "cut")


class Broken(HubHandler):
    """A hub that answers as none does."""

    how = ""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.how == "cut" and self.command == "GET" and "/resolve/" in self.path:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body) + 1_000)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
            return
        if self.how in ("no-http", "gone"):
            self.wfile.write(b"garbage\r\n\r\n" if self.how == "no-http" else b"")
            self.close_connection = True
            return
        if "/tree/" in self.path and self.how == "outside":
            body = b'[{"type":"file","path":"../../../pwned.json","size":2,"oid":"x"}]'
        super().answer(status, b"<html>" if self.how == "no-json" and "/api/" in self.path else body, headers)


@pytest.mark.parametrize("how", ["no-http", "no-json", "outside", "cut", "gone"])
def test_a_hub_that_answers_as_none_does_is_named(hub: Hub, tmp_path: Path, how: str):
    """Incident: a connection that was cut in the middle of a file ended the worker with a traceback."""
    hub.RequestHandlerClass = type("Broken", (Broken,), {"how": how})
    code, words = ended(fetch(hub.server_address[1], tmp_path))
    assert code == 2
    assert "BadModel: hf://acme/tiny: the hub did not answer as one does: " in words
    assert "Traceback" not in words


@pytest.mark.parametrize("how", ["no-http", "no-json", "gone"])
def test_a_hub_that_answers_as_none_does_is_away(hub: Hub, tmp_path: Path, how: str):
    """What stands before a mirror that is away takes a connection and ends it: workers did not start again although all of the
    model was in the cache."""
    port = hub.server_address[1]
    assert ended(fetch(port, tmp_path))[0] == 0
    hub.RequestHandlerClass = type("Broken", (Broken,), {"how": how})
    code, words = ended(fetch(port, tmp_path))
    assert code == 0, words
