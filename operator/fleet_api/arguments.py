"""Arguments of `vllm serve` as the engine would understand them: long names, the last one wins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization",
    "-sc": "speculative-config", "-ac": "attention-config",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its name without dashes, its value (empty for a switch), and the field that it stands in."""

    name: str
    value: str
    field: str


def parse_arguments(words: Iterable[Any], field: str) -> Iterator[Argument]:
    """`--a=b`, `--a b`, `--a_b`, `--a.b c` and the short forms; a word that belongs to none is its own nameless argument."""
    words = [str(word) for word in words]
    index = 0
    while index < len(words):
        word, at = words[index], f"{field}[{index}]"
        index += 1
        if not word.startswith("-") or len(word) < 3:
            yield Argument("", word, at)
            continue
        head, equals, value = word.partition("=")
        if not equals and index < len(words) and not words[index].startswith("-"):
            value = words[index]
            index += 1
        head = SHORT.get(head, head.lstrip("-"))
        name, _, rest = head.partition(".")  # --kv-transfer-config.kv_role sets one key of a JSON argument
        yield Argument(name.replace("_", "-"), f"{rest}={value}" if rest else value, at)


def of_role(spec: Mapping[str, Any], index: int, role: str) -> dict[str, Argument]:
    """What workers of a role get: the fleet's arguments, then the role's own; the last of a name wins."""
    tier = spec["tiers"][index]
    found = list(parse_arguments((spec.get("engine") or {}).get("args") or (), "spec.engine.args"))
    found += parse_arguments((tier.get(role) or {}).get("args") or (), f"spec.tiers[{index}].{role}.args")
    return {argument.name: argument for argument in found}
