"""Readers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.fleet_worker.transfer.reading import Kept, Rig


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = Kept()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def rig(context: zmq.Context[zmq.Socket[bytes]]) -> Rig:
    return Rig(context)
