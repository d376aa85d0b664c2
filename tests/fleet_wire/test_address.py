"""Host and port as URLs have them, for both IP families."""

import pytest

from fleet_wire.address import authority, in_url

ROWS = [
    ("10.0.0.7", "10.0.0.7", "10.0.0.7:8000"),
    ("engine.default.svc", "engine.default.svc", "engine.default.svc:8000"),
    ("fd00::7", "[fd00::7]", "[fd00::7]:8000"),
    ("::ffff:10.0.0.7", "[::ffff:10.0.0.7]", "[::ffff:10.0.0.7]:8000"),
    ("[fd00::7]", "[fd00::7]", "[fd00::7]:8000"),
]


@pytest.mark.parametrize(("host", "url", "whole"), ROWS)
def test_only_an_address_with_colons_is_put_in_brackets(host: str, url: str, whole: str) -> None:
    assert (in_url(host), authority(host, 8000)) == (url, whole)
