"""Hot prefixes before readiness: whom a new worker asks, how often and for how long. `next_try` decides; `SeedKeeper` asks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET

from fleet_wire.address import authority
from fleet_wire.unreadable import UNREADABLE
from fleet_worker.config import MOST_SEED_PEERS, SEED_PEERS_ENV, SeedSettings, WorkerConfig

TRIES: Final = 2
"""Workers that are asked at most: a second one when the first one fails."""
LEAST_S: Final = 0.2
"""With less time left than that nobody is asked any more."""
ENGINE_SHARE: Final = 0.85
"""Of a try's time the engine has so much: the rest is for its last step and its answer."""
FIRST_TRY: Final = 0.6
"""Of the time, while somebody else could be asked as well."""
PEER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)):([0-9]{1,5})")
MESSAGE_MOST: Final = 300


class Seeded(msgspec.Struct, frozen=True):
    """What the engine says came of one try (engine/seeding.py has the same words). `reason` empty: nothing failed."""

    blocks: int = 0
    nbytes: int = 0
    refused: int = 0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """The side channel of another worker."""

    host: str
    port: int

    def __str__(self) -> str:
        return authority(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Try:
    """Ask this one, for so long."""

    peer: Peer
    within_s: float


class SeedEngine(Protocol):
    """What asks the engine (EngineClient)."""

    async def seed(self, host: str, port: int, most_share: float, within_s: float) -> Seeded:
        """POST /kv/seed; never raises."""
        ...


def parse_peers(text: str, own: str) -> tuple[Peer, ...]:
    """SEED_PEERS_ENV; what cannot be read is passed over, and so is this worker itself: the annotation is somebody's to edit."""
    found = list[Peer]()
    for part in text.split(",")[: 4 * MOST_SEED_PEERS]:
        read = PEER.fullmatch(part.strip())
        if read is not None and 0 < int(read[3]) < 65_536 and (host := read[1] or read[2]) != own:
            found.append(Peer(host, int(read[3])))
    return tuple(dict.fromkeys(found))[:MOST_SEED_PEERS]


def next_try(peers: Sequence[Peer], tried: Sequence[Seeded], passed_s: float, timeout_s: float) -> Try | None:
    """Whom to ask now; None: it is over. A try that failed is followed by one more, at somebody else, in what time is left."""
    if len(tried) >= min(TRIES, len(peers)) or (tried and not tried[-1].reason):
        return None
    left_s = timeout_s - passed_s
    if left_s < LEAST_S:
        return None
    is_last = len(tried) + 1 >= min(TRIES, len(peers))
    return Try(peers[len(tried)], left_s if is_last else FIRST_TRY * left_s)


class SeedKeeper:
    """Seeds this worker's engine once, before it is ready."""

    def __init__(self, config: WorkerConfig, engine: SeedEngine, env: Mapping[str, str], own: str) -> None:
        self._settings = None if config.kv.seed is UNSET else config.kv.seed
        self._engine = engine
        self._peers = parse_peers(env.get(SEED_PEERS_ENV, ""), own)
        self._outcome = "Waiting"
        self._asked = list[Peer]()
        self._tried = list[Seeded]()
        self._seconds = 0.0
        self._why = ""
        if config.engine != "torch":
            self._end("NotSupported", f"{config.engine} has no interface that takes another worker's prefix cache")
        elif self._settings is None:
            self._end("Off", "kvTransfer.seed.enabled is false, or the template of this worker is older than seeding")

    async def run(self) -> None:
        """Returns within `timeout_s`, whatever happens; after the first call at once. Never fails: a cold worker serves, too."""
        if self._outcome != "Waiting" or self._settings is None:
            return
        settings, begun = self._settings, time.monotonic()
        self._outcome = "Asking"
        try:
            async with asyncio.timeout(settings.timeout_s):
                await self._seed(settings, begun)
        except TimeoutError:
            self._why = f"not done within {settings.timeout_s:g} s"
        except Exception as error:  # whatever it is: readiness does not hang on it
            self._why = f"{type(error).__name__}: {error}"[:MESSAGE_MOST]
        self._seconds = time.monotonic() - begun
        self._end("Seeded" if any(one.blocks for one in self._tried) else "Cold", self._why)

    async def _seed(self, settings: SeedSettings, begun: float) -> None:
        if not self._peers:
            self._why = "no worker of its tier, role and revision was ready when its pod was made"
        while (one := next_try(self._peers, self._tried, time.monotonic() - begun, settings.timeout_s)) is not None:
            self._asked.append(one.peer)
            found = await self._engine.seed(one.peer.host, one.peer.port, settings.share, ENGINE_SHARE * one.within_s)
            self._tried.append(found)
            words = f"{one.peer}: {found.reason}: {found.message}"[:MESSAGE_MOST]
            self._why = words if found.reason else "" if found.blocks else f"{one.peer} has no prefix that several prompts shared"

    def _end(self, outcome: str, why: str) -> None:
        self._outcome = outcome
        self._why = why = "".join(sign if sign.isprintable() else " " for sign in why)  # a peer's words: one line of ours
        if outcome in ("Seeded", "Cold"):
            print(f"Seed{outcome}: {self._total('blocks')} blocks in {self._seconds:.2f} s. {why}".rstrip(), flush=True)

    def _total(self, field: str) -> int:
        return sum(getattr(one, field) for one in self._tried)

    def report(self) -> dict[str, Any]:
        """For /state."""
        return {
            "outcome": self._outcome, "blocks": self._total("blocks"), "bytes": self._total("nbytes"),
            "refused_blocks": self._total("refused"), "from": [str(peer) for peer in self._asked],
            "seconds": round(self._seconds, 3), "reason": self._why,
        }  # fmt: skip

    def exposition(self) -> list[str]:
        """For /metrics; what did not happen has no number."""
        lines = ["# TYPE fleet_agent_seed_info gauge", f'fleet_agent_seed_info{{outcome="{self._outcome}"}} 1']
        if self._outcome in ("Seeded", "Cold"):
            values = {
                "fleet_agent_seed_blocks": self._total("blocks"), "fleet_agent_seed_bytes": self._total("nbytes"),
                "fleet_agent_seed_refused_blocks": self._total("refused"), "fleet_agent_seed_seconds": self._seconds,
            }  # fmt: skip
            lines += [line for name, value in values.items() for line in (f"# TYPE {name} gauge", f"{name} {value}")]
        return lines


def read_seeded(body: bytes) -> Seeded:
    """The engine's answer; one that cannot be read is a failed try."""
    try:
        return msgspec.json.decode(body, type=Seeded)
    except UNREADABLE as error:
        return Seeded(reason="engine", message=f"its answer cannot be read: {error}"[:MESSAGE_MOST])
