"""Compiles the router's data path with mypyc: 0.45 of the CPU time of a request, a third of that of a decision, the same source.

    python router/compile.py                  into the cache; prints the folder to put on PYTHONPATH (0 s when it is there)
    python router/compile.py --into FOLDER    the package with its extension modules into this folder (site-packages of an image)

A copy of the package is made and extension modules are put beside its files; Python prefers them. Whatever is not listed in
MODULES stays as it is: parsers of configuration, followers, everything that runs once. Needs mypy, setuptools, a C compiler and
Python's headers; without them it says so (exit status 1), and the router runs as plain Python. Status 2: mypyc failed.

What mypyc does otherwise than CPython, and the rules that follow from it (tests/architecture/test_compiled.py checks all but the
last): no msgspec.Struct in these modules (class keywords are lost), no dataclass with slots, no starred argument of
super().__init__, no slice of bytes with two computed ends (SystemError when they cross), no class elsewhere that inherits from
one of these, no recursion without a bound (there is no RecursionError).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "fleet_router"
MODULES = (
    "among", "answerhead", "answering", "ask", "carrying", "context", "costly", "desk", "encoding", "expected", "fields",
    "flood", "flow", "hedging", "hints", "inbound", "knowledge", "legs", "lengths", "longtext", "measuring", "metering",
    "metrics", "misplaced", "outbox", "paths", "receiving", "release", "repeated", "request", "retrying", "server", "shapes",
    "upstream", "waiting", "workers",
    "admission/bound", "admission/bucket", "admission/fair", "admission/gate", "admission/keys", "admission/lanes",
    "admission/quota", "admission/runaway", "admission/usage",
    "cascade/climb", "cascade/draft",
    "epp/picked",
    "explain/inference_metrics", "explain/record", "explain/recorder",
    "health/breaker", "health/budget", "health/determined", "health/inband", "health/pairs", "health/panic", "health/patience",
    "health/sent", "health/silence",
    "kvindex/approximate", "kvindex/masks", "kvindex/pieces", "kvindex/runs", "kvindex/underway",
    "policy/adapters", "policy/candidate", "policy/choose", "policy/chosen", "policy/cost", "policy/estimate", "policy/group",
    "policy/hedge", "policy/pairs", "policy/ring", "policy/routing", "policy/side", "policy/split", "policy/terms",
    "policy/tiers", "policy/trip",
)  # fmt: skip
BUILD_TIMEOUT_S = 1200
KEPT = 8
"""Compiled packages in the cache: whoever builds one removes what is older than the newest of so many."""


class CannotCompileError(Exception):
    """Something that compiling needs is not here."""


def main() -> int:
    """Prints where the compiled package is; 1 with the reason when it cannot be made here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, help="folder that gets (or has) the package; default: one in the cache")
    wanted = parser.parse_args()
    try:
        print(compiled(wanted.into) if wanted.into is not None else cached())
    except CannotCompileError as error:
        print(f"the router is not compiled: {error}. It runs as plain Python, at more than twice the CPU time.", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"mypyc cannot compile the router:\n{chr(10).join(error.output.splitlines()[-30:])}", file=sys.stderr)
        return 2
    return 0


def cached() -> Path:
    """The compiled package of exactly these sources, made once."""
    base = os.environ.get("INFERENCEFLEET_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "inferencefleet"
    folder = Path(base).expanduser() / "compiled" / key()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            compiled(Path(made) / "new")
            try:
                (Path(made) / "new").rename(folder)
            except OSError:  # another run was faster
                if not folder.is_dir():
                    raise
        for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def key() -> str:
    """Changes with whatever the result depends on."""
    sources = hashlib.sha256()
    for path in [Path(__file__), *sorted((HERE / PACKAGE).rglob("*.py"))]:
        sources.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    try:
        mypy = importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError as error:
        raise CannotCompileError("mypy is not installed") from error
    sources.update(f"{sysconfig.get_config_var('EXT_SUFFIX')} {platform.machine()} {mypy}".encode())
    return sources.hexdigest()[:20]


def compiled(folder: Path) -> Path:
    """The package with its extension modules in this folder."""
    key()
    if shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        raise CannotCompileError("there is no C compiler")
    headers = headers_folder()
    with tempfile.TemporaryDirectory() as build:
        shutil.copytree(HERE / PACKAGE, Path(build) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        environment = {**os.environ, "CPATH": os.pathsep.join(filter(None, [str(headers), os.environ.get("CPATH", "")]))}
        environment["MYPYPATH"] = os.pathsep.join([build, str(HERE.parent / "operator"), str(HERE.parent / "worker")])
        run(environment, Path(build))
        shutil.copytree(Path(build) / PACKAGE, folder / PACKAGE, dirs_exist_ok=True)
        for group in Path(build).glob("*__mypyc*"):  # what all of them share
            shutil.copy2(group, folder)
    return folder


def run(environment: dict[str, str], build: Path) -> None:
    """mypyc, in the folder that holds the copy."""
    files = [f"{PACKAGE}/{module}.py" for module in MODULES]
    options = ["--explicit-package-bases", "--namespace-packages", "--ignore-missing-imports"]
    subprocess.run(
        [sys.executable, "-m", "mypyc", *options, *files],
        cwd=build, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        timeout=BUILD_TIMEOUT_S,
    )  # fmt: skip


def headers_folder() -> Path:
    """Where Python.h is: this interpreter's, or those of another of the same minor version on PATH, whose ABI is the same."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    ask = "import sysconfig; print(sysconfig.get_paths()['include'])"
    found = [sysconfig.get_paths()["include"]]
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        other = Path(folder) / name
        if os.access(other, os.X_OK):
            said = subprocess.run([other, "-I", "-c", ask], capture_output=True, text=True, timeout=30, check=False)
            found += said.stdout.split()
    for include in found:
        if (Path(include) / "Python.h").is_file():
            return Path(include)
    raise CannotCompileError(f"Python.h of {name} is not here (Debian: apt-get install {name}-dev)")


if __name__ == "__main__":
    sys.exit(main())
