"""Taking over what was created: table of managedFields before and after."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.cluster.field_owners import taken_over


def entry(operation: str, fields: dict[str, Any], *, manager: str = "us", version: str = "v1", **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "apiVersion": version, "fieldsV1": fields, "time": "t", **more}


A, B = {"f:spec": {"f:a": {}}}, {"f:spec": {"f:b": {}, 'k:{"name":"x"}': {".": {}}}}
BOTH = {"f:spec": {"f:a": {}, "f:b": {}, 'k:{"name":"x"}': {".": {}}}}
THEIRS = entry("Update", A, manager="kubectl")
STATUS = entry("Update", B, subresource="status")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], None),
        ([entry("Apply", A), THEIRS, STATUS], None),
        ([THEIRS, entry("Update", A), STATUS], [THEIRS, STATUS, entry("Apply", A)]),
        ([entry("Update", B), THEIRS, entry("Apply", A)], [THEIRS, entry("Apply", BOTH)]),
        ([entry("Update", B, version="v2"), entry("Apply", A)], [entry("Apply", A), entry("Apply", B, version="v2")]),
        ([entry("Update", A), entry("Update", B)], [entry("Apply", BOTH)]),
    ],
    ids=["nobody", "applied", "created", "created and applied", "another version", "created and patched"],
)
def test_what_we_created_becomes_applied_and_nothing_else_changes(before, after):
    assert taken_over(before, "us") == after
