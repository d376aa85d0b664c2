"""What must be renewed now: a pure function of the certificates that exist and the time.

An authority is renewed in steps, each visible to everybody before the next: the new authority joins the bundle that the API
server trusts; when that has settled, serving certificates come from it; when those have settled, the old one leaves the bundle.
At no moment does a replica serve a certificate that the API server does not trust.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

DAY_S: Final = 86_400.0
BACKDATED_S: Final = 300.0
"""Certificates begin this long before they are made: clocks of other machines may lag."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Seconds. ValueError when an overlap does not fit."""

    authority_s: float = 365 * DAY_S
    serving_s: float = 90 * DAY_S
    settle_s: float = 600.0
    """Until every replica and the API server have seen a change."""

    def __post_init__(self) -> None:
        if self.settle_s * 10 > self.serving_s or self.serving_s * 2 > self.authority_s:
            raise ValueError("settle must be at most a tenth of serving, and serving at most half of the authority's lifetime")
        if self.settle_s < 1:
            raise ValueError("settle must be at least a second")


@dataclass(frozen=True, slots=True)
class Certificate:
    """One certificate; times in seconds since 1970."""

    key: str
    """Identifies its key pair."""
    issuer: str
    """Identifies the key pair that signed it."""
    not_before: float
    not_after: float
    names: frozenset[str] = frozenset()

    @property
    def made_at(self) -> float:
        """When it was made."""
        return self.not_before + BACKDATED_S

    def due_at(self) -> float:
        """After two thirds of its life."""
        return self.made_at + (self.not_after - self.made_at) * 2 / 3


@dataclass(frozen=True, slots=True)
class Stock:
    """What the Secret holds: authorities, oldest first, the last one signs; and the serving certificate."""

    authorities: tuple[Certificate, ...]
    serving: Certificate


@dataclass(frozen=True, slots=True)
class Work:
    """One step: everything anew, another authority, another serving certificate, old authorities out; or nothing."""

    step: Literal["everything", "authority", "serving", "prune", "nothing"]
    reason: str


def plan(stock: Stock | None, names: frozenset[str], now: float, life: Lifetimes, *, told: bool) -> Work:
    """The next step for a server called `names`; `told`: the API server trusts the whole bundle (or asks nobody)."""
    if stock is None or not stock.authorities or not _valid(stock.authorities[-1], now):
        return Work("everything", "there are no usable certificates")
    signing, serving = stock.authorities[-1], stock.serving
    if not _trusted(stock, now):
        return Work("serving", "the serving certificate is over or signed by nobody in the bundle")
    if names - serving.names:
        return Work("serving", f"it lacks {', '.join(sorted(names - serving.names))}")
    settled = told and now - signing.made_at >= life.settle_s
    if serving.issuer != signing.key and settled:
        return Work("serving", "the new authority has settled")
    if now >= signing.due_at():
        return Work("authority", "two thirds of the authority's life are over")
    if now >= serving.due_at() and settled:
        return Work("serving", "two thirds of its life are over")
    if len(stock.authorities) > 1 and serving.issuer == signing.key and now - serving.made_at >= life.settle_s:
        return Work("prune", "nobody serves a certificate of the old authority any more")
    return Work("nothing", "")


def _valid(certificate: Certificate, now: float) -> bool:
    return certificate.not_before <= now < certificate.not_after


def _trusted(stock: Stock, now: float) -> bool:
    issuers = {authority.key for authority in stock.authorities if _valid(authority, now)}
    return stock.serving.issuer in issuers and _valid(stock.serving, now)
