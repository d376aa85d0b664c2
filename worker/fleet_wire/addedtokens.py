"""Tokens that tokenizer_config.json names and tokenizer.json does not, or has otherwise: transformers adds them as it reads both,
and so vLLM does. A fine-tune for chats may have the tokenizer.json of its base model; without them <|im_start|> is text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
USUAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Names that templates write without asking."""


def add_named(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Have the tokenizer know them; ValueError where the list of them is none. Those that its vocabulary has not get numbers of
    their own, in their order. With `split_special_tokens` the names of special ones are read as other text is."""
    from tokenizers import AddedToken

    tokens = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    before = {repr(token) for token in tokens.values()}
    tokens |= {token.content: token for token in _listed(settings.get("added_tokens_decoder"))}
    for name in _special(settings):
        tokens.setdefault(name, AddedToken(name, special=True, normalized=False)).special = True
    if missing := [token for token in tokens.values() if repr(token) not in before]:
        tokenizer.add_tokens(missing)
    tokenizer.encode_special_tokens = settings.get("split_special_tokens") is True


def named_special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that a chat template has for them; of the usual ones those that a model has not are empty."""
    more = settings.get("extra_special_tokens")
    named = {field: _name(token) for field, token in settings.items() if field.endswith("_token")}
    named |= {field: _name(token) for field, token in more.items()} if isinstance(more, dict) else {}
    return dict.fromkeys(USUAL, "") | {field: name for field, name in named.items() if name}


def _name(token: Any) -> str:
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _listed(raw: Any) -> list[AddedToken]:
    """In the order of their numbers."""
    from tokenizers import AddedToken

    try:
        rows = sorted((int(number), token) for number, token in raw.items()) if raw is not None else []
        return [AddedToken(token["content"], **{flag: token[flag] for flag in FLAGS if flag in token}) for _, token in rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"added_tokens_decoder is no list of tokens by their numbers: {error!r}"[:500]) from error


def _special(settings: Mapping[str, Any]) -> Iterator[str]:
    """Names of special tokens: the usual ones, a model's own, and those that have no role."""
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [token for field, token in settings.items() if field.endswith("_token")]
    for token in [*named, *(more.values() if isinstance(more, dict) else more if isinstance(more, list) else [])]:
        if name := _name(token):
            yield name
