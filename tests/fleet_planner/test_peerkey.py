"""Which key workers have, and what is said of those that have not the one of today."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.peerkey import OWN, pending, told, wished
from fleet_planner.types import Template
from tests.fleet_planner.test_adapters import pod


def fleet(*, named: str = "", engine: str = "torch") -> InferenceFleet:
    vllm = {"type": "vllm", "image": "registry.example/vllm:1"}
    return InferenceFleet.model_validate(
        {
            "metadata": {"name": "f", "namespace": "n", "uid": "u"},
            "spec": {
                "model": {"source": "file:///models/tiny"},
                "tiers": [{"name": "t", "accelerator": {"type": "cpu"}}],
                "engine": vllm if engine == "vllm" else {},
                **({"peerKey": {"secretRef": {"name": named}}} if named else {}),
            },
        }
    )


KEYS = {"mine": "mine/key", "next": "next/key", "own": OWN, "bare": None}
STORED = {"t": {name: Template(name, "c", key=key) for name, key in KEYS.items()}}
ROLLOUT, OLDER = "the rollout replaces them", "the revision of tier t is older than keys: another value of the annotation"


@pytest.mark.parametrize(
    ("have", "wanted", "words"),
    [
        ([], "mine", ()),
        (["mine", "mine"], "mine", ()),
        (["mine", "own"], "mine", ("of 2 workers 1 have another key, not", ROLLOUT)),
        (["own", "next", "bare"], "mine", ("of 3 workers 2 have another key and 1 have none and give KV to", ROLLOUT)),
        (["bare", "bare"], "bare", ("of 2 workers 2 have none and give KV to whoever reaches them, not", OLDER)),
        (["mine", "gone"], "mine", ()),
    ],
)
def test_who_has_another_key_than_the_named_one_is_told_of(have: list[str], wanted: str, words: tuple[str, ...]):
    pods = [pod(f"p{at}", revision=revision) for at, revision in enumerate(have)]
    found = pending(fleet(named="mine"), pods, STORED, {"t": STORED["t"][wanted]})
    assert (found is None) == (not words)
    assert found is None or (found[:2] == ("False", "PeerKeyPending") and all(word in found[2] for word in words))


@pytest.mark.parametrize("changes", [{"terminating": True}, {"member": 1}, {"tier": "u"}])
def test_who_goes_or_is_a_part_of_another_is_not_counted(changes: dict[str, Any]):
    assert pending(fleet(named="mine"), [pod("p", revision="own", **changes)], STORED, {"t": STORED["t"]["mine"]}) is None


@pytest.mark.parametrize("other", [fleet(), fleet(named="mine", engine="vllm")], ids=["not-named", "vllm"])
def test_where_no_key_is_named_or_none_is_known_there_is_nothing_to_say(other: InferenceFleet):
    assert pending(other, [pod("p", revision="next")], STORED, {"t": STORED["t"]["mine"]}) is None


@pytest.mark.parametrize(
    ("secret", "key", "expected"),
    [
        ("mine", "k", "mine/k"),
        ("f-peers-0a1b2c3d", "key", OWN),
        ("f-peers-", "key", "f-peers-/key"),
        ("g-peers-0a1b2c3d", "key", "g-peers-0a1b2c3d/key"),
    ],
)
def test_the_operators_secret_is_one_whatever_uid_it_was_made_for(secret: str, key: str, expected: str):
    assert told("f", secret, key) == expected
    assert wished(fleet()) == OWN
    assert wished(fleet(named="mine")) == "mine/key"
