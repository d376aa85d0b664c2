"""What is served where."""

from __future__ import annotations

from typing import Final

from fleet_router.dialect.routes import ALONE, TRANSLATED

COMPLETIONS: Final = b"/v1/completions"
CHAT: Final = b"/v1/chat/completions"
GENERATE: Final = {COMPLETIONS: False, CHAT: True}
DECISIONS: Final = b"/debug/decisions"
HELD: Final = b"/held"
MODELS: Final = b"/v1/models"
ONE_MODEL: Final = b"/v1/models/"
PLAIN: Final = {MODELS, b"/health", b"/ready", b"/metrics"}
WATCHED: Final = {b"/metrics", HELD}
"""What names tenants, and what wakes when they come."""
OF_ALL: Final = {b"/ready", b"/metrics"}
"""Where several processes share the port, the answer is theirs together."""
ADMIN: Final = {*PLAIN, HELD, DECISIONS} - {MODELS}
KINDS: Final = {b"/metrics": b"text/plain; version=0.0.4", DECISIONS: b"application/json"}
WITH_BODY: Final = {*GENERATE, *TRANSLATED, *ALONE}
"""Where a body says what is asked."""
KNOWN: Final = {*GENERATE, *TRANSLATED, *ALONE, *PLAIN, HELD, DECISIONS}
