"""Rules of the tree that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "Makefile", "uv.lock",
    "operator", "worker", "router", "charts", "crds", "tests", "e2e",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "dill.loads", "yaml.load", "torch.load", "marshal.loads",
}  # fmt: skip
NAMED = re.compile(r"`([\w./-]+\.py)`")
OF_VLLM = {"nixl/pull_worker.py", "v1/core/sched/scheduler.py"}
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_the_top_level_holds_nothing_else():
    names = {path.relative_to(ROOT).parts[0] for path in tracked("*")}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("folder", ["operator", "tests/fleet_operator", "tests"])
def test_folders_that_would_shadow_a_module_have_no_init(folder: str):
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_standard_operator_module_survives_the_repository_root():
    done = subprocess.run(
        [sys.executable, "-c", "import operator, dataclasses; print(operator.add(1, 2))"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize("folder", ["operator", "worker", "router", "charts", "crds", "tests", "e2e"])
def test_every_top_folder_says_what_lives_there(folder: str):
    text = (ROOT / folder / "README.md").read_text()
    assert len(text.splitlines()) >= 5


def test_texts_name_files_that_are_there():
    there = [f"/{path.relative_to(ROOT)}" for path in tracked("*.py")]
    named = {(text.relative_to(ROOT), name) for text in tracked("*.md") for name in NAMED.findall(text.read_text())}
    lost = [one for one in sorted(named) if not any(path.endswith(f"/{one[1]}") for path in there)]
    assert [one for one in lost if one[1] not in OF_VLLM] == []


def python_sources() -> list[Path]:
    return tracked("*.py")


def called_name(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
        case _:
            return ""


def test_nothing_deserialises_code():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {called_name(node)}"
        for path in python_sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and called_name(node) in FORBIDDEN_CALLS
    ]
    assert found == []


def test_functions_and_files_stay_small():
    too_long = []
    for path in python_sources():
        text = path.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
    assert too_long == []


def test_only_the_planners_eyes_read_what_a_memo_passes_over():
    """`in_order.py` takes pods that differ in these fields alone for the same ones: nobody who writes objects may read them."""
    from fleet_operator.in_order import TOLD_BY_PLAN

    readers = {
        path.relative_to(ROOT / "operator/fleet_operator").as_posix()
        for path in tracked("operator/fleet_operator/*.py")
        if any(name in path.read_text() for name in TOLD_BY_PLAN)
    }
    assert readers == {"in_order.py", "observe.py", "runtime/pod.py", "runtime/status.py"}  # runtime: pods that we play ourselves
