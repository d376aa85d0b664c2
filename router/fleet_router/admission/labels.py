"""Under which label a tenant is counted: the first so many have their own name, the others share one.

Whoever shares it stays there as long as it is known, and what it had counted stays there for ever: a sum that goes down looks
like a restart to whoever reads it, which takes all that is left of it for what came since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from fleet_router.admission.quota import Account

OWN_MOST: Final = 100
OTHERS: Final = "_others"
"""No tenant can be called so."""


class Told:
    """Of one label: requests by result, tokens by direction, and what is not over."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter({"input": 0, "output": 0})
        self.inflight = 0

    def add(self, account: Account) -> None:
        """What this one has counted."""
        self.results.update({result: count for result, count in account.counts.items() if count})
        self.tokens.update({"input": account.input_tokens, "output": account.output_tokens})
        self.inflight += account.inflight


class Labels:
    """One per process."""

    def __init__(self) -> None:
        self._own: dict[str, Account] = {}
        self._others: list[Account] = []
        """Also those of tenants that are gone, as long as something of them runs."""
        self._over = Told()
        """Of those of `_others` that are gone for good."""

    def follow(self, accounts: Mapping[str, Account]) -> None:
        """These are known now."""
        there = set(accounts.values())
        self._own = {name: account for name, account in self._own.items() if account in there}
        for account in self._others:
            if account not in there and not account.inflight:
                self._over.add(account)
        self._others = [account for account in self._others if account in there or account.inflight]
        placed = {*self._own.values(), *self._others}
        for account in accounts.values():
            if account in placed:
                continue
            if len(self._own) < OWN_MOST:
                self._own[account.name] = account
            else:
                self._others.append(account)

    def told(self) -> dict[str, Told]:
        """By label."""
        found = {name: told_of([account]) for name, account in self._own.items()}
        if self._others or self._over.results:
            found[OTHERS] = told_of(self._others, self._over)
        return found


def told_of(accounts: Iterable[Account], before: Told | None = None) -> Told:
    """What they have counted together."""
    found = Told()
    if before is not None:
        found.results.update(before.results)
        found.tokens.update(before.tokens)
    for account in accounts:
        found.add(account)
    return found
