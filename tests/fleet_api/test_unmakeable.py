"""Specs whose pods every API server refuses: said when the fleet is applied, not by pods that never come."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.compat import refusals
from fleet_api.parse import ManifestError, parse_fleet
from fleet_api.structure import normalised
from fleet_api.validate import validate
from tests.fleet_api.bad_manifests import GOOD_CHANGES, manifest
from tests.fleet_api.unmakeable_rows import GOOD_ROWS, ROWS, UNLIMITED, UNPULLED, Changes

NAMED = [*ROWS, *UNPULLED]


@pytest.mark.parametrize(("changes", "words"), NAMED, ids=[f"{number}: {words}" for number, (_, words) in enumerate(NAMED)])
def test_a_fleet_whose_pods_nobody_would_take_is_refused(changes: Changes, words: str):
    spoiled = manifest(changes)
    assert validate(spoiled) == []
    (told,) = refusals(normalised(spoiled))
    assert told.startswith(words)
    with pytest.raises(ManifestError):
        parse_fleet(spoiled)


@pytest.mark.parametrize("changes", [*GOOD_ROWS, UNLIMITED])
def test_what_kubernetes_takes_is_not(changes: Changes):
    found = manifest(changes)
    assert validate(found) == []
    assert refusals(normalised(found)) == []
    parse_fleet(found)


@pytest.mark.parametrize(("name", "changes"), GOOD_CHANGES)
def test_what_an_api_server_was_seen_to_take_is_not(name: str, changes: tuple[tuple[str, Any], ...]):
    assert refusals(manifest(changes)) == []
