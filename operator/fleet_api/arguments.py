"""Arguments of `vllm serve` as the engine would understand them: long names, the last one wins."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHORT = {
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization",
    "-sc": "speculative-config", "-ac": "attention-config",
}  # fmt: skip

KEYS = {
    "spec-method": ("speculative-config", "method"), "spec-model": ("speculative-config", "model"),
    "spec-tokens": ("speculative-config", "num_speculative_tokens"),
}  # fmt: skip
"""Arguments that are one key of a JSON argument under a name of their own (vLLM 0.32, create_speculative_config)."""
DECIDED = tuple(
    f"--{name}" for name in (
        "host", "port", "served-model-name", "max-model-len", "kv-transfer-config", "kv-events-config", "tensor-parallel-size",
        "pipeline-parallel-size", "data-parallel-size", "data-parallel-rpc-port", "enable-expert-parallel", "quantization",
        "kv-cache-dtype", "enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-modules", "nnodes", "node-rank",
        "master-addr", "master-port", "headless", "config", "uds", "root-path", "api-key", "ssl-keyfile", "ssl-certfile", "grpc",
        "kv-offloading-size", "disable-log-stats",
    )
)  # fmt: skip
"""What fields decide (rules_pod.OWNED_ARGS, compat.OWNED), as workers know it: fleet_worker.agent.command, VLLM_DECIDED."""
LETTERS = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel", "-q": "--quantization", "-n": "--nnodes", "-r": "--node-rank",
}  # fmt: skip
"""Other names of some of these: VLLM_LETTERS there."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its name without dashes, its value (empty for a switch), and the field that it stands in."""

    name: str
    value: str
    field: str
    key: str = ""
    """The one key of a JSON argument that it sets; empty: it is the whole of it."""


def parse_arguments(words: Iterable[Any], field: str) -> Iterator[Argument]:
    """`--a=b`, `--a b`, `--a_b`, `--a.b c`, the short forms, `KEYS`; a word that belongs to none is a nameless argument."""
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
        name, _, rest = head.partition(".")  # --kv-transfer-config.kv_role sets one key of a JSON argument
        name = SHORT.get(name, name.lstrip("-")).replace("_", "-")
        name, rest = KEYS.get(name, (name, rest))
        yield Argument(name, f"{rest}={value}" if rest else value, at, rest)


def of_role(spec: Mapping[str, Any], index: int, role: str) -> dict[str, Argument]:
    """What workers of a role get: the fleet's arguments, then the role's own; the last of a name wins, of a JSON one the last
    of each key. JSON is in one form, however it was written."""
    tier = spec["tiers"][index]
    found = list(parse_arguments((spec.get("engine") or {}).get("args") or (), "spec.engine.args"))
    found += parse_arguments((tier.get(role) or {}).get("args") or (), f"spec.tiers[{index}].{role}.args")
    merged: dict[str, Argument] = {}
    for argument in found:
        merged[argument.name] = _over(merged.get(argument.name), argument)
    return merged


def _over(before: Argument | None, later: Argument) -> Argument:
    """Both of one name, as the engine puts them together."""
    if later.key:
        known = _json(before.value) if before is not None else {}
        value = _json(later.value.partition("=")[2])
        whole = {**(known if isinstance(known, dict) else {}), later.key: value}
    elif not isinstance(whole := _json(later.value), dict):
        return later
    return Argument(later.name, json.dumps(whole, sort_keys=True), later.field)


def _json(text: str) -> Any:
    """What it says; text that is no JSON is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def shortened(word: str) -> str | None:
    """Why workers refuse a word whose name argparse takes for one that fields decide: its beginning, its negation, its letter
    with the value behind it. None for any other word; whole names have rules of their own."""
    said = word.partition("=")[0].partition(".")[0]
    whole = _meant(said.replace("_", "-"))
    return f"{said} is short for {whole}, which other fields decide: write names in full" if whole is not None else None


def _meant(name: str) -> str | None:
    if name in DECIDED or name in LETTERS or name in ("-", "--"):
        return None
    if name.startswith("--"):
        switch = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        if switch != name and switch.startswith("--data-parallel"):
            return "--data-parallel-size"
        return next((decided for decided in DECIDED if decided.startswith(switch)), None)
    if name.startswith("-dp"):  # -dpl, -dph ...
        return LETTERS["-dp"]
    letters = (whole for letter, whole in LETTERS.items() if letter.startswith(name) or name[:2] == letter)
    return next(letters, None) if name.startswith("-") else None
