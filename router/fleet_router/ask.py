"""A request as it is handed from module to module: what is read of it some sixty times on its way. Plain classes, which the
compiler makes as cheap as C's: a msgspec.Struct is asked for an attribute by name, some 130 instructions each time (callgrind).

Nobody changes one of them: several flows may hold it. Who needs another one makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from fleet_router.policy.side import Steps

APART_BYTES: Final = 8_192
"""A body of more is not copied from where it came with its head, nor put together with another head: it is written from there."""
NO_HEADERS: Final[Mapping[bytes, bytes]] = {}


class Ask:
    """A parsed request: its fields as raw JSON, and what routing and limits need."""

    __slots__ = ("adapter", "added", "alone", "begins", "counts", "fields", "original", "prompt", "stream")

    def __init__(
        self, fields: dict[str, msgspec.Raw], prompt: bytes, stream: bool, original: bytes | None, alone: bool = False,
        adapter: str = "", counts: bool = False, added: bytes = b"", begins: int = 0,
    ) -> None:  # fmt: skip
        self.fields, self.prompt, self.stream = fields, prompt, stream
        self.original = original
        """The body as it came when nothing had to be stripped."""
        self.begins = begins
        """Where in `original` it begins: before a long one stands the head that came with it, so that it need not be copied."""
        self.alone = alone
        """One worker serves it without any KV from elsewhere: nothing is generated."""
        self.adapter = adapter
        """The adapter that `model` names; empty: the base model."""
        self.counts = counts
        """Alone, and it is tokenised and no more: no slot is needed for it."""
        self.added = added
        """Fields of ours, in place of the last brace of `original`: a comma before and that brace behind them."""

    @property
    def size_bytes(self) -> int:
        """Roughly what keeping it costs, two thirds of it at least: the body with all that came with it, which its values are
        parts of, and the prompt. Anything may stand between values: 250 KB of blanks counted for nothing."""
        if (original := self.original) is not None:
            return len(original) + len(self.added) + len(self.prompt)
        return sum(memoryview(value).nbytes for value in self.fields.values()) + len(self.prompt)

    def put_together(self) -> Ask:
        """The same, whose body is made of its fields."""
        return Ask(self.fields, self.prompt, self.stream, None, self.alone, self.adapter, self.counts, self.added)

    def copy(self) -> Ask:
        """The same with fields of its own, for whom they may be added to."""
        fields = self.fields.copy()
        return Ask(
            fields, self.prompt, self.stream, self.original, self.alone, self.adapter, self.counts, self.added, self.begins
        )


class Hints:
    """What a request says of itself besides its prompt. Nothing of it is needed."""

    __slots__ = ("blocks", "headers", "keeps", "local", "others", "precise", "session", "tier", "tokens")

    def __init__(
        self, session: bytes = b"", headers: Mapping[bytes, bytes] = NO_HEADERS, others: float = 1.0, local: bool = False,
        tokens: float = 0.0, blocks: Steps = (), precise: int = 0, tier: str = "", keeps: bool = True,
    ) -> None:  # fmt: skip
        self.session = session
        """Value of the session header."""
        self.headers = headers
        """Those that tier rules look at, by lower-case name."""
        self.others = others
        """How much the seconds of others count against this request's own."""
        self.local = local
        """No prefill worker is to take part: they failed it, or it has nothing to hand over."""
        self.tokens = tokens
        """Of the prompt, when they were counted; 0: estimate them."""
        self.blocks = blocks
        """What the precise index knows of the prompt."""
        self.precise = precise
        """Workers, as bits, of which it knows all."""
        self.tier = tier
        """Only this tier may answer, the others have another model; empty: any may."""
        self.keeps = keeps
        """A prefill worker may decode it, too, when the decode workers are full."""

    def prefilled_locally(self) -> Hints:
        """The same, without a prefill worker."""
        return Hints(self.session, self.headers, self.others, True, self.tokens, self.blocks, self.precise, self.tier, self.keeps)

    def of_tier(self, tier: str) -> Hints:
        """The same, for workers of this tier alone."""
        return Hints(
            self.session, self.headers, self.others, self.local, self.tokens, self.blocks, self.precise, tier, self.keeps
        )

    def decoded_apart(self) -> Hints:
        """The same, for a decode worker in any case."""
        return Hints(
            self.session, self.headers, self.others, self.local, self.tokens, self.blocks, self.precise, self.tier, False
        )

    def counted(self, tokens: float, blocks: Steps, precise: int) -> Hints:
        """The same, with what the precise index says."""
        return Hints(self.session, self.headers, self.others, self.local, tokens, blocks, precise, self.tier, self.keeps)
