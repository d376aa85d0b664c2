"""Whether the work of a tokenizer is known to grow with its text and no faster, so that a little text may be encoded on the loop.

Patterns are programs: `q*q*q*b` is over 300 letters at work for a second, over 2,000 without an end, and nothing can end it.
Whether another one is as bad cannot be seen by looking at it, nor by trying it, for it is bad at the one text that it was not
tried with. So the loop runs those patterns alone that are in use and known; every other one has its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import msgspec

_APOSTROPHES: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ANY_CASE: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASE: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_O200K: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
PATTERNS: Final = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # cl100k, Llama 3
    rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen 2, 2.5, 3
    rf"{_APOSTROPHES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",  # Qwen 3.5
    rf"[^\r\n\p{{L}}\p{{N}}]?{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_CASE}|\p{{N}}|{_REST_O200K}",  # Tekken
    rf"[^\r\n\p{{L}}\p{{N}}]?{_ANY_CASE}{_APOSTROPHES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_CASE}{_APOSTROPHES}?|\p{{N}}{{1,3}}|{_REST_O200K}",
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",  # DeepSeek, beside its own: one alternative, and one repeat of one class
    r"\s+", " {2,}", r"\n", r"[\r\n]", r"[\n\r\t]",
})  # fmt: skip
"""As models in use have them in their tokenizer.json."""
PLAIN: Final = frozenset({
    "ByteLevel", "Whitespace", "WhitespaceSplit", "Metaspace", "Digits", "Punctuation", "BertPreTokenizer", "UnicodeScripts",
    "CharDelimiterSplit", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Nmt",
})  # fmt: skip
"""Steps without a program of their own."""
MODELS: Final = frozenset({"BPE", "Unigram", "WordLevel"})
"""WordPiece tries every end of a word, and its file says how long a word may be."""
GROWS_MOST: Final = 8
"""A character may become so many, by all steps together."""


def is_linear(tokenizer: Any) -> bool:
    """Of a `tokenizers.Tokenizer`."""
    steps = [one for one in (tokenizer.normalizer, tokenizer.pre_tokenizer) if one is not None]
    found = [msgspec.json.decode(one.__getstate__()) for one in steps]
    known = type(tokenizer.model).__name__ in MODELS and all(map(_is_known, found))
    return known and prod(map(_grows_by, found)) <= GROWS_MOST


def _parts(step: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return step.get("normalizers") or step.get("pretokenizers") or ()


def _is_known(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Sequence":
        return all(map(_is_known, _parts(step)))
    if kind in ("Split", "Replace"):
        return _is_known_pattern(step.get("pattern"))
    return kind == "Prepend" or kind in PLAIN


def _grows_by(step: dict[str, Any]) -> int:
    """What is put before a text, or in place of a character, may be put there again by the next step."""
    kind = step.get("type")
    if kind == "Sequence":
        return prod(map(_grows_by, _parts(step)))
    return max(1, len(str(step.get("content" if kind == "Replace" else "prepend", ""))))


def _is_known_pattern(pattern: Any) -> bool:
    """A text is looked for, or a pattern that is known."""
    return isinstance(pattern, dict) and (bool(pattern.get("String")) or pattern.get("Regex") in PATTERNS)
