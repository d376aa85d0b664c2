"""Scalars are read as kubectl reads them. The table is what sigs.k8s.io/yaml 1.6.0 (YAMLToJSONStrict) answered."""

from __future__ import annotations

import pytest
import yaml

from fleet_cli.kubeyaml import KubeLoader

SAME = [
    "8:32", "190:20:30", "2024-01-01", "2024-13-45", "2024-01-01T00:00:00Z", "_1", "e3", "inf", "nan", "nUll", "tRue", "0x",
    "0o", "0b", "12abc", "1e", "0x1p4", "1,000", "--", "+", ".", "..", "12e400", "1e1000", "=", "<<",
]  # fmt: skip
READ = {
    "017": 15, "0o17": 15, "08": 8, "09": 9, "0x1F": 31, "0X1f": 31, "0b101": 5, "0B1": 1, "-0b1": -1, "+12": 12, "-12": -12,
    "1_000": 1000, "1_0.5": 10.5, "1__0": 10, "1.": 1, ".5": 0.5, "-.5": -0.5, "+.5": 0.5, "1e3": 1000, "1E3": 1000, "1e+3": 1000,
    "1.5e-3": 0.0015, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True, "yes": True,
    "Yes": True, "YES": True, "y": True, "Y": True, "n": False, "N": False, "no": False, "off": False, "Off": False, "on": True,
    "ON": True, "On": True, "9223372036854775807": 9223372036854775807, "9223372036854775808": 9223372036854775808,
    "18446744073709551615": 18446744073709551615, "18446744073709551616": 18446744073709551616.0,
    "-9223372036854775808": -9223372036854775808, "-9223372036854775809": -9223372036854775809.0,
    "123456789012345678901234567890": 1.2345678901234568e29, "-0x1F": -31, "+0x1F": 31, "-017": -15, "00": 0, "0_7": 7,
    "0777777777777777777777777": 7.777777777777778e23, "0.0": 0, "-0": 0, "1.0": 1, "4096.0": 4096, "1e-400": 0,
    "685.230_15e+03": 685230.15, "!!str 12": "12", '!!int "12"': 12, "!!float 3": 3, "!!timestamp 2024-01-01": "2024-01-01",
    "!!binary aGk=": "hi", "!!bool yes": True, "!!seq [1]": [1], "'8:32'": "8:32", '"yes"': "yes",
}  # fmt: skip


def load(text: str):
    return KubeLoader(text).get_single_data()


@pytest.mark.parametrize("text", [*SAME, "9" * 5000])
def test_it_stays_text(text: str):
    assert load(f"a: {text}") == {"a": text}


@pytest.mark.parametrize(("text", "value"), READ.items())
def test_it_is_read_as_kubectl_does(text: str, value):
    found = load(f"a: {text}")["a"]
    assert (found, isinstance(found, bool), isinstance(found, str)) == (value, isinstance(value, bool), isinstance(value, str))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5: x", {"5": "x"}),
        ("yes: x", {"true": "x"}),
        ("1.5: x", {"1.5": "x"}),
        ("1e3: x", {"1000": "x"}),
        ("2024-01-01: x", {"2024-01-01": "x"}),
        ("b: &b {c: 1}\na:\n  <<: *b\n  d: 2", {"b": {"c": 1}, "a": {"c": 1, "d": 2}}),
    ],
)
def test_keys_are_text(text: str, value):
    assert load(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{<<: *x, a: 3}", {"a": 3, "b": 1}),
        ("{a: 3, <<: *x}", {"a": 1, "b": 1}),
        ("{<<: [*x, *y]}", {"a": 1, "b": 1, "c": 2}),
        ("{<<: *x, <<: *y}", {"a": 2, "b": 1, "c": 2}),
        ("{<<: [*y, {b: 4}]}", {"a": 2, "b": 4, "c": 2}),
        ("{<<: *z}", {"a": 9, "b": 1}),
        ("{a: 3, <<: *z}", {"a": 9, "b": 1}),
    ],
)
def test_what_is_merged_stands_where_it_was_written(text: str, value: dict[str, int]):
    """What kubectl 1.32 answered. Keys before a << won, so that `fleet up` ran another fleet than `kubectl apply`; and a map with
    a << of its own could not be merged further up: "key already set in map"."""
    written = f"x: &x {{a: 1, b: 1}}\ny: &y {{a: 2, c: 2}}\ndeep: {{er: &z {{<<: *x, a: 9}}}}\nspec: {text}\n"
    found = load(written)
    assert found["spec"] == value
    assert found["deep"] == {"er": {"a": 9, "b": 1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: .inf", "unsupported value: .inf"),
        ("a: .NaN", "unsupported value: .NaN"),
        ("a: !!int x", "cannot decode `x` as a !!int"),
        ("a: !!null x", "cannot decode `x` as a !!null"),
        ("a: !!int [1]", "as a !!int"),
        ("null: x", "a key must be text, not null"),
        ("? [a]\n: b", "a key must be text"),
        ("0x10: x\n16: y", 'key "16" already set in map'),
        ("a: {<<: 1}", "<< merges a map or a list of maps"),
        ("a: {<<: [{b: 1}, 2]}", "<< merges a map or a list of maps"),
        ("a: !!set {x}", "could not determine a constructor"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a: !!binary '*'", "!!binary value holds no base64 text"),
    ],
)
def test_what_json_cannot_hold_is_one_clear_error(text: str, words: str):
    with pytest.raises(yaml.YAMLError) as refused:
        load(text)
    assert words in str(refused.value)
