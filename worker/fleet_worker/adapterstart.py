"""What an adapter began with. Some starts are taken out of the base model, which PEFT changes in the training's memory: over the
model as it is stored, which engines serve, such an adapter answers with other tokens. vLLM does not look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PLAIN_STARTS: Final = frozenset({"gaussian", "eva", "orthogonal"})
"""init_lora_weights that leave the base model as it is. LoRA-GA does not: PEFT 0.21 subtracts what it begins with."""


def changes_base(found: Mapping[str, Any]) -> str:
    """Why an adapter with this adapter_config.json needs another base model than is served; empty: it does not. Converting it
    (PEFT: `path_initial_model_for_weight_conversion`) makes the field a plain true."""
    start = found.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        return f"init_lora_weights {start[:64]!r} changes the base model: convert it to a plain LoRA"
    return ""
