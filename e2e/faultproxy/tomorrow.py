"""An operator of tomorrow: today's source with other default images, other pods of workers and routers, one more field of the
API, and its CRDs.

What differs is a row of a table; a row that no longer finds its text says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.faultproxy.nursery import Nursery

ROOT = Path(__file__).resolve().parents[2]
MARK = "OF_TOMORROW"
"""A variable that only workers rendered by tomorrow's operator have."""
ENGINE = 'class EngineSpec(ApiModel):\n    """The inference engine of every worker of the fleet."""\n'
EDITS = (
    ("fleet_operator/settings.py", '"inferencefleet/worker:0.1.0"', '"inferencefleet/worker:0.2.0"'),
    ("fleet_operator/settings.py", '"inferencefleet/router:0.1.0"', '"inferencefleet/router:0.2.0"'),
    ("fleet_operator/render/fleet.py", "ROUTER_LIVENESS_FAILURES = 10", "ROUTER_LIVENESS_FAILURES = 12"),
    ("fleet_operator/render/worker.py", '{"name": "HOME",', f'{{"name": "{MARK}", "value": "1"}}, {{"name": "HOME",'),
    ("fleet_operator/render/worker.py", "GRACE_SLACK_S = 15", "GRACE_SLACK_S = 20"),
    ("fleet_operator/render/worker.py", 'failures=10)', 'failures=12)'),
    ("fleet_api/v1alpha1/model.py", ENGINE, ENGINE + '\n    tomorrow: int = Field(default=1, ge=0, le=9, description="New.")\n'),
)  # fmt: skip


@dataclass(frozen=True)
class Version:
    """Operators of one version, and its CRDs."""

    nursery: Nursery
    crds: Path


@contextmanager
def tomorrow() -> Iterator[Version]:
    """Lives while the block runs."""
    with tempfile.TemporaryDirectory(prefix="inferencefleet-tomorrow-") as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "operator", tree / "operator", ignore=shutil.ignore_patterns("__pycache__"))
        for name, old, new in EDITS:
            path = tree / "operator" / name
            text = path.read_text()
            assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times: tomorrow needs another edit"
            path.write_text(text.replace(old, new))
        (tree / "crds").mkdir()
        env = {**os.environ, "PYTHONPATH": str(tree / "operator")}
        subprocess.run([sys.executable, "-m", "fleet_api.crd"], env=env, check=True, stdout=subprocess.DEVNULL)
        with Nursery(env) as nursery:
            yield Version(nursery, tree / "crds")
