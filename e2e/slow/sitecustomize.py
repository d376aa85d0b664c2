"""In a worker's PYTHONPATH: the torch engine of a version that is slow.

Python imports this by itself before anything else. SLOW_S: seconds that each step takes longer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE = "fleet_worker.engine.core"


class _Slow(MetaPathFinder):
    """Finds the engine once, as everybody does, and has it sleep."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            slow_down(module.EngineCore)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def slow_down(engine: Any) -> None:
    """Each step takes longer."""
    compute = engine._compute

    def slowly(self: Any, work: list[Any]) -> Any:
        time.sleep(float(os.environ["SLOW_S"]))
        return compute(self, work)

    engine._compute = slowly


if "SLOW_S" in os.environ:
    sys.meta_path.insert(0, _Slow())
