"""Prints the CPython on this machine that runs us fastest; `make setup` makes `.venv` from it.

Interpreters differ more than versions do: one built without profile-guided and link-time optimisation (what pyenv builds unless
told otherwise) takes 1.5 times the CPU time of a distribution's for plain bytecode. A build's flags do not tell (Debian's say
nothing of its profile), so each is timed for a quarter of a second.

Stands alone: it runs before anything is installed, by whatever `python3` is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LOWEST, BELOW = (3, 11), (3, 14)  # pyproject.toml: requires-python
NAMES = ("python3", "python3.11", "python3.12", "python3.13")
SYSTEM_FOLDERS = ("/usr/local/bin", "/usr/bin")
WORTH = 0.85  # below this share of the default's time another one is taken; two alike must not change places by noise
PROBE_TIMEOUT_S = 20.0

PROBE = """
import sys, time
class Pair:
    __slots__ = ("x", "y")
    def __init__(self, x, y):
        self.x, self.y = x, y
    def plus(self, other):
        return Pair(self.x + other.x, self.y ^ other.y)
def work():
    kept, sum_ = {}, Pair(0, 1)
    for i in range(12_000):
        sum_ = sum_.plus(Pair(i, 3))
        kept[i & 255] = sum_
        head = b"content-length: %d" % i
        head.partition(b":")[2].strip()
best = 9.0
for _ in range(12):
    began = time.process_time()
    work()
    best = min(best, time.process_time() - began)
print(*sys.version_info[:2], sys.implementation.name, best)
"""


@dataclass(frozen=True)
class Interpreter:
    """A CPython that can run us, and the CPU seconds that the probe took on it."""

    path: str
    probe_s: float


def found(default: str, path: str) -> list[str]:
    """Where interpreters may be, the default first, each file once whatever links lead to it."""
    folders = [*path.split(os.pathsep), *SYSTEM_FOLDERS]
    every = [default, *(str(Path(folder) / name) for folder in folders if folder for name in NAMES)]
    once: dict[str, str] = {}
    for each in every:
        if os.access(each, os.X_OK):
            once.setdefault(str(Path(each).resolve()), each)
    return list(once.values())


def timed(path: str) -> Interpreter | None:
    """The interpreter timed; None if it is not a CPython of a version that we run on (a pyenv shim of none, for one)."""
    try:
        said = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        major, minor, name, probe_s = said.stdout.split()
        fits = name == "cpython" and LOWEST <= (int(major), int(minor)) < BELOW
        return Interpreter(path, float(probe_s)) if fits else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def chosen(fit: list[Interpreter]) -> Interpreter | None:
    """The first (the default), unless another takes clearly less time for the same work."""
    if not fit:
        return None
    best = min(fit, key=lambda each: each.probe_s)
    return best if best.probe_s < WORTH * fit[0].probe_s else fit[0]


def main() -> int:
    """Prints the path; nothing, with exit status 1, if no interpreter here can run us."""
    fit = [each for path in found(sys.executable, os.environ.get("PATH", "")) if (each := timed(path)) is not None]
    best = chosen(fit)
    if best is None:
        print("no CPython 3.11, 3.12 or 3.13 is on PATH", file=sys.stderr)
        return 1
    print(best.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
