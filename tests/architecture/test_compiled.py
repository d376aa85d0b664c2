"""What `router/compile.py` compiles keeps to what mypyc does as CPython does."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROUTER = Path(__file__).resolve().parents[2] / "router"
INTERPRETED = {"Client"}  # a Protocol
CROSS_NEVER = {
    # (module, slice): its ends cannot cross
    ("repeated", "data[self._at:end]"),  # `end` is found from `_at` on
    ("repeated", "data[self._at:body_at - len(self.after)]"),  # the head was recognised: digits stand between
    ("repeated", "message[found.end(1):end]"),  # the match ends before `end`
    ("repeated", "data[self._at:self._size]"),  # digits and what follows them stood between, in the message that was seen last
    ("inbound", "data[at:until]"),  # SLICE_BYTES later, at least
    ("longtext", "body[begin:begin + whole]"),
    ("longtext", "body[begins:start]"),  # the text was looked for from `begins` on
    ("admission/usage", "tail[at:at + USUAL_MOST_BYTES]"),
    ("admission/usage", "near[at:at + len(_TOTAL)]"),
    ("admission/usage", "near[at:at + len(_WRITTEN)]"),
    ("kvindex/pieces", "prompt[at:at + MEDIUM_BYTES]"),
    ("kvindex/pieces", "prompt[at:at + COARSE_BYTES]"),
    ("kvindex/pieces", "prompt[at:at + PIECE_BYTES]"),
    ("admission/runaway", "symbols[end - CONTEXT:end]"),  # where `end` is at least CONTEXT
}


def compiling():
    spec = importlib.util.spec_from_file_location("compiling", ROUTER / "compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = compiling().MODULES


def nodes(module: str, kind: type) -> Iterator[ast.AST]:
    tree = ast.parse((ROUTER / "fleet_router" / f"{module}.py").read_text())
    return (node for node in ast.walk(tree) if isinstance(node, kind))


@pytest.mark.parametrize("module", MODULES)
def test_class_keywords_are_not_lost(module: str):
    """mypyc does not hand them to the metaclass: `frozen=True` of a Struct would do nothing."""
    assert [node.name for node in nodes(module, ast.ClassDef) if any("Struct" in ast.unparse(base) for base in node.bases)] == []
    assert [node.name for node in nodes(module, ast.ClassDef) if node.keywords] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_dataclass_makes_a_class_anew(module: str):
    found = [ast.unparse(one) for node in nodes(module, ast.ClassDef) for one in node.decorator_list]
    assert [one for one in found if "slots" in one] == []


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_starred_into_a_superclass(module: str):
    """mypyc hands the tuple on as one argument."""
    calls = [node for node in nodes(module, ast.Call) if ast.unparse(node.func).startswith("super().")]
    assert [ast.unparse(call) for call in calls if any(isinstance(one, ast.Starred) for one in call.args)] == []


@pytest.mark.parametrize("module", MODULES)
def test_ends_of_slices_do_not_cross(module: str):
    """An empty slice of bytes whose ends cross raises SystemError."""
    slices = [node for node in nodes(module, ast.Subscript) if isinstance(node.slice, ast.Slice)]
    both = [node for node in slices if node.slice.lower and node.slice.upper]
    known = [all(isinstance(end, ast.Constant) for end in (node.slice.lower, node.slice.upper)) for node in both]
    computed = [ast.unparse(node) for node, constant in zip(both, known, strict=True) if not constant]
    assert [one for one in computed if (module, one) not in CROSS_NEVER] == []


def test_nothing_interpreted_inherits_from_what_is_compiled():
    """mypyc refuses it, and only when the class is made."""
    compiled = {f"fleet_router.{module.replace('/', '.')}" for module in MODULES}
    found = []
    for path in sorted((ROUTER / "fleet_router").rglob("*.py")):
        name = str(path.relative_to(ROUTER / "fleet_router").with_suffix(""))
        if name in MODULES:
            continue
        tree = ast.parse(path.read_text())
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in compiled)
        names = {one.asname or one.name for node in imports for one in node.names}
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        found += [f"{name}.{one.name}" for one in classes if names & {ast.unparse(base) for base in one.bases} - INTERPRETED]
    assert found == []


def test_without_a_compiler_it_says_what_is_missing(tmp_path: Path):
    """And what that means; nothing is left behind."""
    done = subprocess.run(
        [sys.executable, str(ROUTER / "compile.py")], capture_output=True, text=True, check=False, timeout=60,
        env={"PATH": str(tmp_path), "INFERENCEFLEET_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr
        == "the router is not compiled: there is no C compiler. It runs as plain Python, at more than twice the CPU time.\n"
    )
    assert list((tmp_path / "cache").rglob("*.py")) == []
