"""The end of a day, for engines whose two legs each render the conversation and ask a clock of their own what day it is (vLLM;
templates with `strftime_now`: Llama since 3.1, gpt-oss). A prompt of before midnight and the same one behind it are two: the KV
of the first was read for the second, and lay in the decode worker's cache under the new day's name for all who came after.

So the prefill worker is then asked for its prompt's token ids, and the decode worker is given them (vLLM 0.32:
`kv_transfer_params.prompt_token_ids`): it renders nothing. Not at other times, for they are as long as the prompt.
"""

from __future__ import annotations

from typing import Final

DAY_S: Final = 86_400.0
BEFORE_S: Final = 900.0
"""A prompt that is sent so long before the day's end may be prefilled at its end; hardly a first token is waited for longer."""
BEHIND_S: Final = 60.0
"""Clocks of two machines differ by less (the operator's FUTURE_S): workers' may be so late, or ours so early."""


def is_near(wall: float) -> bool:
    """`wall`: seconds since the epoch. In UTC: containers have no other zone unless their pods' `TZ` says so."""
    second = wall % DAY_S
    return second >= DAY_S - BEFORE_S or second < BEHIND_S
