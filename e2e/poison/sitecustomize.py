"""In a worker's PYTHONPATH: a torch engine that can be told to hand no KV to anybody, while it answers and is ready.

Python imports this by itself before anything else. POISON_DIR: a folder; a pod whose uid is a file's name there says of each
lease that it does not hold, after greetings as friendly as ever.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

OWNER = "fleet_worker.transfer.owner"


class _Poison(MetaPathFinder):
    """Finds the owner's half of a hand-off once, as everybody does, and has it refuse."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != OWNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            poison(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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


if "POISON_DIR" in os.environ:
    sys.meta_path.insert(0, _Poison())
