"""Keys and the tenants file: who is who, and nothing secret anywhere else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.admission.keys import MAX_KEY_BYTES, MET_MOST, KeyTable, bearer
from fleet_router.admission.lanes import salt_of
from fleet_router.admission.tenants import TenantsError, parse_tenants
from tests.fleet_router.admission.made import SALT, hash_of, key_of, parsed, tenants_file


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"BEARER abc", b"abc"), (b"Basic abc", b""), (b"abc", b""),
        (b"", b""), (b"Bearer", b""), (b"Bearer ", b""),
    ],
)  # fmt: skip
def test_bearer(value: bytes, key: bytes):
    assert bearer(value) == key


@given(st.binary(max_size=600))
def test_nobody_elses_bytes_are_a_key(key: bytes):
    table = KeyTable([(hash_of("right"), "acme")])
    assert table.find(key) == ("acme" if key == b"right" else None)
    assert table.find(b"right") == "acme"


def test_a_hash_is_no_key():
    table = KeyTable([(hash_of("right"), "acme")])
    assert table.find(hash_of("right").encode()) is None
    assert table.find(bytes.fromhex(hash_of("right")[7:])) is None


@pytest.mark.parametrize(
    ("key", "whose"),
    [("", None), ("x", "acme"), ("x" * MAX_KEY_BYTES, "acme"), ("x" * (MAX_KEY_BYTES + 1), None)],
)
def test_what_is_no_key_is_nobodys_whatever_the_file_says(key: str, whose: str | None):
    """The hash of nothing (`sha256sum` of a variable that was not set) would let everybody in who has no key."""
    assert KeyTable([(hash_of(key), "acme")]).find(key.encode()) == whose


def test_a_table_says_nothing_of_its_keys():
    assert repr(KeyTable([(hash_of("right"), "acme")])) == "KeyTable(1 keys)"


BAD = {
    "unknown field": ({"a": {"requestPerSecond": 5}}, "unknown"),
    "no limit": ({"a": {"requestsPerSecond": 0}}, "requestsPerSecond"),
    "key in the clear": ({"a": {"keys": [key_of("a")]}}, "keys"),
    "weight": ({"a": {"weight": 0}}, "weight"),
    "burst": ({"a": {"requestsBurst": "5"}}, "requestsBurst"),
    "class": ({"a": {"class": "With Spaces"}}, "class"),
    "decisions": ({"a": {"decisions": key_of("a")}}, "must be one of none, own, all - at `$.tenants[0].decisions`"),
    "decisions with lines": (
        {"a": {"decisions": f"{key_of('a')}' - at `\n{key_of('a')}"}},
        "must be one of none, own, all - at `$",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_name_the_field_and_no_value(name: str):
    tenants, field = BAD[name]
    with pytest.raises(TenantsError) as told:
        parsed(**tenants)
    assert field in str(told.value)
    assert key_of("a") not in str(told.value)
    assert told.value.__cause__ is None  # a traceback would show the values, too


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "tenant a is there twice"),
        ([{"name": "a", "keys": [hash_of("k")]}, {"name": "b", "keys": [hash_of("k")]}], "tenants a and b have the same key"),
    ],
)
def test_two_tenants_are_two(rows: list[dict[str, object]], words: str):
    with pytest.raises(TenantsError, match=words):
        parse_tenants(json.dumps({"salt": SALT, "tenants": rows}).encode())


def test_a_secret_in_the_place_of_a_name_is_not_repeated():
    for raw in (b'{"salt":"%b","sk-secret":1}' % SALT.encode(), b'{"salt":"sk-secret"}', b'{"salt":sk-secret}', b"sk-secret"):
        with pytest.raises(TenantsError) as told:
            parse_tenants(raw)
        assert "sk-secret" not in str(told.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "windows"])
def test_a_windows_editor_makes_no_other_file(mark: bytes, end: bytes):
    """With a mark before it the file was refused: a new router did not start."""
    plain = tenants_file(acme={})
    assert parse_tenants(mark + plain.replace(b",", b"," + end) + end) == parse_tenants(plain)


def test_the_salt_is_needed():
    with pytest.raises(TenantsError, match="salt"):
        parse_tenants(b'{"tenants":[]}')


NAMES = st.sampled_from(["salt", "tenants", "name", "keys", "class"]) | st.text()
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_whatever_the_file_holds_it_is_parsed_or_refused(raw: bytes):
    try:
        found = parse_tenants(raw)
    except TenantsError:
        return
    assert found.tenants == () or found.tenants[0].name


def test_a_file_that_is_too_large_is_not_parsed():
    with pytest.raises(TenantsError, match="larger"):
        parse_tenants(tenants_file() + b" " * 1024 * 1024)


def test_salts_differ_by_tenant_and_by_secret():
    assert len({salt_of(secret, tenant) for secret in (SALT, SALT + "x") for tenant in ("a", "b")}) == 4
    assert salt_of(SALT, "a") == salt_of(SALT, "a")


def test_keys_are_remembered_up_to_a_bound_and_nobodys_never():
    table = KeyTable([(hash_of(f"key-{i}"), i) for i in range(MET_MOST + 5)])
    for _ in range(2):
        for i in range(MET_MOST + 5):
            assert table.find(f"key-{i}".encode()) == i
            assert table.find(f"nobody-{i}".encode()) is None
            assert len(table._met) <= MET_MOST
    assert not any(key.startswith(b"nobody") for key in table._met)
