"""The loaded adapters, and vLLM's endpoints that load and unload them while requests run.

A request takes its adapter when it arrives and keeps it: replacing or unloading one changes nothing for requests that run.
Unloading waits for these, for a bounded time; what is left then ends as it would have.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.config import ENGINE_TOKEN_HEADER
from fleet_worker.engine.adapterfiles import load_adapter
from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.errors import BadAdapterError, BadRequestError, NotAllowedError, UnknownAdapterError
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.modelconfig import ModelConfig

UNLOAD_WAIT_S = 30.0
POLL_S = 0.02
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class LoadRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/load_lora_adapter, as vLLM 0.32 has it."""

    lora_name: Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Replace a loaded adapter of this name: new requests get the new one, running ones keep theirs."""


class UnloadRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/unload_lora_adapter; vLLM's lora_int_id is passed over, as vLLM does."""

    lora_name: Name


T = TypeVar("T", LoadRequest, UnloadRequest)


class Adapters:
    """By name; used by the server's event loop only."""

    def __init__(self, served_name: str, most: int, max_rank: int, token: str) -> None:
        """`token` empty: nobody may load or unload."""
        self._served_name = served_name
        self._most = most
        self._max_rank = max_rank
        self._token = token
        self._loaded: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()

    def find(self, model: str) -> Adapter | None:
        """The adapter that a request's `model` names; None when there is none."""
        return self._loaded.get(model)

    def names(self) -> list[str]:
        """Of all that are loaded."""
        return list(self._loaded)

    def cards(self) -> list[dict[str, Any]]:
        """For GET /v1/models, as vLLM shows them; `digest` is ours."""
        return [
            {
                "id": adapter.name, "object": "model", "created": 0, "owned_by": "inferencefleet", "root": adapter.path,
                "parent": self._served_name, "digest": adapter.digest,
            }
            for adapter in self._loaded.values()
        ]  # fmt: skip

    def allow(self, request: Request) -> None:
        """NotAllowedError unless the caller knows the token that the agent gave this process."""
        given = request.headers.get(ENGINE_TOKEN_HEADER, "")
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise NotAllowedError("adapters are loaded and unloaded, and hot prefixes taken, by the agent of this pod only")

    async def load(self, body: bytes, config: ModelConfig, dtype: torch.dtype) -> Response:
        """Read and check the files beside the engine; the adapter is there for requests that come after the answer."""
        asked = _parsed(body, LoadRequest)
        name = asked.lora_name
        async with self._changing:
            if name == self._served_name:
                raise BadAdapterError(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")
            if name in self._loaded and not asked.load_inplace:
                raise BadAdapterError(f"The lora adapter '{name}' has already been loaded.", "lora_name")
            if name not in self._loaded and len(self._loaded) >= self._most:
                raise BadAdapterError(f"{self._most} adapters are loaded (model.maxSimultaneousAdapters)", "lora_name")
            made = await asyncio.to_thread(load_adapter, name, Path(asked.lora_path), config, dtype, self._max_rank)
            self._loaded[name] = made
        words = f"Success: LoRA adapter '{name}' added successfully."
        return PlainTextResponse(words, headers={"x-adapter-digest": made.digest})

    async def unload(self, body: bytes, loop: EngineLoop) -> Response:
        """No new request may use it from now on; answers when nobody does any more, or after UNLOAD_WAIT_S."""
        name = _parsed(body, UnloadRequest).lora_name
        async with self._changing:  # also one that is being loaded now goes
            adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise UnknownAdapterError(f"The lora adapter '{name}' cannot be found.", "lora_name")
        left = await _left(loop, adapter)
        words = f"Success: LoRA adapter '{name}' removed successfully."
        return PlainTextResponse(words + (f" {left} running requests end under it." if left else ""))


async def _left(loop: EngineLoop, adapter: Adapter) -> int:
    """Requests that still run under it when the waiting is over."""
    end = time.monotonic() + UNLOAD_WAIT_S
    while True:
        left = await _running(loop, adapter)
        if not left or time.monotonic() >= end or loop.failure is not None:
            return left
        await asyncio.sleep(POLL_S)


async def _running(loop: EngineLoop, adapter: Adapter) -> int:
    """Counted on the engine thread, behind every request that was handed over before; 0 when that thread does not answer."""
    here = asyncio.get_running_loop()
    answer: asyncio.Future[int] = here.create_future()

    def tell(found: int) -> None:
        if not answer.done():
            answer.set_result(found)

    def count(core: EngineCore) -> None:
        here.call_soon_threadsafe(tell, core.running_under(adapter))

    loop.call(count)
    try:
        return await asyncio.wait_for(answer, UNLOAD_WAIT_S)
    except TimeoutError:
        return 0


def _parsed(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise BadRequestError(str(error), "lora_name") from error
