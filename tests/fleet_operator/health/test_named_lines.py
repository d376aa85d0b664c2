"""Who asks a log store for the lines of one fleet, or of one namespace, gets all of them: what words name is in the fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleet_operator

LEVELS = {"debug", "info", "warning", "error", "exception"}
NAMES = ("fleet=%s/%s", "namespace %s", "its fleet %s")
ROOT = Path(fleet_operator.__file__).parent
RUNTIME = ROOT / "runtime"
"""Of `fleet up`, whose log is text."""


def lines() -> Iterator[tuple[str, str, set[str | None]]]:
    """(place, words, names of keywords) of each line that names a fleet or a namespace."""
    for file in sorted(ROOT.rglob("*.py")):
        if RUNTIME in file.parents:
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS and call.args:
                words = ast.unparse(call.args[0])
                if any(name in words for name in NAMES):
                    yield f"{file.relative_to(ROOT)}:{call.lineno}", words, {given.arg for given in call.keywords}


@pytest.mark.parametrize(("place", "words", "given"), list(lines()))
def test_what_a_line_names_is_in_its_fields(place: str, words: str, given: set[str | None]):
    assert "extra" in given, f"{place}: {words}"


def test_they_are_found():
    assert len(list(lines())) > 15
