"""What of a request's head goes on to a worker through a gateway."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_router.epp.messages import BUFFERED, FULL_DUPLEX
from tests.fleet_router.rig import Rig, ask, run
from tests.fleet_router.test_picker import body_of, exchanged, head_of, known


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_a_body_that_is_read_as_json_goes_on_as_json(mode: int):
    """`curl -d` calls it a form: the router's own port reads it all the same, and vLLM refuses with 400 whatever is not called
    JSON. So it did through a gateway, after its prompt was prefilled."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.protocol_config.request_body_mode = mode
        head.request_headers.headers.headers.add(key="content-type", raw_value=b"application/x-www-form-urlencoded")
        told = await exchanged(rig, head, body_of(ask(prompt="short")))
        sent = [one for said in told for one in _headers(said)]
        assert [value for name, value in sent if name == "content-type"] == [b"application/json"]

    run(go, prefill=0)


def _headers(said: Any) -> list[tuple[str, bytes]]:
    """That are set."""
    found = getattr(said, said.WhichOneof("response")).response.header_mutation.set_headers
    return [(one.header.key, one.header.raw_value) for one in found]
