"""Datagrams: what is ours, what is not, and that everything fits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.gossip.message import (
    DATAGRAM_BYTES,
    SKEW_MS,
    Hint,
    Load,
    Message,
    Refused,
    Use,
    parse_keys,
    seal,
    unseal,
)  # fmt: skip

KEYS = parse_keys(b"a" * 32 + b"\n" + b"b" * 32)
NOW = 1_700_000_000_000
MESSAGE = Message(1, 2**64 - 1, 1, NOW, 5, (Load(1, 2, 3, 4, 5),), (Use(1, 2, -3, 4),), (Hint(1, (2**64 - 1, 3)),))


def refused(data: bytes, now: int = NOW, keys: tuple[bytes, ...] = KEYS) -> str:
    with pytest.raises(Refused) as why:
        unseal(data, keys, now)
    return why.value.reason


@pytest.mark.parametrize("key", KEYS)
def test_whoever_has_one_of_the_keys_is_heard(key: bytes):
    assert unseal(seal(MESSAGE, key), KEYS, NOW) == MESSAGE


def test_a_new_key_is_heard_before_it_is_used_and_an_old_one_is_nobodys():
    old, new = parse_keys(b"o" * 32), parse_keys(b"o" * 32 + b"\n" + b"n" * 32)
    assert unseal(seal(MESSAGE, new[1]), new, NOW) == MESSAGE
    assert refused(seal(MESSAGE, old[0]), keys=new[1:]) == "signature"


@pytest.mark.parametrize(("skew", "heard"), [(SKEW_MS, True), (SKEW_MS + 1, False), (-SKEW_MS, True), (-SKEW_MS - 1, False)])
def test_what_was_said_long_ago_is_refused(skew: int, heard: bool):
    data = seal(MESSAGE, KEYS[0])
    assert unseal(data, KEYS, NOW + skew) == MESSAGE if heard else refused(data, NOW + skew) == "clock"


@given(at=st.integers(0, 100), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed(at: int, bit: int):
    data = bytearray(seal(MESSAGE, KEYS[0]))
    data[at % len(data)] ^= 1 << bit
    assert refused(bytes(data)) == "signature"


@given(st.binary(max_size=DATAGRAM_BYTES + 50))
def test_noise_is_refused_whatever_it_is(noise: bytes):
    assert refused(noise) in ("size", "signature")


@given(st.binary(max_size=200))
def test_noise_with_a_right_signature_is_refused_as_well(noise: bytes):
    from fleet_router.gossip.message import _mac

    assert refused(_mac(noise, KEYS[0]) + noise) in ("format", "size")


@pytest.mark.parametrize(
    "bad",
    [
        {"version": 2}, {"loads": (Load(1, -1, 0, 0, 0),)}, {"loads": (Load(1, 1, 0, 0, -1),)}, {"number": -1},
        {"hints": (Hint(1, ()),)}, {"hints": (Hint(1, tuple(range(121))),)}, {"loads": (Load(1, 10**7, 0, 0, 0),)},
    ],
)  # fmt: skip
def test_numbers_beyond_their_bounds_are_refused(bad: dict[str, object]):
    assert refused(seal(msgspec.structs.replace(MESSAGE, **bad), KEYS[0])) == "format"


@pytest.mark.parametrize("raw", [b"", b"\n \n", b"short", b"a" * 32 + b"\nshort"])
def test_a_key_file_without_good_keys_is_an_error(raw: bytes):
    with pytest.raises(ValueError, match="key"):
        parse_keys(raw)
