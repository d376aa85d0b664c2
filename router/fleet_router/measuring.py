"""Whether a prompt is longer than its tenant, class or fleet allows: by whoever can count it, before decoding begins.

Bytes settle most of it (`lengths`). Where they do not, the precise index knows, or a worker is asked for the prompt's tokens
before anything is computed of it; a worker that cannot say leaves it to the prefill leg, which does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from fleet_router.answering import Answering
from fleet_router.ending import CHAT_PATH
from fleet_router.lengths import too_many, uncertain
from fleet_router.midnight import is_near
from fleet_router.request import prefill_body, sequences_of, tokenize_body

if TYPE_CHECKING:
    from fleet_router.workers import Worker


class Measuring(Answering):
    """One request, as far as its prompt's length goes."""

    __slots__ = ()

    def _too_long(self, tokens: int) -> bool:
        """True: it is, or a worker was asked and `begin` comes again. `tokens`: as the precise index has it; 0: not known."""
        ask, most = self._ask, self._ticket.lane.config.max_input_tokens
        longest = self.config.max_model_len or self.config.max_input_tokens
        if not tokens and not ask.alone and uncertain(ask.fields, ask.prompt, most, longest):
            self._measured = self._ask_ids(self._was_measured)
            return self._measured
        self._measured = True
        return not self._fits(tokens)

    def _was_measured(self, ids: list[int]) -> None:
        if self._fits(len(ids)):
            self.begin()

    def _fits(self, tokens: int) -> bool:
        """The prompt may have so many; else its client is told that it may not, and nobody reads its KV."""
        most = self._ticket.lane.config.max_input_tokens
        if tokens > most:
            error = too_many(tokens, most, "messages" if self._path == CHAT_PATH else "prompt")
            self._release_lease()
            self._refuse(error if self._translation is None else self._translation.renamed(error))
        return tokens <= most

    def _mind_readers(self) -> None:
        """Some engines (vLLM) give KV to one reader, without proof of ours. Several sequences of a request read by themselves
        there, and the first that is done gives the blocks free: the others would go on with somebody else's."""
        if self._several() and any(worker.read_once for worker in self._context.table.by_role["prefill"]):
            self._prefill_locally()

    def _several(self) -> bool:
        """An engine makes more than one sequence of it (`n`, `best_of`)."""
        return sequences_of(self._ask) > 1

    def _is_chat(self) -> bool:
        """An engine renders the conversation of the client's own request."""
        return self._path == CHAT_PATH and self._ask is self._asked

    def _prefill_body(self, worker: Worker) -> bytes:
        """What a prefill worker is asked. Of one whose reader renders the prompt anew, by another clock, see `midnight`."""
        return prefill_body(self._ask, ids=worker.read_once and self._is_chat() and is_near(self._context.wall()))

    def _prefill_locally(self) -> None:
        self._local = True
        self.hints = self.hints.prefilled_locally()

    def clock(self) -> float:
        """The process's time."""
        return self._context.clock()

    def _tokenize_body(self) -> bytes:
        """What `_ask_ids` asks."""
        return tokenize_body(self._asked, chat=self._path == CHAT_PATH)

    def _pick(self, excluded: frozenset[str]) -> object:
        """Whom the table would choose now."""
        return self._context.table.would_choose(
            self._asked.prompt,
            self.config,
            self._context.clock(),
            excluded,
            self._ticket.lane.seed,
            self._ask.adapter,
            self.hints,
        )

    @abstractmethod
    def begin(self) -> None:
        """Choose and send the first leg."""

    @abstractmethod
    def _ask_ids(self, then: Callable[[list[int]], object]) -> bool:
        """Ask a worker for the prompt's tokens; False: there is nobody to ask."""
