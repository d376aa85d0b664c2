"""The thread that compares digests, so that proving one chunk overlaps with reading the next: a READ over shared memory copies
in the thread that posts it, and both release the GIL."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet_worker.transfer.base import KvPool
from fleet_worker.transfer.digest import first_mismatch, memory_of


@dataclass(frozen=True, slots=True)
class Proof:
    """One chunk compared: `wrong` is the index of its first block with other bytes, None when all are right."""

    pull_id: int
    start: int
    wrong: int | None


class Prover:
    """Compares chunks in order of asking; `wake` is called after each."""

    def __init__(self, pool: KvPool, wake: Callable[[], None]) -> None:
        self._pool = pool
        self._memory = memory_of(pool.base_address, pool.total_bytes)
        self._wake = wake
        self._asked: queue.SimpleQueue[tuple[int, int, Sequence[int], str] | None] = queue.SimpleQueue()
        self._proofs: deque[Proof] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-proof", daemon=True)
        self._thread.start()

    def ask(self, pull_id: int, start: int, blocks: Sequence[int], expected: str) -> None:
        """Compare local `blocks`, the pull's from index `start` on, with their expected digests."""
        self._asked.put((pull_id, start, blocks, expected))

    def proofs(self) -> list[Proof]:
        """Comparisons that ended since the last call."""
        found = []
        while self._proofs:
            found.append(self._proofs.popleft())
        return found

    def _run(self) -> None:
        while (item := self._asked.get()) is not None:
            pull_id, start, blocks, expected = item
            wrong = first_mismatch(self._memory, self._pool.block_bytes, blocks, expected)
            self._proofs.append(Proof(pull_id, start, wrong))
            self._wake()

    def close(self) -> None:
        """Stop after what was asked; afterwards nobody reads the pool."""
        self._asked.put(None)
        self._thread.join(timeout=5)
