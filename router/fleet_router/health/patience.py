"""How long an answer that comes as a whole may take. Pure.

An engine such as vLLM sends head and body of such an answer when its last token is there: until then silence is work. What the
work is can be told before: the queue, the prompt, and so many tokens at the worker's pace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from fleet_router.admission.usage import estimated_of
from fleet_router.request import asked_tokens

if TYPE_CHECKING:
    from fleet_router.ask import Ask
    from fleet_router.config import RouterConfig
    from fleet_router.policy.candidate import Candidate

TOKEN_S: Final = 0.05
"""Of a token at least, as the operator has it for drains (rollout.py): what was learnt may be of an idle worker."""
MARGIN: Final = 3.0
"""How much slower than learnt a worker may be: others come after this request, and gaps are learnt of streams alone."""
HAD_ITS_SHARE: Final = 0.5
REASONING: Final = "include_reasoning"
"""vLLM's; anything but true is false, as its parser reads it, or refused."""


def whole_answer_s(*, first_s: float, queue_s: float, prefill_s: float, tokens: int, gap_s: float, most_s: float) -> float:
    """Seconds from when it is sent. `first_s`: what a first token may take anyway; `gap_s`: between two tokens, as learnt;
    `tokens`: at most so many are generated, 0 for embeddings; `most_s`: the configuration's bound."""
    pace_s = gap_s * MARGIN
    return min(most_s, first_s + queue_s + MARGIN * prefill_s + tokens * (pace_s if pace_s > TOKEN_S else TOKEN_S))


def budget_s(ask: Ask, config: RouterConfig, worker: Candidate, now: float) -> float:
    """The same for this request at this worker."""
    return whole_answer_s(
        first_s=config.first_token_deadline_s,
        queue_s=max(0.0, worker.free_at - now),
        prefill_s=worker.base_s + worker.token_s * estimated_of(ask),
        tokens=0 if ask.alone else asked_tokens(ask) or config.max_output_tokens,
        gap_s=worker.gap.at(worker.inflight + 1),
        most_s=config.whole_answer_most_s,
    )


def thinks_unseen(ask: Ask) -> bool:
    """A stream that leaves out what its model thinks: between its head and the first word of the answer nothing is told, however
    long that takes."""
    return ask.stream and REASONING in ask.fields and bytes(ask.fields[REASONING]) != b"true"


def patient(ask: Ask, config: RouterConfig) -> RouterConfig:
    """The configuration for this request: between two tokens of such a stream may lie as many as it may have."""
    if not thinks_unseen(ask):
        return config
    unseen_s = config.first_token_deadline_s + (asked_tokens(ask) or config.max_output_tokens) * TOKEN_S
    between_s = max(config.inter_token_deadline_s, min(config.whole_answer_most_s, unseen_s))
    return msgspec.structs.replace(config, inter_token_deadline_s=between_s)


def had_its_time(sent_at: float, now: float, first_s: float) -> bool:
    """The time of a request is over (`first_s`: of a first token) while a leg runs that was sent then: that says something of
    its worker when the leg had half of it. Of one that came late, because others took the rest, it says nothing; who is silent
    for longer than that is found by `silence`."""
    return now - sent_at >= HAD_ITS_SHARE * first_s
