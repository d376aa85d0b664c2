"""Which of a repository's weights an engine reads, where it holds them twice: as transformers names them and, as Mistral's do,
once more as `consolidated*.safetensors`. Pure; the operator asks it, too, for who fetches ahead.

transformers, and the torch engine with it, reads `model.safetensors` or the shards that an index lists. vLLM's own `auto` takes
`consolidated*.safetensors` alone where there is one (default_loader.py of 0.32; since 0.12); told otherwise by an argument, or by
a quantization that may have a loader of its own, it may read anything.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

WEIGHTS_ENV: Final = "FLEET_FETCH_WEIGHTS"
"""What `fleet-worker fetch` need not bring: a Reads; without it all is fetched."""
Reads = Literal["all", "shards", "consolidated"]
"""Which of both an engine reads; all: it is not certain."""
INDEX: Final = "model.safetensors.index.json"
CONSOLIDATED: Final = re.compile(r"consolidated[^/]*\.safetensors")
SHARD: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
ONE_OF: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
INDEXES: Final = ".safetensors.index.json"
OTHER_FORM: Final[Mapping[Reads, tuple[str, ...]]] = {
    "all": (), "shards": ("consolidated*.safetensors",), "consolidated": ("model.safetensors", "model-*-of-*.safetensors"),
}  # fmt: skip
"""What may be left out, as patterns, where nobody can say what a repository has."""
LOAD_FORMAT: Final = "--loa"
"""How `--load-format` begins, however it is shortened."""


def read_by(engine: str, engine_args: Sequence[str], quantization: str | None) -> Reads:
    """What this engine reads."""
    if engine == "torch":
        return "shards"
    decided = quantization is not None or any(word.startswith(LOAD_FORMAT) for word in engine_args)
    return "all" if engine != "vllm" or decided else "consolidated"


def as_reads(text: str) -> Reads:
    """WEIGHTS_ENV; another version's word says nothing."""
    return "shards" if text == "shards" else "consolidated" if text == "consolidated" else "all"


def unread(names: Collection[str], reads: Reads) -> frozenset[str]:
    """Those of a repository's files that hold the weights once more, in the form that is not read."""
    consolidated = frozenset(name for name in names if CONSOLIDATED.fullmatch(name))
    shards = frozenset(name for name in names if SHARD.fullmatch(name))
    is_twice = consolidated and ("model.safetensors" in shards or (shards and INDEX in names))
    if not is_twice or reads == "all":
        return frozenset()
    return consolidated if reads == "shards" else shards


def part_of(names: Collection[str]) -> str | None:
    """What a folder holds a part of, where its files' own names say so: a copy that goes on, or was broken off. An index comes
    last; without one vLLM takes what is there, and of a quantized model it does not ask for the rest. With one, engines do;
    beside weights in one file, shards may be of another time."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if name.endswith(INDEXES) or CONSOLIDATED.fullmatch(name) or name == "model.safetensors":
            return None
        if shard := ONE_OF.fullmatch(name):
            found.setdefault((shard[1], shard[3]), set()).add(int(shard[2]))
    told = (
        f"{len(has)} of the {int(of)} files {name}-*-of-{of}.safetensors"
        for (name, of), has in found.items()
        if len(has) < int(of)
    )
    return next(told, None)
