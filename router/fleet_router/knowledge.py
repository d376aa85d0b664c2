"""Precise knowledge of the workers' caches: their events in, prompts as block names, hints for routing out.

Runs beside the requests: a prompt whose tokens are known costs look-ups, a little new text is encoded at once, more of it in a
thread while the request waits. What cannot be known (no tokenizer yet, a template that refuses, too much at once, a tenant's
prompt under an adapter) leaves the request to the approximate index.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fleet_router.agreeing import agreement
from fleet_router.ask import Ask, Hints
from fleet_router.encoding import Encodes, Encoding, beside
from fleet_router.follow.kvevents import Connected, EventReader, Live, Lost, Message, NoReplay
from fleet_router.kvindex.believed import Believed
from fleet_router.kvindex.tokenised import Reading, TokenisedPrefixes, keys_of_ids
from fleet_router.tokeniser import Tokeniser, UnreadableError, digest_of, fetch
from fleet_router.workers import place_of
from fleet_wire.blocks import root_hash, tenant_root
from fleet_wire.endpoints import Endpoint

BLOCKS_MOST: Final = 200_000
TOKENS_MOST: Final = 2_000_000
PROMPT_BYTES_MOST: Final = 1024 * 1024
TAKEN_S: Final = 5.0
AGAIN_S: Final = 5.0
AGAIN_MOST_S: Final = 600.0
"""Where it was a tokenizer that we cannot use: reading a large one takes a second of a core, and the next will be the same."""
OURS_ALONE: Final = frozenset({
    "tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "reasoning_effort", "truncate_prompt_tokens",
})  # fmt: skip
"""With one of these fields an engine renders a conversation in its own way."""
TEXT_ALONE: Final = frozenset({"add_special_tokens", "truncate_prompt_tokens"})
"""With one of these it makes other tokens of a text: a worker would owe events of blocks that it never computes."""


@dataclass(frozen=True)
class Counted:
    """A prompt as tokens: how many, and its blocks for every layout that some worker has."""

    tokens: int
    keys: dict[tuple[str, int], list[int]]
    salted: bool = False
    """Its blocks are a tenant's own."""
    ids: bool = False
    """It came as token ids: nobody's tokenizer made them."""


NOT_KNOWN: Final = Counted(0, {})


