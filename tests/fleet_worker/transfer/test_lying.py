"""Owners of KV that lie, over real NIXL: a named error each, no block is lost, no other byte of ours is written, and the next
honest owner is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import Confirm, Granted, Hello, Message, Refused, Renew, Welcome
from tests.fleet_worker.transfer.test_nixl import BLOCK_BYTES, Side, error_reason, wait

Lie = Callable[[Message, Any], Any]
"""Of the question and the honest answer: what is said instead; None: nothing."""


@pytest.fixture(scope="module")
def reader() -> Iterator[Side]:
    made = Side("127.77.6.2")
    yield made
    made.connector.close()


@pytest.fixture
def owner() -> Iterator[Side]:
    made = Side("127.77.6.1", lease_s=1.0)
    yield made
    made.connector.close()


def to(kind: type[Message], make: Callable[[Any, Any], Any]) -> Lie:
    return lambda asked, honest: make(asked, honest) if isinstance(asked, kind) else honest


def welcomed(**change: Any) -> Lie:
    return to(Hello, lambda _, honest: msgspec.structs.replace(honest, **change))


def shifted(by: int) -> Lie:
    return to(Hello, lambda _, honest: msgspec.structs.replace(honest, base_address=honest.base_address + by))


LIES: dict[str, tuple[Lie, set[str]]] = {
    "another-block-size": (welcomed(block_bytes=BLOCK_BYTES * 2), {"layout"}),
    "fewer-blocks": (welcomed(num_blocks=2), {"range"}),
    "no-blocks": (welcomed(num_blocks=0), {"range"}),
    "blocks-below-none": (welcomed(num_blocks=-5), {"range"}),
    "memory-a-block-further": (shifted(BLOCK_BYTES), {"digest"}),
    "memory-a-byte-further": (shifted(1), {"digest"}),
    "memory-behind-the-pool": (shifted(BLOCK_BYTES * 64), {"read", "digest"}),
    "memory-at-zero": (welcomed(base_address=0), {"read", "digest"}),
    "memory-below-zero": (welcomed(base_address=-BLOCK_BYTES), {"read"}),
    "memory-beyond-64-bits": (welcomed(base_address=2**64 - 1), {"read"}),
    "another-name": (welcomed(engine_id="somebody"), {"peer"}),
    "another-life": (welcomed(epoch="before"), {"epoch"}),
    "no-agent": (welcomed(agent=b""), {"peer"}),
    "rubbish-for-an-agent": (welcomed(agent=b"\xff" * 500), {"peer"}),
    "half-an-agent": (to(Hello, lambda _, honest: msgspec.structs.replace(honest, agent=honest.agent[:40])), {"peer"}),
    "refuses": (to(Hello, lambda asked, _: Refused(call=asked.call, reason="because", message="x" * 10_000)), {"because"}),
    "grants-a-greeting": (to(Hello, lambda asked, _: Granted(call=asked.call)), {"peer"}),
    "no-greeting": (to(Hello, lambda *_: None), {"timeout"}),
    "an-answer-to-nobody": (to(Hello, lambda asked, honest: msgspec.structs.replace(honest, call=asked.call + 999)), {"timeout"}),
    "no-confirmation": (to(Confirm, lambda *_: None), {"timeout"}),
    "welcome-for-a-confirmation": (
        to(Confirm, lambda asked, _: Welcome(call=asked.call, engine_id="e", epoch="e", agent=b"", base_address=0, block_bytes=1,
                                             num_blocks=1)), {"peer"}),
    "lease-is-gone": (to(Confirm, lambda asked, _: Refused(call=asked.call, reason="expired")), {"lease-expired"}),
    "a-question-for-an-answer": (to(Confirm, lambda asked, _: asked), {"timeout"}),
    "no-renewals": (to(Renew, lambda asked, _: Refused(call=asked.call, reason="unknown")), {""}),
    "welcome-for-renewals": (
        to(Renew, lambda asked, _: Welcome(call=asked.call, engine_id="e", epoch="e", agent=b"", base_address=0, block_bytes=1,
                                           num_blocks=1)), {""}),
}  # fmt: skip


class SilenceError(Exception):
    """Nothing is answered."""


@pytest.mark.parametrize(("lie", "reasons"), LIES.values(), ids=LIES)
def test_an_owner_that_lies_fails_its_own_pull_by_name(
    owner: Side, reader: Side, monkeypatch: pytest.MonkeyPatch, lie: Lie, reasons: set[str]
):
    honest = owner.connector._owner.reply

    def said(asked: Message, now: float) -> Any:
        told = lie(asked, honest(asked, now))
        if told is None:
            raise SilenceError
        return told

    monkeypatch.setattr(owner.connector._owner, "reply", said)
    before, reference = reader.memory.clone(), owner.grant("r", [3, 4, 9], 48)
    reader.connector.fetch("r", reference, 0, [10, 11, 20])
    result = reader.finished()
    found = error_reason(result) if result.error is not None else ""
    assert found in reasons, result
    assert not result.lingers
    mine = torch.ones(len(before), dtype=torch.bool)
    mine[[10, 11, 20]] = False
    assert torch.equal(reader.memory[mine], before[mine])
    if not found:
        assert torch.equal(reader.memory[[10, 11, 20]], owner.memory[[3, 4, 9]])
    assert wait(owner.connector.released, 5.0)[0][0] == "r"  # read, or at its end: never kept
    assert owner.connector.open_leases() == 0
    read_honestly(reader)


def read_honestly(reader: Side) -> None:
    """The next owner, at the same address as every one before: a life of its own each."""
    other = Side("127.77.6.3")
    try:
        reader.connector.fetch("next", other.grant("next", [5], 16), 0, [30])
        assert reader.finished().error is None
        assert torch.equal(reader.memory[30], other.memory[5])
    finally:
        other.connector.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_block_ids": (3, 4, 5)}, "digest"),
        ({"remote_block_ids": (4, 3, 9)}, "digest"),
        ({"remote_block_ids": (3, 3, 3)}, "digest"),
        ({"remote_block_ids": (3, 4, -1)}, "range"),
        ({"remote_block_ids": (3, 4, 2**62)}, "range"),
        ({"digest": "0" * 48}, "digest"),
    ],
    ids=["another-block", "another-order", "one-thrice", "below-none", "beyond-all", "another-digest"],
)
def test_a_reference_that_lies_of_its_blocks_is_no_success(owner: Side, reader: Side, change: dict[str, Any], reason: str):
    reference: KvReference = msgspec.structs.replace(owner.grant("r", [3, 4, 9], 48), **change)
    reader.connector.fetch("r", reference, 0, [10, 11, 20])
    assert error_reason(reader.finished()) == reason
    assert wait(owner.connector.released, 5.0)[0][0] == "r"
    assert owner.connector.open_leases() == 0


@pytest.mark.parametrize(
    "change", [{"remote_block_ids": (3, 4)}, {"remote_block_ids": (3, 4, 9, 10)}, {"digest": "0" * 47}, {"digest": ""}],
    ids=["fewer", "more", "cut-digest", "no-digest"],
)  # fmt: skip
def test_a_reference_whose_counts_do_not_fit_is_refused_at_once(owner: Side, reader: Side, change: dict[str, Any]):
    reference = msgspec.structs.replace(owner.grant("r", [3, 4, 9], 48), **change)
    with pytest.raises(Exception, match="do not fit each other"):
        reader.connector.fetch("r", reference, 0, [10, 11, 20])
    assert owner.connector.release(reference.lease_id)
