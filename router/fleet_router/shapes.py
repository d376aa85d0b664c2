"""What was found out of bodies lately, but for their long texts: a client's requests often differ in nothing else, and to parse
and check the rest of one is a tenth of what a request costs.

A body is known when every byte of it outside its long texts is that of one that was parsed whole, under the same limits. These
are a tenant's own objects, so that nobody learns from the time that it takes what another tenant asks. Nothing is kept of long
texts.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fleet_router.ask import Ask
from fleet_router.config import RouterConfig
from fleet_router.longtext import INSTEAD

SHAPES_MOST: Final = 256
REST_MOST_BYTES: Final = 1_024
"""Of what is remembered: a quarter of a MB at most."""
FIELDS_MOST: Final = 32
"""Each takes some 100 bytes beside its own: a MB at most. 150 short ones fit into REST_MOST_BYTES."""


class Shape:
    """A body without its long texts, parsed and found to be in order."""

    __slots__ = ("adapter", "config", "fields", "name", "place", "stream", "value")

    def __init__(self, config: RouterConfig, ask: Ask, name: str, short: msgspec.Raw) -> None:
        self.config = config
        """Whose limits it was checked by. It is held, so that its id is nobody else's meanwhile."""
        self.name, self.stream, self.adapter = name, ask.stream, ask.adapter
        self.fields = ask.fields | {name: short}
        self.value = bytes(short)
        """The prompt or conversation with INSTEAD in place of its long texts."""
        self.place = self.value.find(INSTEAD)

    def with_prompt(self, prompt: bytes) -> dict[str, msgspec.Raw]:
        """The fields of a body that differs from it in this value alone, in their order."""
        fields = self.fields.copy()
        fields[self.name] = msgspec.Raw(prompt)
        return fields


class Shapes:
    """Those of a process."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bool, int], Shape] = {}

    def find(self, rest: bytes, chat: bool, config: RouterConfig) -> Shape | None:
        """Of a body that is these bytes but for its long texts. To find out that a long one is not among them would be to hash
        it: 200 KB of short turns took 60 us more."""
        return self._known.get((rest, chat, id(config))) if len(rest) <= REST_MOST_BYTES else None

    def learn(self, rest: bytes, chat: bool, config: RouterConfig, ask: Ask, short: msgspec.Raw) -> None:
        """It was parsed and checked, and is sent on as it came. `short`: its prompt or conversation without long texts."""
        if len(rest) > REST_MOST_BYTES or len(ask.fields) > FIELDS_MOST:
            return
        if len(self._known) >= SHAPES_MOST:
            self._known.clear()
        self._known[rest, chat, id(config)] = Shape(config, ask, "messages" if chat else "prompt", short)
