"""Specs whose pods every API server refuses: said when the fleet is applied, not by pods that never come."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.compat import refusals, refusals_applied
from fleet_api.parse import parse_fleet
from fleet_api.structure import normalised
from fleet_api.validate import validate
from tests.fleet_api.bad_manifests import GOOD_CHANGES, manifest
from tests.fleet_api.unmakeable_rows import GOOD_ROWS, ROWS, UNLIMITED, UNPLACED, UNPULLED, Changes

NAMED = [*ROWS, *UNPULLED, *UNPLACED]


@pytest.mark.parametrize(("changes", "words"), NAMED, ids=[f"{number}: {words}" for number, (_, words) in enumerate(NAMED)])
def test_a_fleet_whose_pods_nobody_would_take_is_refused(changes: Changes, words: str):
    spoiled = manifest(changes)
    assert validate(spoiled) == []
    (told,) = refusals_applied(normalised(spoiled))
    assert told.startswith(words)


@pytest.mark.parametrize("changes", [row for row, _ in NAMED])
def test_an_operator_looks_after_what_is_there_already(changes: Changes):
    """A good fleet that was edited to such a revision while the webhook was away, or before it knew: the old revision serves, and
    a worker of it that was lost did not come back, because the operator refused the fleet as a whole."""
    assert refusals(normalised(manifest(changes))) == []
    parse_fleet(manifest(changes))


@pytest.mark.parametrize("changes", [*GOOD_ROWS, UNLIMITED])
def test_what_kubernetes_takes_is_not(changes: Changes):
    found = manifest(changes)
    assert validate(found) == []
    assert refusals_applied(normalised(found)) == []
    parse_fleet(found)


@pytest.mark.parametrize(("name", "changes"), GOOD_CHANGES)
def test_what_an_api_server_was_seen_to_take_is_not(name: str, changes: tuple[tuple[str, Any], ...]):
    assert refusals_applied(manifest(changes)) == []
