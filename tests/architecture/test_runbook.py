"""operator/RUNBOOK.md: a row for each word that somebody on call may meet, and none for a word that nothing says."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_planner.events import QUOTA
from fleet_worker.transfer.handoff import HANDOFF_REASONS
from fleet_worker.transfer.trust import REASONS as REASONS_OF_TRUST
from tests.fleet_planner import test_reasons as said

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "operator/RUNBOOK.md").read_text()
SHORT_MOST = 400
"""Characters of a row: it is read at night."""
COMPUTED = {
    ("desk.py", "code"),  # _turned_away: 429 and 529 are those of _CODES, else it is _turn_away's second argument
    ("desk.py", "over.reason"),  # what quota.py says that no retry helps
    ("draft.py", "code"),  # _hold's second argument
    ("holding.py", "why[1]"),  # _hold's second argument
    ("holding.py", "known if code == 'waking' else code"),
    ("holding.py", "code"),  # _refusal's second argument, or no_capacity
    ("translation.py", "error.code"),
}
"""Codes that are no constants where they are given, and that the functions below find."""


# -- the runbook ---------------------------------------------------------------------------------------------------------
def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named(heading: str) -> list[str]:
    return [row[0].strip("`") for row in rows(heading)]


REASONS, CODES, METRICS = "Reasons of conditions and events", "Error codes of the router", "Metrics to alert on"
QUIET = "Metrics that explain"


@pytest.mark.parametrize(("heading", "cells"), [(REASONS, 4), (CODES, 5), (METRICS, 4), (QUIET, 2)])
def test_rows_are_one_per_word_in_order_and_short(heading: str, cells: int):
    names = named(heading)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert heading == METRICS or names == sorted(names)
    assert [row[0] for row in rows(heading) if len(row) != cells or sum(map(len, row)) > SHORT_MOST] == []
    assert [row[0] for row in rows(heading) if not row[-1]] == [], "each says what to do"


# -- the operator --------------------------------------------------------------------------------------------------------
def reasons() -> set[str]:
    deeds = said.of_calls("Event", 1) - {"Workers{}d"}
    workers = {f"Workers{verb}d" for verb in ("Replace", "Create", "Delete")}
    return said.of_conditions() | said.of_calls("Problem", 0) | said.of_errors() | deeds | workers | {QUOTA}


def test_every_reason_of_the_operator_has_a_row_and_no_other():
    assert set(named(REASONS)) == reasons()


# -- the router ----------------------------------------------------------------------------------------------------------
def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""), node


def constants(node: ast.AST) -> set[str]:
    if isinstance(node, ast.IfExp):
        return constants(node.body) | constants(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def codes() -> set[str]:
    errors = ast.parse((ROOT / "router/fleet_router/errors.py").read_text())
    by_status = [node for node in errors.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_CODES"]
    found = {"error"} | {value for one in by_status if one.value for value in ast.literal_eval(one.value).values()}
    for path in sorted((ROOT / "router/fleet_router").rglob("*.py")):
        for name, call in calls(path):
            given = [keyword.value for keyword in call.keywords if keyword.arg == "code" and name == "RequestError"]
            for value in given:
                assert constants(value) or (path.name, ast.unparse(value)) in COMPUTED, f"{path.name}:{call.lineno}"
                found |= constants(value)
            if name in ("_hold", "_refusal") and path.parent.name != "kvindex":
                found |= constants(call.args[1])
            if name == "_turn_away":
                found |= constants(call.args[1])
            if path.name == "quota.py" and name == "_over" and ast.unparse(call.args[2]) == "None":
                found |= constants(call.args[0])
    return found | no_capacity()


def no_capacity() -> set[str]:
    """`what, code = ..., "..."` of holding.py."""
    tree = ast.parse((ROOT / "router/fleet_router/holding.py").read_text())
    pairs = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(what, code)"]
    found = {word for node in pairs if isinstance(node.value, ast.Tuple) for word in constants(node.value.elts[1])}
    assert found
    return found


def test_every_code_of_the_router_has_a_row_and_no_other():
    assert set(named(CODES)) == codes()


def test_every_reason_beside_a_code_is_named():
    """`rate_limit_exceeded` is a name that clients know: why is in `reason`."""
    quota = list(calls(ROOT / "router/fleet_router/admission/quota.py"))
    found = {word for name, call in quota if name == "_over" for word in constants(call.args[0])}
    assert len(found) == 4
    assert {"queue_share", *found} <= set(re.findall(r"`(\w+)`", TEXT))


# -- metrics -------------------------------------------------------------------------------------------------------------
def metrics() -> set[str]:
    """As `bare` has them."""
    found: set[str] = set()
    for package in ("router/fleet_router", "operator/fleet_operator/health", "worker/fleet_worker/agent"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(re.findall(r"\bfleet_(?:router|operator|agent)_[a-z_]*[a-z]\b", node.value))
    tree = ast.parse((ROOT / "router/fleet_router/metrics.py").read_text())
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and ast.unparse(node.target) == "(name, value)"]
    pairs = [pair for loop in loops if isinstance(loop.iter, ast.Tuple) for pair in loop.iter.elts if isinstance(pair, ast.Tuple)]
    found |= {f"fleet_router_{word}" for pair in pairs for word in constants(pair.elts[0])}
    return {bare(name) for name in found}


def of_engine() -> set[str]:
    """Metrics of the torch engine that vLLM has not, as `bare` has them."""
    text = (ROOT / "worker/fleet_worker/engine/metrics.py").read_text()
    return {bare(name) for name in re.findall(r'"(fleet:[a-z_]+)"', text)}


def bare(name: str) -> str:
    """Without what prometheus_client adds by itself."""
    return name.removesuffix("_total").removesuffix("_info")


def test_every_metric_is_in_the_runbook_once():
    alerting, quiet = ({bare(name) for name in named(heading)} for heading in (METRICS, QUIET))
    there = metrics() | of_engine()
    assert alerting <= there
    assert not alerting & quiet
    assert there - alerting == quiet


@pytest.mark.parametrize(("metric", "reasons"), [
    ("fleet:kv_seed_strangers_total", REASONS_OF_TRUST), ("fleet:kv_handoff_strangers_total", HANDOFF_REASONS),
])  # fmt: skip
def test_each_reason_that_an_alert_names_is_in_its_row(metric: str, reasons: tuple[str, ...]):
    (row,) = (row for row in rows(METRICS) if row[0] == f"`{metric}`")
    assert set(reasons) <= set(re.findall(r"`(\w+)`", " ".join(row[1:])))


def test_it_is_linked_where_reasons_are():
    for readme in ("README.md", "operator/README.md", "router/README.md"):
        assert "RUNBOOK.md" in (ROOT / readme).read_text(), readme
