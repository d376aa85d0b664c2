"""What of a worker's head the client gets."""

from __future__ import annotations

from fleet_router import heads


def test_hop_headers_end_here_however_they_are_written_and_all_others_go_on():
    lines: list[bytes] = []
    fields = [(b"Connection", b"close"), (b"content-type", b"text/plain"), (b"X-Mine", b"1"), (b"DATE", b"today")]
    for _ in range(2):  # the second time from what is remembered
        lines.clear()
        heads.add_kept(lines, fields)
        assert b"".join(lines) == b"\r\ncontent-type: text/plain\r\nX-Mine: 1"


def test_names_that_are_remembered_are_bounded():
    for number in range(2 * heads.NAMES_MOST):
        heads.add_kept([], [(b"x-%d" % number, b"")])
    assert len(heads._BEFORE) <= heads.NAMES_MOST
    lines: list[bytes] = []
    heads.add_kept(lines, [(b"x-never-seen", b"v"), (b"Keep-Alive", b"5")])
    assert b"".join(lines) == b"\r\nx-never-seen: v"
