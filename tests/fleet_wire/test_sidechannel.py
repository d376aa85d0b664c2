"""Frames of the side channel: bounded, and whatever is no message is a bad frame."""

from __future__ import annotations

import pytest

from fleet_wire.sidechannel import MAX_MESSAGE_BYTES, BadFrameError, Confirm, Refused, decode, encode


def framed(size_bytes: int) -> bytes:
    """A message of this size."""
    found = encode(Refused(call=1, reason="r", message="x" * size_bytes))
    return encode(Refused(call=1, reason="r", message="x" * (2 * size_bytes - len(found))))


@pytest.mark.parametrize(("over", "read"), [(0, True), (1, False)])
def test_a_frame_has_a_longest_size(over: int, read: bool):
    frame = framed(MAX_MESSAGE_BYTES + over)
    assert len(frame) == MAX_MESSAGE_BYTES + over
    if read:
        assert decode(frame).call == 1
        return
    with pytest.raises(BadFrameError, match=f"{MAX_MESSAGE_BYTES + 1} bytes, at most {MAX_MESSAGE_BYTES}"):
        decode(frame)


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Confirm(call=1, lease_id="l", epoch="e", generation=2**63))[:-1]])
def test_other_bytes_are_no_message(frame: bytes):
    with pytest.raises(BadFrameError, match="cannot be read"):
        decode(frame)
