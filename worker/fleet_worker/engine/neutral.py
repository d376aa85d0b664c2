"""Fields of the OpenAI and vLLM dialects that change an answer and that the torch engine does not implement.

Such a field is refused unless it says what the engine does anyway; passing over it would answer another question than the one
that was asked. Fields that change nothing (user, metadata, store ...) are ignored, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from fleet_worker.engine.errors import BadRequestError

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # what is sampled
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "min_p": (0,),
    "typical_p": (1,), "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (), "best_of": (1,),
    "use_beam_search": (False,), "logits_processors": ([],), "thinking_token_budget": (),
    "repetition_detection": (), "watermarking": (False,),
    # what constrains it
    "response_format": ({"type": "text"},), "structured_outputs": ({},), "guided_json": (), "guided_regex": (),
    "guided_choice": ([],), "guided_grammar": (), "guided_decoding_backend": (), "structural_tag": (),
    # what the prompt becomes
    "suffix": ("",), "echo": (False,), "truncate_prompt_tokens": (), "prompt_embeds": (), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    # what the answer holds
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "modalities": (["text"],), "audio": (), "logprob_token_ids": ([],), "return_token_offsets": (False,),
}  # fmt: skip
"""Field and the values that ask for nothing; null always does. Not `in`: 0 and False are different questions in `logprobs`."""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    """BadRequestError for the first field that asks for something the engine does not do."""
    # text is given them, a chat template brings its own
    neutral = {**NEUTRAL, "add_special_tokens": ("messages" not in fields,)}
    for name in fields.keys() & neutral.keys():
        value = msgspec.json.decode(fields[name])
        if value is not None and not any(_same(value, nothing) for nothing in neutral[name]):
            raise BadRequestError(f"{name} is not supported by the torch engine", name)


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
