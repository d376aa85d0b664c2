"""The owner's half of a hand-off: what it answers, and for how long it drives UCX."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet_wire.sidechannel import (
    PROTOCOL_VERSION,
    PROVEN_VERSION,
    Confirm,
    Granted,
    Hello,
    Message,
    Prove,
    Refused,
    Renew,
)
from fleet_worker.transfer.handoff import Handoff
from fleet_worker.transfer.owner import SERVING_WINDOW_S, Owner
from tests.fleet_worker.transfer.reading import KEYLESS, POOL, SETTINGS


def test_after_the_last_read_the_owner_drives_no_longer():
    owner = Owner(SETTINGS, POOL, "engine", b"", KEYLESS)
    one, two = (owner.grant(name, [3], 16) for name in "ab")
    now = time.monotonic()
    names = [{"lease_id": ref.lease_id, "epoch": ref.remote_epoch, "generation": ref.lease_generation} for ref in (one, two)]
    assert owner.reply(Renew(call=1, **names[0]), now) == Granted(call=1)  # type: ignore[arg-type]
    assert owner.reply(Confirm(call=2, **names[0]), now) == Granted(call=2)  # type: ignore[arg-type]
    assert owner.serve_until == now + SERVING_WINDOW_S
    assert owner.reply(Confirm(call=3, **names[1]), now) == Granted(call=3)  # type: ignore[arg-type]
    assert owner.serve_until == 0.0


def test_an_owner_drives_for_nobody_that_it_does_not_welcome(tmp_path: Path):
    """One Hello or Renew a second of a stranger kept a whole core busy, for over TCP the owner spins after a reader's word."""
    key = tmp_path / "key"
    key.write_text("k" * 64 + "\n")
    owner = Owner(SETTINGS, POOL, "engine", b"", Handoff(key, "ns/f", is_required=True))
    reference = owner.grant("r", [3], 16)
    about: dict[str, Any] = {"compat": "same", "block_bytes": POOL.block_bytes, "block_tokens": POOL.block_tokens}
    lease: dict[str, Any] = {"lease_id": reference.lease_id, "generation": reference.lease_generation}
    for asked in (
        Hello(call=1, version=PROTOCOL_VERSION, **about),
        Hello(call=1, version=PROVEN_VERSION, **about),
        Prove(call=1, version=PROVEN_VERSION, **about, challenge=b"c", nonce=b"n"),
        Renew(call=1, **lease, epoch="guess"),
        Granted(call=1),
    ):
        owner.reply(asked, 100.0)
        assert owner.serve_until == 0.0, asked
    owner.release(reference.lease_id)
    owner.reply(Renew(call=1, **lease, epoch=owner.epoch), 100.0)
    assert owner.serve_until == 100.0 + SERVING_WINDOW_S, "who reads under a lease that ended gets to its end, and is told"
    open_owner = Owner(SETTINGS, POOL, "engine", b"", KEYLESS)
    open_owner.reply(Hello(call=1, version=PROTOCOL_VERSION, **about), 100.0)
    assert open_owner.serve_until == 100.0 + SERVING_WINDOW_S


def test_an_engine_hears_of_expired_leases_though_the_transfer_thread_is_busy():
    owner = Owner(replace(SETTINGS, lease_s=-1.0), POOL, "engine", b"", KEYLESS)
    owner.grant("r", [3], 16)
    assert owner.released() == [("r", "expired")]
    assert (owner.released(), owner.open_leases()) == ([], 0)


@pytest.mark.parametrize(
    ("asked", "reason", "message"),
    [
        (Granted(call=5), "protocol", "not a question"),
        (Hello(call=5, version=PROTOCOL_VERSION, compat="same", block_bytes=4096, block_tokens=32), "incompatible",
         "block tokens: prefill has 16, decode has 32"),
        (Hello(call=5, version=PROTOCOL_VERSION, compat="other", block_bytes=1, block_tokens=16), "incompatible",
         "compatibility hash: prefill has same, decode has other, block bytes: prefill has 4096, decode has 1"),
    ],
)  # fmt: skip
def test_an_owner_says_why_it_refuses(asked: Message, reason: str, message: str):
    assert Owner(SETTINGS, POOL, "engine", b"", KEYLESS).reply(asked, 0.0) == Refused(call=5, reason=reason, message=message)
