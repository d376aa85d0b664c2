"""What the tests of admission are made of: keys, a tenants file, a clock, a desk with flows that only remember."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from fleet_router.admission.lanes import Lane
from fleet_router.admission.quota import Account
from fleet_router.admission.tenants import Tenants, parse_tenants
from fleet_router.ask import Ask
from fleet_router.config import RouterConfig, SloClass
from fleet_router.desk import Desk
from fleet_router.errors import RequestError
from fleet_router.request import parse_body

SALT = "0123456789abcdef" * 3
CLASSES = (
    SloClass(name="interactive", priority=100, ttft_budget_s=1.0),
    SloClass(name="batch", priority=-10, ttft_budget_s=60.0),
)
CONFIG = RouterConfig(fleet="f", served_name="m", worker_slots=2, classes=CLASSES)


def key_of(name: str) -> str:
    """A key as the README makes it."""
    return "sk-" + hashlib.sha256(b"test " + name.encode()).hexdigest()


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def tenants_file(**tenants: dict[str, Any]) -> bytes:
    """Tenants by name, each with the key `key_of(name)`."""
    rows = [{"name": name, "keys": [hash_of(key_of(name))], **more} for name, more in tenants.items()]
    return json.dumps({"salt": SALT, "tenants": rows}).encode()


def parsed(**tenants: dict[str, Any]) -> Tenants:
    return parse_tenants(tenants_file(**tenants))


def lane_of(name: str, slo_class: SloClass = CLASSES[0], weight: float = 1.0) -> Lane:
    return Lane(Account(name), slo_class, CONFIG, weight)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Remembers:
    """A flow that begins or is cut."""

    def __init__(self) -> None:
        self.begun = 0
        self.error: RequestError | None = None

    def begin(self) -> None:
        self.begun += 1

    def admitted(self) -> None:
        self.begun += 1

    def cut(self, error: RequestError) -> None:
        assert not self.begun
        self.error = error


def desk_with(clock: Clock, slots: int = 2, config: RouterConfig = CONFIG, **tenants: dict[str, Any]) -> Desk:
    desk = Desk(clock)
    if tenants:
        desk.tenants_needed = True
        desk.know(parsed(**tenants))
    desk.follow(config, {"t": slots} if slots else {}, [])
    return desk


def ask_of(config: RouterConfig = CONFIG, **more: Any) -> Ask:
    return parse_body(msgspec.json.encode({"model": "m", "prompt": "x" * 300, **more}), False, config)
