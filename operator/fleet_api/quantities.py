"""Durations, byte quantities and prefill:decode ratios: strings at the edge, typed values inside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Final

TEXTS_KEPT: Final = 1_024
"""Texts whose value is remembered: every pass over a fleet asks for the same few again."""
DURATION_PATTERN = r"^[0-9]{1,6}(ms|s|m|h)$"
"""Six digits: 999999h still fits the 64 bits of nanoseconds in which the API server's CEL counts."""
QUANTITY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
CPU_PATTERN = r"^[0-9]{1,6}(\.[0-9]{1,3}|m)?$"
RATIO_PATTERN = r"^[1-9][0-9]?:[1-9][0-9]?$"

_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
_BYTES = {
    "": 1,
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}


@dataclass(frozen=True, slots=True, order=False)
class Ratio:
    """Prefill workers to decode workers; "1:4" is one prefill worker for four decode workers. Both parts are at least 1."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ValueError(f"both parts of a ratio must be at least 1, not {self.prefill}:{self.decode}")

    @property
    def value(self) -> Fraction:
        """Prefill divided by decode, exactly."""
        return Fraction(self.prefill, self.decode)

    def allows(self, prefill: int, decode: int) -> tuple[bool, bool]:
        """(prefill/decode >= this ratio, prefill/decode <= this ratio), without division."""
        left, right = prefill * self.decode, self.prefill * decode
        return left >= right, left <= right

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@lru_cache(TEXTS_KEPT)
def parse_duration(text: str) -> float:
    """Seconds of "250ms", "30s", "2m" or "1h"; ValueError for anything else."""
    if not re.fullmatch(DURATION_PATTERN[1:-1], text):
        raise ValueError(f"{text!r} is not a duration such as 250ms, 30s, 2m or 1h")
    unit = text.lstrip("0123456789")
    return float(int(text.removesuffix(unit)) * _SECONDS[unit])


@lru_cache(TEXTS_KEPT)
def parse_quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as "64Mi" or "1.5G", rounded up as Kubernetes does; ValueError for anything else."""
    if not re.fullmatch(QUANTITY_PATTERN[1:-1], text):
        raise ValueError(f"{text!r} is not a quantity such as 64Mi or 1.5G")
    return int(exact_quantity(text).to_integral_value(rounding=ROUND_CEILING))


def exact_quantity(text: str) -> Decimal:
    """Bytes or cores of text that QUANTITY_PATTERN or CPU_PATTERN fits."""
    unit = text.lstrip("0123456789.")
    number = Decimal(text.removesuffix(unit))
    return number / 1000 if unit == "m" else number * _BYTES[unit]


@lru_cache(TEXTS_KEPT)
def parse_ratio(text: str) -> Ratio:
    """The Ratio of "1:4" (prefill:decode); ValueError for anything else."""
    if not re.fullmatch(RATIO_PATTERN[1:-1], text):
        raise ValueError(f"{text!r} is not a prefill:decode ratio such as 1:4")
    prefill, decode = text.split(":")
    return Ratio(int(prefill), int(decode))


def format_ratio(prefill: int, decode: int) -> str:
    """ "1:2" for 2 and 4: the ratio in lowest terms; "0:3" when one side is missing."""
    if prefill < 1 or decode < 1:
        return f"{prefill}:{decode}"
    exact = Fraction(prefill, decode)
    return f"{exact.numerator}:{exact.denominator}"
