"""Makes the tiny Llama that the bundled fleet and the tests run: no weights can be downloaded where they run.

4 layers, hidden 256, 8 query and 4 key/value heads, vocabulary 1,024: 3.4 million parameters, random from a fixed seed. The
weights are scaled so that greedy decoding neither collapses to one token nor ends at once, and so that the two best logits
lie far apart compared with float32 rounding. transformers and vLLM load the folder unchanged.

`python -m fleet_worker.tinymodel DIR` writes it; an existing folder is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 20_260_712
VOCABULARY = 1_024
HIDDEN = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_DIM = HIDDEN // HEADS
INTERMEDIATE = 688
MAX_POSITIONS = 4_096
SPECIAL = ("<unk>", "<s>", "</s>")
EOS_ID = 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_SUBJECTS = ("the router", "a worker", "the operator", "one tier", "every request", "the cache", "a lease", "our fleet")
_VERBS = ("moves", "keeps", "reads", "holds", "sends", "counts", "drains", "answers", "plans", "measures", "returns")
_OBJECTS = ("a block of keys and values", "the next token", "its prompt", "two replicas", "the longest prefix", "the ratio")
_ENDS = (
    "before noon.",
    "without loss.",
    "in 12 ms.",
    "at 3 am?",
    "again and again!",
    "for the user;",
    "(see below).",
    "- done.",
)


def make_tiny_model(folder: Path) -> Path:
    """Write the model unless it is there; atomic, so that two processes may race."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as made:
        _write(Path(made))
        Path(made).chmod(0o755)
        try:
            os.rename(made, folder)
        except OSError:  # somebody else was first
            if not (folder / "config.json").is_file():
                raise
    return folder


def _write(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": EOS_ID, "_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    _write_tokenizer(folder)
    _write_weights(folder)


def _corpus() -> Iterator[str]:
    """Sentences enough for a byte-level BPE of 1,024 entries; pure, so that the tokenizer is the same everywhere."""
    for i, subject in enumerate(_SUBJECTS):
        for j, verb in enumerate(_VERBS):
            for k, thing in enumerate(_OBJECTS):
                end = _ENDS[(i + j + k) % len(_ENDS)]
                yield f"{subject.capitalize()} {verb} {thing} {end} {i * 37 + j * 11 + k}"
                yield f"def {verb}_{i}({thing.split()[-1]}): return {j}.{k} # {subject}"
    for head in "bcdfghklmnprst":
        for vowel in "aeiou":
            yield " ".join(f"{head}{vowel}{tail}" for tail in ("ck", "n", "r", "st", "ll", "ng", "t", "m") for _ in range(3))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    kv = KV_HEADS * HEAD_DIM
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=1.0), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}self_attn.q_proj.weight": normal(HIDDEN, HIDDEN, std=0.12),
            f"{at}self_attn.k_proj.weight": normal(kv, HIDDEN, std=0.12),
            f"{at}self_attn.v_proj.weight": normal(kv, HIDDEN, std=0.12),
            f"{at}self_attn.o_proj.weight": normal(HIDDEN, HIDDEN, std=0.12),
            f"{at}mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.08),
            f"{at}mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.08),
            f"{at}mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, std=0.08),
        }
    head = normal(VOCABULARY, HIDDEN, std=0.2)
    head[: len(SPECIAL)] *= 0.0  # special tokens keep logit 0: never the best of a thousand, so that outputs run to their length
    weights["lm_head.weight"] = head
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> int:
    """Command line: one folder."""
    if len(sys.argv) != 2:
        print("usage: python -m fleet_worker.tinymodel DIR", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was begun is removed
    print(make_tiny_model(Path(sys.argv[1]).absolute()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
