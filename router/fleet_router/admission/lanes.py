"""A lane: one tenant in one class, with everything that a request of it needs, made once and not per request."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

import msgspec

from fleet_router.admission.keys import KeyTable
from fleet_router.admission.quota import Account
from fleet_router.admission.tenants import Decisions, Tenant, Tenants
from fleet_router.ask import Ask, Hints
from fleet_router.config import RouterConfig, SloClass
from fleet_router.hints import NO_HINTS, hints_of
from fleet_router.lengths import TEMPLATE_TOKENS, upper_bound

DEFAULT: Final = "default"
"""Class of requests that name none; it exists without being listed."""


Added = tuple[dict[str, msgspec.Raw], bytes]
"""Fields, and the same as text that ends a JSON object."""
NOTHING: Final[Added] = ({}, b"}")
COMPLETION_TOKENS: Final = 16
"""What a completion without a limit gets, at OpenAI, vLLM and our engine."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One tenant in one class."""

    account: Account
    slo_class: SloClass
    config: RouterConfig
    """The router's, with the limits of class and tenant."""
    weight: float = 1.0
    models: frozenset[str] | None = None
    """Models that may be asked for; None: every one."""
    added: Added = NOTHING
    """Fields for the engine: the cache salt."""
    limited: Added = NOTHING
    """The same and max_tokens, for chats that give none."""
    limited_completion: Added = NOTHING
    """For completions that give none."""
    own_limit: bool = False
    """Class or tenant may have fewer output tokens than the fleet."""
    seed: int = 0
    """Where prefix keys begin: equal prompts of two tenants have nothing in common."""
    hints: Hints = NO_HINTS
    """Of requests that say nothing of themselves."""
    salt: str = ""
    """The `cache_salt` of its requests; empty where nobody is told apart."""

    def limit_for(self, ask: Ask) -> Added:
        """Fields of a request that gives no limit of output tokens. The fleet's own limit is left out where prompt and answer
        might not fit together, or nobody said what fits: engines would refuse what they can answer with less, and they know that
        limit themselves."""
        if not self.own_limit:
            prompt, most = upper_bound(ask.fields, ask.prompt), self.config.max_model_len - TEMPLATE_TOKENS
            if prompt is None or prompt + self.config.max_output_tokens > most:
                return self.added
        return self.limited if "messages" in ask.fields else self.limited_completion


class Entry:
    """One tenant's lanes by class."""

    __slots__ = ("account", "decisions", "lanes", "named")

    def __init__(self, account: Account, default: Lane, named: dict[str, Lane], decisions: Decisions = "none") -> None:
        self.account = account
        self.decisions = decisions
        """Whose decision records its keys may read."""
        self.named = default
        """The lane of requests that name no class."""
        self.lanes = named


def classes_of(config: RouterConfig) -> dict[str, SloClass]:
    """By name; `default` is always there."""
    default = SloClass(name=DEFAULT, ttft_budget_s=config.ttft_budget_s)
    return {DEFAULT: default} | {one.name: one for one in config.classes}


def open_entry(config: RouterConfig, account: Account) -> Entry:
    """Everybody, where no tenants are configured: every class may be named, nothing is isolated from anything."""
    lanes = {name: _lane(one, config, account) for name, one in classes_of(config).items()}
    return Entry(account, lanes[DEFAULT], lanes)


def tenant_entries(
    config: RouterConfig, tenants: Tenants, accounts: dict[str, Account], now_ns: int
) -> tuple[KeyTable[Entry], list[str]]:
    """(keys, problems). `accounts` by tenant name are kept where they exist, made where not, forgotten with their tenant."""
    known, problems, rows = classes_of(config), list[str](), list[tuple[str, Entry]]()
    for gone in accounts.keys() - {tenant.name for tenant in tenants.tenants}:
        del accounts[gone]
    for tenant in tenants.tenants:
        account = accounts.setdefault(tenant.name, Account(tenant.name))
        account.follow(tenant, now_ns)
        names = [tenant.slo_class or DEFAULT, *tenant.classes]
        problems += [f"tenant {tenant.name}: no class {name} in this fleet" for name in names if name not in known]
        lanes = {name: _lane(known[name], config, account, tenant, tenants.salt) for name in names if name in known}
        first = lanes.get(names[0]) or _lane(known[DEFAULT], config, account, tenant, tenants.salt)
        rows += [(key, Entry(account, first, lanes, tenant.decisions)) for key in tenant.keys]
    return KeyTable(rows), problems


def _lane(slo_class: SloClass, config: RouterConfig, account: Account, tenant: Tenant | None = None, secret: str = "") -> Lane:
    most_in = _least(config.max_input_tokens, slo_class.max_input_tokens, tenant.max_input_tokens if tenant else None)
    most_out = _least(config.max_output_tokens, slo_class.max_output_tokens, tenant.max_output_tokens if tenant else None)
    own = msgspec.structs.replace(config, max_input_tokens=most_in, max_output_tokens=most_out)
    less = most_out < config.max_output_tokens
    chat, completion = (
        {"max_tokens": b"%d" % most} for most in (most_out, most_out if less else min(COMPLETION_TOKENS, most_out))
    )
    hints = hints_of(config, slo_class, {})
    if tenant is None:
        return Lane(
            account, slo_class, own, limited=_added(chat), limited_completion=_added(completion), own_limit=less, hints=hints
        )
    salt = salt_of(secret, tenant.name)
    models = None if tenant.models is None else frozenset(tenant.models)
    salted = {"cache_salt": b'"%b"' % salt.encode()}
    added, limited, completed = _added(salted), _added(salted | chat), _added(salted | completion)
    return Lane(account, slo_class, own, tenant.weight, models, added, limited, completed, less, int(salt[:16], 16), hints, salt)


def _added(fields: dict[str, bytes]) -> Added:
    text = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in fields.items())
    return {name: msgspec.Raw(value) for name, value in fields.items()}, text + b"}"


def salt_of(secret: str, tenant: str) -> str:
    """A tenant's cache salt, hex: nobody who knows another's can tell it."""
    return hmac.digest(secret.encode(), b"cache_salt:" + tenant.encode(), "sha256").hex()


def _least(most: int, *limits: int | None) -> int:
    return min([most, *(limit for limit in limits if limit is not None)])
