"""The chart's rights against what the operator writes, where no request on a real API server shows them."""

from __future__ import annotations

import pytest

from e2e.helm.chart import render
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from tests.charts.test_chart import rules


@pytest.mark.parametrize("scheduler", POD_GROUP_KINDS)
def test_the_pod_groups_of_a_scheduler_are_those_that_the_operator_writes(scheduler: str):
    """Those of `kubernetes` could have been of another group: nothing here runs with its alpha and with the chart's rights."""
    kind = POD_GROUP_KINDS[scheduler]
    (rule,) = [one for one in rules(render({"rbac": {"podGroups": [scheduler]}})) if kind.plural in one["resources"]]
    assert rule == {
        "apiGroups": [kind.api_version.partition("/")[0]], "resources": [kind.plural], "verbs": ["create", "patch", "delete"],
    }  # fmt: skip
