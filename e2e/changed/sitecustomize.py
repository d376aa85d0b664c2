"""In a process's PYTHONPATH: one thing of it is otherwise, for rows about slow or poisoned torch engines, and about days.

Python imports this by itself before anything else. Each variable that is set changes one module when it is imported:
SLOW_S, seconds that each step takes longer; POISON_DIR, a folder: a pod whose uid is a file's name there says of each lease that
it does not hold, after greetings as friendly as ever, while it answers and is ready. AHEAD_S: what the clock says of the day and
hour is so many seconds ahead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Changed(MetaPathFinder):
    """Finds one module once, as everybody does, and changes it when it was loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def slow(module: Any) -> None:
    """Each step takes longer."""
    compute = module.EngineCore._compute

    def slowly(self: Any, work: list[Any]) -> Any:
        time.sleep(float(os.environ["SLOW_S"]))
        return compute(self, work)

    module.EngineCore._compute = slowly


def poison(module: Any) -> None:
    """Whether a lease holds is answered with no while the file is there, and counted in it."""
    reply, told = module.Owner.reply, Path(os.environ["POISON_DIR"]) / os.environ.get("FLEET_POD_UID", "nobody")

    def refusing(self: Any, asked: Any, now: float) -> Any:
        if not isinstance(asked, module.Renew | module.Confirm) or not told.exists():
            return reply(self, asked, now)
        with told.open("a") as file:
            file.write(f"{type(asked).__name__}\n")
        return module.Refused(call=asked.call, reason="poisoned", message="this worker hands nothing over")

    module.Owner.reply = refusing


for variable, name, change in (
    ("SLOW_S", "fleet_worker.engine.core", slow),
    ("POISON_DIR", "fleet_worker.transfer.owner", poison),
):
    if variable in os.environ:
        sys.meta_path.insert(0, _Changed(name, change))

if "AHEAD_S" in os.environ:
    _now, _ahead_s = time.time, float(os.environ["AHEAD_S"])
    time.time = lambda: _now() + _ahead_s
