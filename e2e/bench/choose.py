"""`make bench-choose`: what a routing decision costs, and what the prefix indexes hold in memory.

One decision of policy/cost.py over fleets of 16 to 1,024 workers, a quarter of them prefill; every worker holds a shared part of
the prompt, three hold more; loads differ. Then a decision among 64 workers with all that comes before and after it, by the length
of the context: keys of the prompt, who holds how much of it, the decision, and remembering it; nine tenths of each prompt were
asked before, as in a conversation, so that what it adds to the index is told, too. CPU time of this process. `ns_per_step`: a
loop of plain attribute reads in the same run, so that runs on different machines can be compared. Forgetting: what stands still
when a worker that had much leaves each index, against the time that it took to learn it. Memory: a process of its own fills each
index with 100,000 entries.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from e2e.bench.table import report
from fleet_router.kvindex.approximate import ApproximateIndex
from fleet_router.kvindex.masks import LOWEST_BIT
from fleet_router.kvindex.pieces import bytes_of, key_chain
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.cost import cheapest
from fleet_router.policy.group import Group
from fleet_router.policy.terms import CostAsk

SIZES = (16, 64, 256, 1024)
ROUNDS = 7
DECISIONS = 1_500
ENTRIES = 100_000
CONTEXTS = (4, 32, 128, 512)
"""KiB of a prompt."""
TALKS = 64
"""Conversations of each length."""
OVER = 64
"""Workers."""
BYTES_PER_TOKEN = 4
HELD = 80_000
"""Entries of the one worker that is forgotten."""
FILL = """
import sys
import fleet_router.process
from e2e.bench.choose import fill
fill(sys.argv[1])
print(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def group_of(size: int) -> Group:
    """A fleet with loads and queues, whose pairs have met as far as routers remember."""
    group, rng = Group(("t", "c")), random.Random(size)
    made = [Candidate(str(i), "decode" if i % 4 else "prefill", ("t", "c"), 0) for i in range(size)]
    group.update([(worker, 1 << i) for i, worker in enumerate(made)])
    for worker in made:
        group.adopt(worker)
        for _ in range(rng.randrange(4)):
            worker.began()
        worker.free_at = rng.random()
        worker.heat = 20_000 * rng.random()
    group.update([(worker, worker.bit) for worker in made])  # heat is counted per side, too
    for prefill in group.prefill.members[:64]:
        for decode in group.decode.members[:192]:
            group.pairs.observe(prefill.uid, decode.uid, 1000.0, 0.02)
    return group


def asks(size: int) -> list[tuple[CostAsk, list[tuple[float, int]]]]:
    """Requests, each with who holds how much of it."""
    rng, everybody = random.Random(1), (1 << size) - 1
    found = []
    for _ in range(DECISIONS):
        deep = 0
        for i in rng.sample(range(size), 3):
            deep |= 1 << i
        ask = CostAsk(3000.0, rng.getrandbits(64), 0.5, 1.25, 64.0)
        found.append((ask, [(2500.0, deep), (600.0, everybody & ~deep)]))
    return found


def conversations(size: int) -> list[tuple[bytes, bytes]]:
    """A prompt of so many KiB, and the nine tenths of it that were asked before."""
    rng, whole = random.Random(size), size * 1024
    made = [rng.randbytes(whole) for _ in range(TALKS)]
    return [(prompt[: whole * 9 // 10], prompt) for prompt in made]


def of_context(size: int) -> tuple[float, float]:
    """CPU microseconds per request, and entries that it adds to the index."""
    group, index = group_of(OVER), ApproximateIndex(ENTRIES)
    for i in range(OVER):
        index.join(str(i), LOWEST_BIT << i)

    def ask(prompt: bytes) -> None:
        keys = key_chain(prompt)
        tokens = len(prompt) / BYTES_PER_TOKEN
        steps = [(bytes_of(pieces) / BYTES_PER_TOKEN, mask // LOWEST_BIT) for pieces, mask in index.depths(keys)]
        found = cheapest(CostAsk(tokens, keys[0], 0.5, 1.25, 64.0), group, steps, None)
        assert found is not None
        index.add(keys, found.decode.uid)
        if found.prefill is not None:
            index.add(keys, found.prefill.uid)

    taken, grown = [], []
    for before, after in conversations(size):
        ask(before)
        entries = index.entries
        taken.append(timed(lambda after=after: ask(after), 1))  # type: ignore[misc]
        grown.append(index.entries - entries)
    return statistics.median(taken), statistics.mean(grown)


def timed(what: Callable[[], object], count: int) -> float:
    """CPU microseconds each."""
    before = time.process_time()
    what()
    return (time.process_time() - before) / count * 1e6


class _One:
    x = 1


def ns_per_step() -> float:
    """A plain attribute read in a loop."""
    one = _One()

    def read() -> None:
        for _ in range(200_000):
            _ = one.x

    return timed(read, 200_000) * 1e3


def fill(kind: str) -> None:
    """One index with ENTRIES entries, as real prompts make them."""
    from fleet_router.kvindex.precise import PreciseIndex
    from fleet_wire.blocks import chain_packed, root_hash
    from fleet_wire.events import BlockStored

    rng, workers = random.Random(2), 16
    if kind == "approximate":
        index = ApproximateIndex(ENTRIES)
        for i in range(workers):
            index.join(str(i), LOWEST_BIT << i)
        for number in range(ENTRIES // 12 + workers * 200):
            index.add(key_chain(rng.randbytes(12 * 256)), str(number % workers))
        assert index.entries > 0.7 * ENTRIES
    elif kind == "precise":
        precise, root = PreciseIndex(2 * ENTRIES), root_hash("c", 16)
        for i in range(workers):
            precise.join(str(i), 1 << i, "c")
        while len(precise) < ENTRIES:
            names = chain_packed(root, rng.randbytes(64 * 50), 16)
            event = BlockStored(list(names), None, [], 16, None, "GPU", None)
            precise.apply(str(rng.randrange(workers)), [event])


def forgetting() -> dict[str, tuple[float, float]]:
    """Index → (CPU milliseconds to forget its only worker, of what it took to learn)."""
    from fleet_router.kvindex.precise import PreciseIndex
    from fleet_wire.events import BlockStored

    rng, precise, approximate = random.Random(3), PreciseIndex(2 * HELD), ApproximateIndex(2 * HELD)
    precise.join("a", LOWEST_BIT, "c")
    approximate.join("a", LOWEST_BIT)
    told = BlockStored([rng.randbytes(16) for _ in range(HELD)], None, [], 16, None, "GPU", None)
    prompts = [[rng.getrandbits(64) for _ in range(80)] for _ in range(HELD // 80)]
    learns: dict[str, Callable[[], object]] = {
        "precise": lambda: precise.apply("a", [told]),
        "approximate": lambda: [approximate.learn(keys, "a") for keys in prompts],
    }
    forgets: dict[str, Callable[[], object]] = {
        "precise": lambda: precise.clear("a"),
        "approximate": lambda: approximate.remove("a"),
    }
    found = {}
    for kind, learn in learns.items():
        learnt, forgotten = timed(learn, 1), timed(forgets[kind], 1)
        found[kind] = (forgotten / 1e3, forgotten / learnt)
    assert (len(precise), approximate.entries) == (0, 0)
    return found


def memory_mb(kind: str) -> float:
    """Peak resident memory of a router's modules with this index filled."""
    done = subprocess.run([sys.executable, "-c", FILL, kind], capture_output=True, text=True, check=True)
    return round(float(done.stdout), 1)


def main() -> int:
    """The table and the JSON line."""
    rows, result = [], {}
    for size in SIZES:
        group, asked = group_of(size), asks(size)
        looked = [0]

        def decide(group: Group = group, asked: list = asked, looked: list[int] = looked) -> None:  # type: ignore[type-arg]
            for ask, steps in asked:
                found = cheapest(ask, group, steps, None)
                looked[0] = max(looked[0], found.looked if found is not None else 0)

        decide()
        taken = [timed(decide, DECISIONS) for _ in range(ROUNDS)]
        rows.append((f"{size} workers", round(statistics.median(taken), 1), round(min(taken), 1), looked[0]))
        result[f"us_{size}"] = {"median": round(statistics.median(taken), 1), "least": round(min(taken), 1), "looked": looked[0]}
    for size in CONTEXTS:
        us, grown = map(statistics.median, zip(*(of_context(size) for _ in range(ROUNDS)), strict=True))
        rows.append((f"{size} KiB of context, all of it", round(us, 1), "", f"{grown:.0f} entries"))
        result[f"context_{size}k"] = {"us": round(us, 1), "entries": round(grown, 1)}
    result["ns_per_step"] = round(statistics.median([ns_per_step() for _ in range(ROUNDS)]), 1)
    for kind, (ms, share) in forgetting().items():
        rows.append((f"forget {HELD} entries, {kind}", round(ms * 1e3), "", f"{share:.2f} of learning"))
        result[f"forget_{kind}"] = {"ms": round(ms, 1), "of_learning": round(share, 2)}
    memory = {kind: memory_mb(kind) for kind in ("nothing", "approximate", "precise")}
    per_entry = round((memory["approximate"] - memory["nothing"]) * 1024**2 / ENTRIES)
    rows += [("bytes per entry", per_entry, "", "")]
    rows += [(f"memory, {kind}", f"{mb} MB", "", "") for kind, mb in memory.items()]
    report(
        ("", "µs, median", "µs, least", "looked at, most"),
        rows,
        {**result, "bytes_per_entry": per_entry, "rss_mb": memory, "rounds": ROUNDS, "errors": 0},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
