"""The key that a fleet's pods share: its file, what is made of it, and proofs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_wire.keyfile import KeyFile
from fleet_wire.peerkey import GOSSIP, MOST_KEYS, SEED, derived, is_proven, longest_key_bytes, parse_lines, proof

KEY, NEXT = b"k" * 64, b"n" * 64


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (KEY, (KEY,)),
        (KEY + b"\n", (KEY,)),
        (b"  " + KEY + b" \r\n\n" + NEXT, (KEY, NEXT)),
        (b"", "no key"),
        (b"\n \n", "no key"),
        (b"k" * 31, "shorter"),
        (KEY + b"\nshort", "shorter"),
        (b"\n".join([KEY] * (MOST_KEYS + 1)), "more than"),
    ],
)
def test_a_file_has_keys_one_a_line_and_no_message_holds_one(raw: bytes, found: tuple[bytes, ...] | str):
    if not isinstance(found, str):
        assert parse_lines(raw) == found
        return
    with pytest.raises(ValueError, match=found) as error:
        parse_lines(raw)
    assert "kkkk" not in str(error.value)


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("mark", [b"", BOM], ids=["plain", "marked"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["unix", "windows", "old-mac"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "not-ended"])
@pytest.mark.parametrize("inside", [b"", BOM, b" " + BOM + b"\t"], ids=["", "put-together", "in-blanks"])
def test_a_windows_editor_makes_no_other_key(mark: bytes, end: bytes, last: bool, inside: bytes):
    """A mark before the first key was part of it: pods with that file did not understand those without."""
    raw = mark + KEY + end + inside + NEXT + (end if last else b"")
    assert parse_lines(raw) == (KEY, NEXT)
    assert longest_key_bytes(raw) == len(KEY)
    with pytest.raises(ValueError, match="no key"):
        parse_lines(mark + end + inside)


def test_a_marked_file_is_followed_as_one_without(tmp_path: Path):
    """Half of a key behind a mark is half of a key."""
    file = KeyFile(tmp_path / "key")
    file.path.write_bytes(BOM + KEY + b"\r\n")
    assert (file.look(), file.keys) == ("", (KEY,))
    file.path.write_bytes(BOM + KEY[:-1])
    file.look()
    assert "shorter than the one in use" in file.look()
    assert file.keys == (KEY,)


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_file_has_keys_or_is_an_error(raw: bytes, used: int):
    try:
        keys = parse_lines(raw, used)
    except ValueError:
        return
    assert keys
    assert all(len(key) >= 32 for key in keys)


def test_each_purpose_and_each_fleet_has_another_key():
    made = [derived((KEY, NEXT), purpose, scope) for purpose in (SEED, GOSSIP) for scope in ("a/f", "a/g", "b/f")]
    every = [key for one in made for key in one]
    assert len({*every, KEY, NEXT}) == 14
    assert all(len(key) == 32 for key in every)
    assert derived((KEY, NEXT), SEED, "a/f") == derived((KEY, NEXT), SEED, "a/f") == made[0]


@given(st.binary(max_size=80), st.lists(st.binary(max_size=20), max_size=3))
def test_noise_is_no_proof(noise: bytes, parts: list[bytes]):
    assert not is_proven(noise, (KEY, NEXT), *parts)
    assert not is_proven(noise, (), *parts)


@given(st.lists(st.binary(max_size=20), max_size=4), st.lists(st.binary(max_size=20), max_size=4))
def test_a_proof_is_of_these_parts_and_of_no_others(parts: list[bytes], others: list[bytes]):
    made = proof(NEXT, *parts)
    assert is_proven(made, (KEY, NEXT), *parts)
    assert not is_proven(made, (KEY,), *parts)
    assert is_proven(made, (NEXT,), *others) is (parts == others)


def test_a_file_that_comes_later_is_taken_at_once_and_one_that_goes_changes_nothing(tmp_path: Path):
    file = KeyFile(tmp_path / "key")
    assert [file.look(), file.look()] == ["No such file or directory", ""], "said once"
    assert (file.keys, file.is_outdated) == ((), False)
    file.path.write_bytes(KEY)
    assert (file.look(), file.keys, file.is_outdated) == ("", (KEY,), False)
    file.path.unlink()
    assert (file.look(), file.keys, file.is_outdated) == ("No such file or directory", (KEY,), True)
    file.path.write_bytes(NEXT + b"\n" + KEY)
    file.look()
    assert file.keys == (KEY,), "somebody may still write"
    file.look()
    assert (file.keys, file.is_outdated) == ((NEXT, KEY), False)


def test_a_file_that_goes_a_second_time_is_told_a_second_time(tmp_path: Path):
    """The same file was back in between: nothing had to be read, and it counted as if it had never been back."""
    file, away = KeyFile(tmp_path / "key"), tmp_path / "away"
    file.path.write_bytes(KEY)
    assert file.look() == ""
    for _ in range(2):
        file.path.rename(away)
        assert [file.look(), file.look()] == ["No such file or directory", ""]
        away.rename(file.path)
        assert (file.look(), file.is_outdated) == ("", False)
