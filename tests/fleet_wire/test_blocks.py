"""Names of blocks and prompts: routers and workers of two versions agree on them while one is rolled out."""

from __future__ import annotations

import struct

import pytest

from fleet_wire.blocks import adapter_salt, chain, chain_packed, prompt_name, root_hash, salted_root, sealed, tenant_root

ROOT = root_hash("m", 4)
TOKENS = [0, 1, 2, 3, 70_000, 2**32 - 1, 6, 7, 8]
CHAIN = ["ee16f1b00a28b407c5d7414b8bc7f1c0", "b58b2f04e6da4d98ad3249304fac124a"]
SALTED = "6496d6593efbf2986679244659fb0c0f"
TENANT = "f0f3f27301ac8cc5b74eeba5615eec1c"
PROMPT = "7630a4f652018f6c05d056808d284566"
SEALED = "25be57a3761c3b1d42750671da430f93"


@pytest.mark.parametrize("count", range(len(TOKENS) + 1))
@pytest.mark.parametrize("block_tokens", [1, 2, 4])
def test_packed_ids_have_the_names_of_the_ids(count: int, block_tokens: int):
    packed = struct.pack(f"<{count}I", *TOKENS[:count])
    named = list(chain(ROOT, TOKENS[:count], block_tokens))
    assert (named, len(named)) == (chain_packed(ROOT, packed, block_tokens), count // block_tokens)


def test_names_are_those_that_other_versions_give():
    """Another name here is another wire format: caches that are not found, hand-offs that are refused."""
    assert [name.hex() for name in chain(ROOT, TOKENS, 4)] == CHAIN
    assert salted_root(ROOT, adapter_salt("a", "1")).hex() == SALTED
    assert tenant_root(ROOT, "s").hex() == TENANT
    assert prompt_name(TOKENS, "a@1", "s", "w") == PROMPT
    assert sealed(PROMPT, "0" * 16) == SEALED


def test_what_kv_depends_on_has_names_of_its_own():
    roots = {ROOT, root_hash("m", 5), root_hash("n", 4), root_hash("m", 4, "s"), salted_root(ROOT, "s"), tenant_root(ROOT, "s")}
    assert len(roots) == 6
    prompts = {prompt_name([1], *salts) for salts in (("", "", ""), ("s", "", ""), ("", "s", ""), ("", "", "s"), ("s", "s", ""))}
    assert len(prompts | {prompt_name([1, 2])}) == 6
    assert adapter_salt("a", "1") == "a@1"