class Knowledge:
    """One per process, while the fleet asks for the precise index."""

    def __init__(self, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._encoding = Encoding(self._gave_up, say)
        self._reader = EventReader(self._deliver)
        self._endpoints: dict[str, Endpoint] = {}
        self._tokeniser: Tokeniser | None = None
        self._digest = b""
        """Of the files that it was made from."""
        self._too_slow = b""
        """The same of the last one that took too long."""
        self._alike: dict[str, bool] = {}
        """By compatibility hash: those workers have the same tokenizer and template. Others have another model (tiers of a
        cascade, an update): what it makes of a text says nothing of what they hold."""
        self._renders: dict[str, bool] = {}
        """By the same: those workers make our tokens of a conversation, too. One option of an engine, and they do not."""
        self._bits: dict[str, int] = {}
        self._bits_alike = 0
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at, self._fetches, self._again_s = float("-inf"), 0, AGAIN_S
        self._stopped = False
        self.believed = Believed(BLOCKS_MOST)
        self.prefixes = TokenisedPrefixes(TOKENS_MOST, secret=secrets.randbits(64))

    # -- workers ----------------------------------------------------------------------------------------------------
    def follow(self, workers: Iterable[tuple[Endpoint, int]]) -> None:
        """These workers, each with its bit."""
        wanted = {endpoint.uid: (endpoint, bit) for endpoint, bit in workers if endpoint.events_port}
        for uid in [uid for uid, known in self._endpoints.items() if uid not in wanted or _moved(known, wanted[uid][0])]:
            del self._endpoints[uid]
            self._reader.forget(uid)
            self.believed.leave(uid)
        for uid, (endpoint, bit) in wanted.items():
            if uid not in self._endpoints:
                self._again_s = AGAIN_S
                self.believed.join(uid, bit, endpoint.compat)
                self._reader.follow(uid, endpoint.address, endpoint.events_port, endpoint.replay_port)
            self._endpoints[uid] = endpoint
        self._bits = {uid: bit for uid, (_, bit) in wanted.items()}
        self._note_alike()

    def tick(self, now: float) -> None:
        """Twice a second: silence, replays, a tokenizer that is still missing."""
        self.believed.check(now)
        self._encoding.tick(now)
        self._ask()
        kinds = {endpoint.compat for endpoint in self._endpoints.values()}
        if kinds:  # at zero the last ones are kept
            self._alike = {kind: alike for kind, alike in self._alike.items() if kind in kinds}
            self._renders = {kind: renders for kind, renders in self._renders.items() if kind in kinds}
            if not any(self._alike.values()):
                self._tokeniser, self._alike = None, {}
        self._note_alike()
        unknown = [endpoint for endpoint in self._endpoints.values() if endpoint.compat not in self._alike]
        if unknown and now - self._fetched_at > self._again_s and self._fetching is None:
            asked = unknown[self._fetches % len(unknown)]  # another one each time: it may be dead
            self._fetched_at, self._fetches = now, self._fetches + 1
            self._fetching = self._loop.create_task(self._fetch(asked))

    def _note_alike(self) -> None:
        """Workers that have the tokenizer: of all others what was sent where is believed."""
        self._bits_alike = 0
        for uid, endpoint in self._endpoints.items():
            self._bits_alike |= self._bits[uid] if self._alike.get(endpoint.compat) else 0

    async def _fetch(self, endpoint: Endpoint) -> None:
        try:
            files = await fetch(endpoint.address, endpoint.agent_port)
            digest = await beside(digest_of, files)
        except (OSError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
            self._say(f"no tokenizer from {endpoint.name}: {error}")
        else:
            if digest == self._too_slow:
                self._again_s = AGAIN_MOST_S
            elif self._tokeniser is None:
                await self._read(endpoint, files, digest)
            else:
                tokeniser = self._tokeniser
                alike = digest == self._digest and await self._agrees(tokeniser, endpoint)
                if self._tokeniser is tokeniser:  # else it is gone meanwhile, and is read once more
                    self._alike[endpoint.compat] = alike
            self._note_alike()
        finally:
            self._fetching = None

    async def _read(self, endpoint: Endpoint, files: dict[str, str], digest: bytes) -> None:
        self._again_s = min(AGAIN_MOST_S, 2 * self._again_s)
        try:
            made = await beside(Tokeniser, files)
        except (OSError, ValueError, ImportError, TimeoutError) as error:
            self._say(f"no tokenizer from {endpoint.name}: {error}")
            return
        if made.usable and await self._agrees(made, endpoint):
            self.prefixes = TokenisedPrefixes(TOKENS_MOST, splits=made.splits, secret=secrets.randbits(64))
            self._tokeniser, self._digest, self._again_s = made, digest, AGAIN_S
            self._alike = {endpoint.compat: True}
        self._say(f"tokenizer from {endpoint.name}: usable={made.usable} splits={made.splits} on_loop={made.inline_chars > 0}")

    def _gave_up(self, tokeniser: Encodes, why: str) -> None:
        """It is used no more: what it costs is for clients to choose."""
        if tokeniser is self._tokeniser:
            self._say(f"the tokenizer is used no more, all text goes by the approximate index: {why}")
            self._too_slow, self._again_s = self._digest, AGAIN_MOST_S
            self._tokeniser, self._alike = None, {}
            self._note_alike()

    async def _agrees(self, tokeniser: Tokeniser, endpoint: Endpoint) -> bool:
        """Its worker makes the same tokens of a text. Of conversations as well or not: noted."""
        found = await agreement(tokeniser, endpoint)
        self._renders[endpoint.compat] = found.chat
        if not found.chat:
            what = "conversations" if found.text else "texts and conversations"
            self._say(f"{endpoint.name} makes other tokens than its model's files of {what}: they go by the approximate index")
        return found.text

    def _deliver(self, messages: Sequence[Message]) -> None:
        """In the reader's thread: returns when the loop has taken them."""
        taken = threading.Event()

        def take() -> None:
            try:
                self._take(messages)
            finally:
                taken.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(take)
            while not taken.wait(TAKEN_S) and not self._stopped:
                pass

    def _take(self, messages: Sequence[Message]) -> None:
        now, believed = self._clock(), self.believed
        for message in messages:
            if isinstance(message, Live):
                believed.live(message.worker, message.number, message.batch, now)
            elif isinstance(message, Connected):
                believed.connected(message.worker, now)
            elif isinstance(message, Lost):
                believed.lost(message.worker)
            elif isinstance(message, NoReplay):
                believed.not_replayed(message.worker)
            else:
                believed.replayed(
                    message.worker, message.asked_from, message.batches, now, last=message.last, whole=message.whole
                )
        self._ask()

    def _ask(self) -> None:
        asks, self.believed.asks = self.believed.asks, []
        for worker, first in asks:
            self._reader.replay(worker, first)

    # -- prompts ----------------------------------------------------------------------------------------------------
    def count(self, ask: Ask, chat: bool, then: Callable[[Counted], None], salt: str = "") -> Counted | None:
        """The prompt as blocks, now; or None, and `then` is called with it a little later. `salt`: the tenant's `cache_salt`."""
        tokeniser, prompt, under = self._tokeniser, ask.prompt, _Under(ask.adapter, salt)
        if len(prompt) > PROMPT_BYTES_MOST or ask.alone or (salt and ask.adapter):
            return NOT_KNOWN
        if not (OURS_ALONE if chat else TEXT_ALONE).isdisjoint(ask.fields) or (chat and not all(self._renders.values())):
            return NOT_KNOWN
        try:
            if not chat and prompt[:1] == b"[":
                ids = msgspec.json.decode(prompt, type=list[int])
                keys = {one: keys_of_ids(ids, under.root(one), one[1]) for one in self.believed.index.layouts()}
                return Counted(len(ids), keys, bool(salt), ids=True)
            if tokeniser is None:
                return NOT_KNOWN
            text = tokeniser.render(prompt) if chat else msgspec.json.decode(prompt, type=str)
        except (UnreadableError, msgspec.DecodeError, OverflowError):
            return NOT_KNOWN
        lead = () if chat else tokeniser.lead
        prefixes = self.prefixes  # of this tokenizer
        reading = prefixes.read(text, lead, salt)
        texts = [reading.segments[i] for i in reading.missing]
        if reading.missing_chars <= tokeniser.inline_chars:
            encoded = self._encoding.at_once(tokeniser, texts)
            return NOT_KNOWN if encoded is None else self._learn(prefixes, reading, encoded, lead, under)
        if not self._encoding.has_room:
            return NOT_KNOWN
        self._encoding.later(
            tokeniser, texts, lambda ids: then(self._learn(prefixes, reading, ids, lead, under) if ids else NOT_KNOWN)
        )
        return None

    def _learn(
        self, prefixes: TokenisedPrefixes, reading: Reading, encoded: Sequence[Sequence[int]], lead: Sequence[int], under: _Under
    ) -> Counted:
        prefixes.learn(reading, encoded, lead)
        if not prefixes.knows(reading):  # forgotten meanwhile
            return NOT_KNOWN
        keys = {layout: prefixes.keys(reading, under.root(layout), layout[1]) for layout in self._layouts()}
        return Counted(prefixes.count(reading), keys, bool(under.salt))

    def _layouts(self) -> set[tuple[str, int]]:
        """Those that a text is hashed for."""
        return {one for one in self.believed.index.layouts() if self._alike.get(one[0])}

    def hints(self, counted: Counted, hints: Hints) -> Hints:
        """What is known of this prompt now."""
        if not counted.tokens:
            return hints
        index, blocks = self.believed.index, list[tuple[float, int]]()
        for (_, block_tokens), keys in counted.keys.items():
            blocks += [(held * block_tokens, mask) for held, mask in index.depths(keys)]
        blocks.sort(reverse=True)
        trusted = self.believed.trusted & ~index.lacking & (index.named() if counted.salted else -1)
        if not counted.ids:
            trusted &= self._bits_alike
        return hints.counted(float(counted.tokens), tuple(blocks), trusted)

    def answered(self, worker: str, counted: Counted) -> None:
        """This worker has computed the prompt: it owes us events."""
        endpoint = self._endpoints.get(worker)
        if endpoint is None or (counted.salted and not self.believed.index.named_by(worker)):
            return
        now = self._clock()
        for (compat, _), keys in counted.keys.items():
            if compat == endpoint.compat and (counted.ids or self._alike.get(compat)):
                self.believed.answered(worker, keys, now)

    def _state(self, worker: str) -> str:
        """Of its stream; `lacking`: nothing is missing of what it said, but here was no room for it."""
        state = self.believed.state(worker) or "none"
        return "lacking" if state == "live" and self._bits[worker] & self.believed.index.lacking else state

    def lines(self) -> list[str]:
        """Prometheus text: streams by state, blocks, tokens."""
        states = [self._state(uid) for uid in self._endpoints]
        out = ["# TYPE fleet_router_kv_streams gauge"]
        out += [f'fleet_router_kv_streams{{state="{state}"}} {states.count(state)}' for state in sorted(set(states))]
        out += ["# TYPE fleet_router_kv_blocks gauge", f"fleet_router_kv_blocks {len(self.believed.index)}"]
        out += ["# TYPE fleet_router_tokenised_tokens gauge", f"fleet_router_tokenised_tokens {self.prefixes.tokens}"]
        return out

    def put_away(self) -> None:
        """Nobody asks any more: who waits for the tokens of a prompt goes on without them, and both threads end."""
        self._encoding.let_go()
        threading.Thread(target=self.stop, daemon=True).start()  # it waits for threads that wait for this one

    def stop(self) -> None:
        """End both threads; not on the loop, which one of them may be waiting for."""
        self._stopped = True
        if (fetching := self._fetching) is not None:
            self._loop.call_soon_threadsafe(fetching.cancel)
        self._reader.stop()
        self._encoding.stop()


def _moved(known: Endpoint, now: Endpoint) -> bool:
    return (place_of(known), known.events_port, known.replay_port, known.role, known.compat) != (
        place_of(now), now.events_port, now.replay_port, now.role, now.compat,
    )  # fmt: skip


@dataclass(frozen=True)
class _Under:
    """Whose KV a prompt's is."""

    adapter: str
    salt: str

    def root(self, layout: tuple[str, int]) -> bytes:
        """Parent of its first blocks. As `precise.Holding.root` has it: blocks under an adapter are known by its name."""
        root = root_hash(layout[0], layout[1], self.adapter)
        return tenant_root(root, self.salt) if self.salt else root
