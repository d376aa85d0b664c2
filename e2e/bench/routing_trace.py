"""The two request traces of `make bench-routing`, and how their prompts look as text.

conversation: 15 minutes of Mooncake's trace (e2e/data/mooncake); its arrivals stand on ticks of 3 s and are spread over them.
synthetic: made here after the published figures of Mooncake's trace of that name, which is not at hand: Poisson, 3.91 per second,
inputs of 15.3k tokens in the mean (median 11.6k, p95 49k), outputs of 149 (median 69), two thirds of the blocks seen before.
Documents that are asked about again and again, chats that grow, and questions of their own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path

BLOCK_TOKENS = 512
CHARS_PER_TOKEN = 4
BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN
TICK_S = 3.0
APART_S = 60.0
CONVERSATION = Path(__file__).parents[1] / "data/mooncake/conversation_15min.jsonl.gz"

SYNTHETIC_S = 800.0
SYNTHETIC_PER_S = 3.91
DOCUMENTS = 600
DOCUMENT_SHARE, CHAT_SHARE = 0.7, 0.2
CHATS = 24
CHAT_TURN_TOKENS = 900
CHAT_MOST_TOKENS = 16_000
QUESTION_TOKENS = 7_000
CHATS_S, CHATS_PER_S, CHATS_TOKENS = 100.0, 36.0, 500


@dataclass(frozen=True)
class Arrival:
    """One request. Equal block ids are equal text; the last block may be shorter than the others."""

    at_s: float
    tokens: int
    output: int
    blocks: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """About CHARS_PER_TOKEN characters a token."""
        return "".join(map(text_of, self.blocks))[: self.tokens * CHARS_PER_TOKEN]


@lru_cache(maxsize=4_096)
def text_of(block: int) -> str:
    """Unlike any other block's from the first characters on."""
    return hashlib.shake_128(b"%d" % block).hexdigest(BLOCK_CHARS // 2)


def conversation(seed: int) -> list[Arrival]:
    """Mooncake's; `seed` spreads the arrivals."""
    rng, found = random.Random(seed), []
    with gzip.open(CONVERSATION, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    start = rows[0]["timestamp"]
    for row in rows:
        blocks = tuple(block for first, last in row["hash_ranges"] for block in range(first, last + 1))
        at_s = (row["timestamp"] - start) / 1e3 + rng.random() * TICK_S
        found.append(Arrival(at_s, row["input_length"], max(1, row["output_length"]), blocks))
    return sorted(found, key=lambda one: one.at_s)


def synthetic(seed: int) -> list[Arrival]:
    """Made after the published figures of Mooncake's."""
    rng, fresh, at_s = random.Random(seed), count(), 0.0
    found: list[Arrival] = []
    documents = [_blocks(fresh, _length(rng, 12_500, 0.8)) for _ in range(DOCUMENTS)]
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    while at_s < SYNTHETIC_S:
        kind = rng.random()
        if kind < DOCUMENT_SHARE:
            known = documents[min(DOCUMENTS - 1, int(DOCUMENTS * rng.random() ** 1.5))]
            blocks, last = [*known, next(fresh)], rng.randrange(20, 400)
        elif kind < DOCUMENT_SHARE + CHAT_SHARE:
            chat = chats[rng.randrange(CHATS)]
            if len(chat) * BLOCK_TOKENS > CHAT_MOST_TOKENS:
                chat.clear()
            chat += _blocks(fresh, CHAT_TURN_TOKENS)
            blocks, last = [*chat, next(fresh)], rng.randrange(20, 400)
        else:
            blocks, last = _blocks(fresh, _length(rng, QUESTION_TOKENS, 1.2)), rng.randrange(20, BLOCK_TOKENS)
        found.append(Arrival(at_s, (len(blocks) - 1) * BLOCK_TOKENS + last, _output(rng), tuple(blocks)))
        at_s += rng.expovariate(SYNTHETIC_PER_S)
    return found


def chats(seed: int) -> list[Arrival]:
    """Short prompts that have nothing in common, as many as keep workers as busy as the other traces do. For `begun_alike`."""
    rng, fresh, at_s = random.Random(seed), count(), 0.0
    found: list[Arrival] = []
    while at_s < CHATS_S:
        tokens = max(20, min(4_000, int(rng.lognormvariate(math.log(CHATS_TOKENS), 0.8))))
        found.append(Arrival(at_s, tokens, _output(rng), tuple(_blocks(fresh, tokens))))
        at_s += rng.expovariate(CHATS_PER_S)
    return found


def begun_alike(trace: Sequence[Arrival], tokens: int) -> list[Arrival]:
    """The same prompts behind so many tokens, whole blocks, that are in all of them."""
    beginning = tuple(range(-(tokens // BLOCK_TOKENS), 0))
    return [replace(one, tokens=one.tokens + len(beginning) * BLOCK_TOKENS, blocks=beginning + one.blocks) for one in trace]


def window(trace: Sequence[Arrival], seconds: float, number: int) -> list[Arrival]:
    """So much of it; by its number another part, as long as there is another whole one."""
    begin_s = seconds * (number % max(1, int(trace[-1].at_s / seconds)))
    return [replace(one, at_s=one.at_s - begin_s) for one in trace if begin_s <= one.at_s < begin_s + seconds]


def _output(rng: random.Random) -> int:
    return max(1, min(2_000, int(rng.lognormvariate(math.log(69), 1.25))))


def _length(rng: random.Random, median: float, sigma: float) -> int:
    return int(min(120_000, max(BLOCK_TOKENS, rng.lognormvariate(math.log(median), sigma))))


def _blocks(fresh: count[int], tokens: int) -> list[int]:
    return [next(fresh) for _ in range(-(-tokens // BLOCK_TOKENS))]


def together(make: Callable[[int], list[Arrival]], seed: int, times: int) -> list[Arrival]:
    """What so many communities of users send to one fleet, each its own prompts, not all beginning at once."""
    rng, found, free = random.Random(seed), list[Arrival](), 0
    for number in range(times):
        one, later_s = make(seed * times + number), rng.uniform(0, APART_S) if number else 0.0
        found += [replace(r, at_s=r.at_s + later_s, blocks=tuple(block + free for block in r.blocks)) for r in one]
        free += 1 + max(max(r.blocks) for r in one)
    return sorted(found, key=lambda one: one.at_s)


def faster(trace: Sequence[Arrival], times: float) -> list[Arrival]:
    """The same requests, closer to each other."""
    return [Arrival(one.at_s / times, one.tokens, one.output, one.blocks) for one in trace]


def repeated_share(trace: Sequence[Arrival]) -> float:
    """Share of the blocks that an earlier request had: what a cache without end could hit."""
    seen: set[int] = set()
    repeated = total = 0
    for one in trace:
        repeated += sum(block in seen for block in one.blocks)
        total += len(one.blocks)
        seen.update(one.blocks)
    return repeated / total
