"""Digests per block: whichever block arrived with other bytes is told by its place in the pull."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import pytest

from fleet_worker.transfer import proving
from fleet_worker.transfer.base import KvPool
from fleet_worker.transfer.digest import HEX_PER_BLOCK, first_mismatch, pool_digest

BLOCK_BYTES = 8
BLOCKS = [3, 0, 2]


def memory() -> memoryview:
    return memoryview(bytearray(range(4 * BLOCK_BYTES)))


def test_a_digest_is_that_of_each_block_in_order():
    found = pool_digest(memory(), BLOCK_BYTES, BLOCKS)
    assert found == "".join(pool_digest(memory(), BLOCK_BYTES, [block]) for block in BLOCKS)
    assert len(found) == len(BLOCKS) * HEX_PER_BLOCK


@pytest.mark.parametrize(
    ("flipped", "wrong"),
    [
        pytest.param([], None, id="none"),
        pytest.param([1], None, id="one that was not read"),
        pytest.param([3], 0, id="first"),
        pytest.param([0], 1, id="in the middle"),
        pytest.param([2], 2, id="last"),
        pytest.param([2, 0], 1, id="two"),
    ],
)
@pytest.mark.parametrize("byte", [0, BLOCK_BYTES - 1])
def test_the_first_block_with_other_bytes_is_found(flipped: list[int], wrong: int | None, byte: int):
    there, expected = memory(), pool_digest(memory(), BLOCK_BYTES, BLOCKS)
    for block in flipped:
        there[block * BLOCK_BYTES + byte] ^= 1
    assert first_mismatch(there, BLOCK_BYTES, BLOCKS, expected) == wrong


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + "0"], ids=["shorter", "longer"])
def test_a_digest_of_another_length_is_the_last_blocks_fault(change):
    expected = pool_digest(memory(), BLOCK_BYTES, BLOCKS)
    assert first_mismatch(memory(), BLOCK_BYTES, BLOCKS, change(expected)) == len(BLOCKS) - 1


def test_chunks_are_compared_in_their_order_and_nobody_reads_the_pool_once_the_prover_is_closed(monkeypatch: pytest.MonkeyPatch):
    begun, may_end, woken = threading.Event(), threading.Event(), list[int]()

    def compared(_memory: object, _size: int, blocks: Sequence[int], expected: str) -> int | None:
        begun.set()
        assert may_end.wait(10)
        return int(expected) if expected else None

    monkeypatch.setattr(proving, "first_mismatch", compared)
    memory = (ctypes.c_char * 64)()
    prover = proving.Prover(KvPool(ctypes.addressof(memory), 16, 4, 1), lambda: woken.append(1))
    prover.ask(7, 0, [0, 1], "")
    prover.ask(7, 2, [2], "0")
    closing = threading.Thread(target=prover.close)
    assert begun.wait(10)
    closing.start()
    assert (prover.proofs(), woken) == ([], [])
    closing.join(0.05)
    assert closing.is_alive(), "what was asked is still compared"
    may_end.set()
    closing.join(10)
    assert prover.proofs() == [proving.Proof(7, 0, None), proving.Proof(7, 2, 0)]
    assert len(woken) == 2
