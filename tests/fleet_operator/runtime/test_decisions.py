"""Tables for the runtime's pure decisions."""

from dataclasses import replace

import pytest

from fleet_operator.runtime.decisions import (
    ProbeRow,
    ProbeSpec,
    exit_of,
    quick_exits_after,
    restart_delay_s,
    should_restart,
)
from fleet_operator.runtime.settings import RuntimeSettings

SETTINGS = RuntimeSettings(restart_base_s=1, restart_cap_s=60, restart_reset_s=300)


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ("", "undecided"),
        ("-", "undecided"),
        ("--", "undecided"),
        ("---", "failure"),
        ("+", "undecided"),
        ("++", "success"),
        ("+-+", "undecided"),
        ("++--", "success"),
        ("++---", "failure"),
        ("---+", "failure"),
        ("---++", "success"),
        ("--+--", "undecided"),
    ],
)
def test_a_verdict_changes_only_at_its_threshold(results, verdict):
    row = ProbeRow(ProbeSpec(success_threshold=2, failure_threshold=3))
    for result in results:
        row = row.after(result == "+")
    assert row.verdict == verdict


def test_probe_defaults_are_the_apis():
    assert ProbeSpec.parse({"httpGet": {"port": 1}}) == ProbeSpec(0, 10, 1, 1, 3)
    given = {"initialDelaySeconds": 2, "periodSeconds": 1, "timeoutSeconds": 5, "successThreshold": 2, "failureThreshold": 9}
    assert ProbeSpec.parse(given) == ProbeSpec(2, 1, 5, 2, 9)
    assert ProbeSpec.parse({**given, "terminationGracePeriodSeconds": 60}) == ProbeSpec(2, 1, 5, 2, 9, 60)


@pytest.mark.parametrize(
    ("policy", "code", "restarts"),
    [("Always", 0, True), ("Always", 1, True), ("OnFailure", 0, False), ("OnFailure", 2, True), ("Never", 1, False)],
)
def test_restart_policy(policy, code, restarts):
    assert should_restart(policy, code) is restarts


@pytest.mark.parametrize(("quick", "delay"), [(0, 0), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10_000, 60)])
def test_back_off_doubles_to_its_cap(quick, delay):
    assert restart_delay_s(quick, SETTINGS) == delay


def test_a_long_run_forgives_the_quick_exits_before_it():
    assert quick_exits_after(5, 299, SETTINGS) == 6
    assert quick_exits_after(5, 300, SETTINGS) == 1


@pytest.mark.parametrize(("returncode", "shown"), [(0, (0, None)), (2, (2, None)), (-9, (137, 9)), (-15, (143, 15))])
def test_exit_codes_as_kubernetes_shows_them(returncode, shown):
    assert exit_of(returncode) == shown


def test_settings_are_frozen():
    assert replace(SETTINGS, restart_cap_s=2).restart_cap_s == 2
    with pytest.raises(AttributeError):
        SETTINGS.restart_cap_s = 3
