"""The adapter conformance suite on the torch engine, and what only our engine promises: KV of another version is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_cli.up.bundled import tiny_model
from tests.conformance.adapters import Adapted, AdapterConformance, adapted_pair, ask, tokens


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    with adapted_pair(tiny_model(), tmp_path_factory.mktemp("adapters"), ("127.78.1.1", "127.78.1.2"), {}) as made:
        yield made


class TestTorchAdapters(AdapterConformance):
    """Inherits every case."""

    def test_kv_of_the_base_model_or_of_another_adapter_is_refused(self, adapted: Adapted):
        """A 503 that says try again, never a 200 with wrong tokens."""
        adapted.tell(a="one", b="two")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        for made, asked in (("tiny", "a"), ("a", "tiny"), ("a", "b")):
            given = ask(adapted.prefill, made, max_tokens=1, kv_transfer_params=params).json()["kv_transfer_params"]
            refused = ask(adapted.decode, asked, kv_transfer_params=given)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "KvTransferError"), (made, asked)
            adapted.prefill.post("/kv/release", {"lease_id": given["lease_id"]})

    def test_nobody_but_the_agent_loads(self, adapted: Adapted):
        refused = adapted.decode.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"})
        assert refused.status_code == 403

    def test_kv_of_another_version_is_refused(self, adapted: Adapted):
        adapted.tell(a="one")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        given = ask(adapted.prefill, "a", max_tokens=1, kv_transfer_params=params).json()["kv_transfer_params"]
        adapted.tell(a="two")
        assert ask(adapted.decode, "a", kv_transfer_params=given).status_code == 503
        assert tokens(ask(adapted.decode, "a")) == adapted.expected["two"]
