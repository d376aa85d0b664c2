"""kopf's troubles in our words."""

from __future__ import annotations

import logging

import pytest
from kopf._cogs.clients.errors import APINotFoundError

from fleet_operator.kopf_words import FINDING, REQUESTS, TASKS, in_our_words

RETRIED = "Request attempt #1/9 failed; will retry: GET https://k/apis -> APITooManyRequestsError('storage is (re)initializing')"
UNRESOLVED = "Unresolved resources cannot be served (try creating their CRDs): Selector(any_name='inferencefleets')"


@pytest.mark.parametrize(
    ("name", "words", "error", "said"),
    [
        (REQUESTS, RETRIED, None, [("WARNING", f"fleets cannot be followed at this moment: {RETRIED}")]),
        (TASKS[0], "Watcher for inferencefleets has failed: 404", APINotFoundError(None, status=404, headers={}), []),
        (TASKS[1], "Multidimensional multitasker has failed", APINotFoundError(None, status=404, headers={}), []),
        (TASKS[1], "Multidimensional multitasker has failed", KeyError("a bug"), [("ERROR", None)]),
        (FINDING, UNRESOLVED, None, []),
        (FINDING, "Non-watchable resources will not be served: x", None, [("ERROR", None)]),
    ],
)
def test_crds_that_come_while_the_operator_runs_are_no_errors(
    name: str, words: str, error: Exception | None, said: list[tuple[str, str | None]], caplog: pytest.LogCaptureFixture
):
    """Two ERROR lines with 45 lines of kopf's stack each, for CRDs that somebody applied anew."""
    in_our_words()
    logger = logging.getLogger(name)
    logger.error(words, exc_info=error)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, words if text is None else text) for level, text in said
    ]


def test_a_start_is_not_told_in_kopfs_words(caplog: pytest.LogCaptureFixture):
    in_our_words()
    with caplog.at_level(logging.INFO):
        logging.getLogger("kopf.activities.startup").info("Activity 'build_registry.<locals>.set_up' succeeded.")
    assert not caplog.records
