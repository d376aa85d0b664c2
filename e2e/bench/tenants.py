"""A hundred tenants with keys, quotas and classes, and requests of one of them."""

from __future__ import annotations

import hashlib

from fleet_router.config import RouterConfig, SloClass

KEY = "sk-bench-" + "0123456789abcdef" * 3
CLASSES = (SloClass(name="interactive", priority=100, ttft_budget_s=1.0), SloClass(name="batch", priority=-10))
ON = RouterConfig(fleet="bench", served_name="tiny", worker_slots=256, classes=CLASSES, max_input_tokens=8_192)
TENANTS = {
    "salt": "s" * 48,
    "tenants": [
        {
            "name": f"tenant-{i}", "keys": ["sha256:" + hashlib.sha256(KEY.encode() if i == 7 else b"%d" % i).hexdigest()],
            "class": "interactive", "classes": ["batch"], "models": ["tiny"], "requestsPerSecond": 1_000_000,
            "requestsBurst": 1_000_000, "tokensPerMinute": 1_000_000_000, "concurrency": 1_000,
        }
        for i in range(100)
    ],
}  # fmt: skip


def keyed(sent: list[bytes]) -> list[bytes]:
    """The same requests, with a key."""
    return [one.replace(b"\r\nhost: bench", b"\r\nhost: bench\r\nauthorization: Bearer " + KEY.encode(), 1) for one in sent]
