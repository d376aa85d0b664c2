"""The tenants file (a key of a mounted Secret): JSON, everything typed and bounded, unknown fields refused.

Refused, unlike in the router's configuration: a limit with a typing error in its name would be no limit. Errors name the field
and never its value, because a person may have put a key where its hash belongs.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import Counter
from typing import Annotated, Final, Literal, get_args

import msgspec

from fleet_wire.unreadable import UNREADABLE

MAX_BYTES: Final = 1024 * 1024
"""A Secret cannot be larger."""
NAME: Final = r"^[a-z0-9]([-._a-z0-9]{0,61}[a-z0-9])?\Z"
KEY_HASH: Final = r"^sha256:[0-9a-f]{64}$"

Name = Annotated[str, msgspec.Meta(pattern=NAME)]
KeyHash = Annotated[str, msgspec.Meta(pattern=KEY_HASH)]
Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
Decisions = Literal["none", "own", "all"]


class TenantsError(ValueError):
    """The file cannot be used; the message names the field."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One tenant: its keys and what it may do. What is not given is not limited."""

    name: Name
    keys: Annotated[tuple[KeyHash, ...], msgspec.Meta(max_length=64)] = ()
    """sha256:HEX of each key; several, so that keys can be replaced without a gap."""
    slo_class: Name | None = msgspec.field(default=None, name="class")
    """Class of its requests; None: `default`."""
    classes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)] = ()
    """Classes that its requests may name besides."""
    models: Annotated[tuple[Model, ...], msgspec.Meta(max_length=256)] | None = None
    """Models and adapters that it may ask for; None: every one."""
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=1000)] = 1.0
    """Its share when requests wait, against the other tenants' of the same class."""
    requests_per_second: Annotated[float, msgspec.Meta(ge=0.001, le=1_000_000)] | None = None
    requests_burst: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Requests at once after a pause; None: one second's worth, at least one."""
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] | None = None
    """Prompt and output tokens together."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Requests that wait or run at the same time."""
    max_input_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    decisions: Decisions = "none"
    """Whose decision records its keys may read: nobody's, its own requests', everybody's."""


class Tenants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """The whole file."""

    salt: Annotated[str, msgspec.Meta(min_length=32, max_length=1024)]
    """Secret from which every tenant's cache salt comes. The same for all routers; a new one empties all prefix caches."""
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=10_000)] = ()


_DECODER: Final = msgspec.json.Decoder(Tenants)


def parse_tenants(raw: bytes) -> Tenants:
    """TenantsError says what is wrong, without any value of the file."""
    if len(raw) > MAX_BYTES:
        raise TenantsError(f"the tenants file is larger than {MAX_BYTES} bytes")
    try:
        found = _DECODER.decode(raw.removeprefix(BOM_UTF8))  # Windows' editors put it there
    except msgspec.ValidationError as error:
        raise TenantsError(_worded(str(error))) from None
    except UNREADABLE as error:
        raise TenantsError(f"not valid JSON ({type(error).__name__})") from None
    if twice := [name for name, count in Counter(t.name for t in found.tenants).items() if count > 1]:
        raise TenantsError(f"tenant {twice[0]} is there twice")
    owners: dict[str, str] = {}
    for tenant in found.tenants:
        for key in tenant.keys:
            if owners.setdefault(key, tenant.name) != tenant.name:
                raise TenantsError(f"tenants {owners[key]} and {tenant.name} have the same key")
    return found


def _worded(message: str) -> str:
    """msgspec's words; an unknown field and an unknown value may be a secret in the wrong place, so that neither is repeated."""
    known = re.sub(
        r"^Invalid enum value .*(?= - at `)", f"must be one of {', '.join(get_args(Decisions))}", message, flags=re.DOTALL
    )
    return re.sub(r"unknown field `[^`]*`", "an unknown field", known)
