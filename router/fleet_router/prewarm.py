"""Pairs of workers meet before a client's request has to wait for it: the shell of `policy.prewarm`.

A request of our own, prefilled by one worker and decoded by the other, one token. It is nobody's: no tenant, usage, budget,
record, latency or load counts it, no prefix is remembered for it, and it is not retried. What it tells is how long the first
transfer took (the pair has met then) and whether KV moves at all: a pair that fails is put out as after requests of clients. A
worker that does not answer is not blamed: it will be by those who need it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import shake_128
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from fleet_router.errors import RequestError
from fleet_router.flow import COMPLETIONS_PATH
from fleet_router.follow.asking import posted
from fleet_router.inbound import new_request_id
from fleet_router.policy.prewarm import Pair, Plan
from fleet_router.policy.trip import is_full
from fleet_router.request import decode_body, is_object, lease_of, named, parse_body, prefill_body, prompt_tokens_of, reference_of
from fleet_router.retrying import RELEASE_PATH, head_of

if TYPE_CHECKING:
    from fleet_router.context import Context
    from fleet_router.members import Member
    from fleet_router.workers import Worker

PROMPT_CHARS: Final = 1_024
"""Hexadecimal digits: two to four of them a token, two blocks of the largest that an engine has (vLLM's on CPU are 128 tokens):
a prompt without a whole one moves nothing, and the two have not met."""
ANSWER_BYTES: Final = 1024 * 1024
WARMED_MOST: Final = 256
"""Decode workers that are remembered of one prefill worker: a record of a request may still name one that has left."""
OK: Final = 200
SERVER: Final = 500
"""From here on an answer tells of the worker, below it of what was asked."""
Outcome = Literal["done", "failed", "lost", "refused"]
"""done: KV moved. failed: it did not; counts against the pair. lost: a worker did not answer, or broke before KV was to move.
refused: a worker wants no such request, or hands no KV over."""
OUTCOMES: Final[tuple[Outcome, ...]] = ("done", "failed", "lost", "refused")
BROKEN: Final = (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""Ends of a leg without an answer; a deadline (TimeoutError) is an OSError."""


class Prewarm:
    """Of one process. `say` writes a line of the log."""

    def __init__(self, context: Context, member: Member, say: Callable[..., None]) -> None:
        self._context, self._say = context, say
        self._plan = Plan(member.index, member.size)
        self._members: dict[str, tuple[Worker, tuple[str, str]]] = {}
        """Each with its group: that may change under it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[Outcome] = Counter()

    def step(self, now: float) -> None:
        """Twice a second, and when one has ended: begin those that are due. Costs nothing while it is off."""
        bounds, routing = self._context.config.prewarm, self._context.table.routing
        if not bounds.pairs and not self._plan.left:
            return
        workers = self._context.table.workers
        members = {uid: (worker, worker.group) for uid, worker in workers.items()} if bounds.pairs else {}
        if members != self._members or not bounds.pairs:
            self._members = members
            self._plan.follow(routing.groups.values(), bounds.pairs)
        if not self._plan.left or self._context.draining:
            return
        for pair in self._plan.due(now, bounds.parallel, self._met, lambda pair: self._usable(pair, now)):
            both = workers[pair[0]], workers[pair[1]]
            task = asyncio.get_running_loop().create_task(self._one(*both, bounds.timeout_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """No more; what is under way gives its KV back."""
        for task in self._tasks:
            task.cancel()

    def lines(self) -> Iterable[str]:
        """Prometheus text."""
        yield "# TYPE fleet_router_prewarms_total counter"
        for outcome in OUTCOMES:
            yield f'fleet_router_prewarms_total{{outcome="{outcome}"}} {self.outcomes[outcome]}'
        yield "# TYPE fleet_router_prewarms_left gauge"
        yield f"fleet_router_prewarms_left {len(self._plan.left)}"

    def _met(self, pair: Pair) -> bool:
        worker = self._context.table.workers.get(pair[0])
        group = None if worker is None else self._context.table.routing.groups.get(worker.group)
        return group is not None and group.pairs.met(*pair)

    def _usable(self, pair: Pair, now: float) -> bool:
        """Nothing is known against the two, nor against the pair, and it would not have to wait for a slot."""
        workers, pairs = self._context.table.workers, self._context.table.pairs
        both = [worker for uid in pair if (worker := workers.get(uid)) is not None and worker.breaker.closed]
        return len(both) == len(pair) and not is_full(both[1]) and not pairs.blocks(*pair, now)

    def _paired(self, prefill: Worker, decode: Worker) -> bool:
        """They are still those that they were, and KV may move between them: else nothing is to be learnt."""
        workers = self._context.table.workers
        return workers.get(prefill.uid) is prefill and workers.get(decode.uid) is decode and prefill.group == decode.group

    async def _one(self, prefill: Worker, decode: Worker, timeout_s: float) -> None:
        """One try, told and learnt from."""
        context, table, pair = self._context, self._context.table, (prefill.uid, decode.uid)
        request_id = f"prewarm-{new_request_id()}"  # other routers make the same two meet: they must not end each other's
        outcome: Outcome = "lost"
        try:
            outcome = await self._asked(prefill, decode, request_id, context.clock() + timeout_s)
        except Exception as error:  # a bug of ours, and nobody waits for this task
            context.desk.faults.end(error, lambda _: None, request_id)
        finally:
            now = context.clock()
            self._plan.ended(pair, now, moved={"done": True, "failed": False}.get(outcome))
        self.outcomes[outcome] += 1
        if not self._paired(prefill, decode):
            pass
        elif outcome == "done":
            table.pairs.succeeded(*pair, now)
        elif outcome == "failed":
            table.transfer_failed(prefill, decode, now)
        if outcome != "done":
            self._say("prewarm", prefill=prefill.endpoint.name, decode=decode.endpoint.name, outcome=outcome)
        self.step(now)

    async def _asked(self, prefill: Worker, decode: Worker, request_id: str, until: float) -> Outcome:
        """Both legs. KV that nobody has read is given back, however it ends."""
        context, started = self._context, self._context.clock()
        try:
            ask = parse_body(self._body(request_id), False, context.config)
        except RequestError:
            return "refused"
        released = msgspec.json.encode({"request_id": request_id})
        outcome: Outcome = "lost"
        began = started
        try:
            status, body, _ = await self._leg(prefill, prefill_body(ask), request_id, until)
            reference = reference_of(body) if status == OK else None
            if reference is None:
                return "refused" if status < SERVER else "lost"
            if lease := lease_of(reference):
                released = msgspec.json.encode({"lease_id": lease})
            outcome = "failed"
            began = context.clock()
            status, body, sent_at = await self._leg(decode, decode_body(ask, reference), request_id, until)
            if status == OK and is_object(body):
                outcome = "done"
                self._learn(prefill, decode, float(prompt_tokens_of(body)), context.clock() - sent_at)
            elif status < SERVER:
                outcome = "refused"
        except BROKEN as error:  # as far as it had come
            waited = is_full(decode) or began - started > until - began  # for a slot, or for its prefill
            if isinstance(error, ConnectionRefusedError) or (waited and isinstance(error, TimeoutError)):
                outcome = "lost"  # no pair's fault
        finally:
            if outcome != "done":
                self._give_back(prefill, request_id, released)
        return outcome

    def _body(self, request_id: str) -> bytes:
        """Text that nobody has computed before, else no KV would have to move."""
        config = self._context.config
        text = shake_128(f"{self._context.clock()} {request_id}".encode()).hexdigest(PROMPT_CHARS // 2)
        prompt = text[: max(1, min(PROMPT_CHARS, config.max_input_tokens - 1))]
        return msgspec.json.encode(
            {"model": config.served_name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": False}
        )

    async def _leg(self, worker: Worker, body: bytes, request_id: str, until: float) -> tuple[int, bytes, float]:
        """(status, body, when it was sent); OSError, too, when another pod has the worker's address, as far as its agent tells.
        ConnectionRefusedError: nothing was sent."""
        endpoint, clock, sent_at = worker.endpoint, self._context.clock, 0.0

        async def proven() -> bool:
            nonlocal sent_at
            found = await worker.pool.proven()
            worker.unproven = worker.unproven or not found  # else nobody would look before a request meets it
            sent_at = clock()
            return found

        try:
            async with asyncio.timeout(until - clock()):
                status, found = await posted(
                    endpoint.address, endpoint.http_port, COMPLETIONS_PATH.decode(), request_id,
                    bytes(named(body, endpoint.model, "")), ANSWER_BYTES, proven,
                )  # fmt: skip
        except TimeoutError as error:
            if not sent_at:
                raise ConnectionRefusedError("it was not reached in time") from error
            raise
        return status, found, sent_at

    def _learn(self, prefill: Worker, decode: Worker, tokens: float, seconds: float) -> None:
        """The pair has met."""
        group = self._context.table.routing.groups.get(decode.group)
        if group is not None and self._paired(prefill, decode):
            group.pairs.observe(prefill.uid, decode.uid, tokens, seconds)
            prefill.warmed[decode.uid] = seconds
            if len(prefill.warmed) > WARMED_MOST:
                del prefill.warmed[next(iter(prefill.warmed))]

    def _give_back(self, worker: Worker, request_id: str, body: bytes) -> None:
        head = head_of(RELEASE_PATH, worker.pool.authority, request_id, len(body), b"")
        self._context.releases.send(worker.pool, head + body, self._context.clock())
