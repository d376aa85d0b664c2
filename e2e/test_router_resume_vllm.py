"""Streams go on when the vLLM that makes them is killed: two real vLLMs, a real router process, the same tokens.

The operator gives vLLM fleets `replay` (another worker says all of it again, and what was sent is compared and left out), torch
fleets `prefill` (prompt and sent tokens are prefilled). Here vLLM shows both.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.bench.proxies import ours
from e2e.test_router_resume import events, text_of
from e2e.vllm.serve import Vllm
from fleet_cli.up.bundled import tiny_model
from fleet_router.config import ResumeKind, RouterConfig

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("127.89.0.1", "127.89.0.2")
ROUTER = "127.89.1.1:8080"
PROMPT = "the router sends this to a worker, and the worker dies in the middle of it " * 6
TOKENS = 500
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
FREE: dict[str, Any] = {"temperature": 1.0}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two of them; a test that kills one starts it again."""
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    folder = tmp_path_factory.mktemp("vllm")
    made = [Vllm(host, tiny_model(), folder) for host in HOSTS]
    try:
        for one in made:  # one after the other: two cores
            one.start().wait()
        yield made
    finally:
        for one in made:
            one.stop()


def kill_busy(engines: list[Vllm], decision: list[str]) -> Vllm:
    """The one that has the stream, as the router says: vLLM's own gauge of it comes late, and says 0 in the middle of one."""
    (told,) = decision
    (busy,) = [one for number, one in enumerate(engines) if f'decode="decode-{number}"' in told]
    busy.kill()
    return busy


@pytest.mark.parametrize(
    ("resume", "draws"), [("replay", GREEDY), ("replay", SEEDED), ("prefill", GREEDY)],
    ids=["replay-greedy", "replay-seeded", "prefill-greedy"],
)  # fmt: skip
def test_a_stream_goes_on_token_for_token(tmp_path: Path, engines: list[Vllm], resume: ResumeKind, draws: dict[str, Any]):
    config = RouterConfig(fleet="f", served_name="tiny", resume=resume, slow_start_s=0.0)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **draws}
    url, killed, decision = f"http://{ROUTER}", list[Vllm](), list[str]()
    with ours("ours", ROUTER, [], [one.address for one in engines], tmp_path, config):
        whole = text_of(events(url, body))
        assert whole[1] == "[DONE]"
        try:
            assert text_of(events(url, body, decision), lambda: killed.append(kill_busy(engines, decision))) == whole
            assert len(killed) == 1
            assert 'fleet_router_resumed_total{outcome="done"} 1' in httpx.get(f"{url}/metrics", trust_env=False).text
        finally:
            for one in killed:
                one.start().wait()


def test_a_stream_that_nobody_can_know_again_ends_with_an_error(tmp_path: Path, engines: list[Vllm]):
    config = RouterConfig(fleet="f", served_name="tiny", slow_start_s=0.0)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **FREE}
    killed, decision = list[Vllm](), list[str]()
    with ours("ours", ROUTER, [], [one.address for one in engines], tmp_path, config):
        _, last = text_of(events(f"http://{ROUTER}", body, decision), lambda: killed.append(kill_busy(engines, decision)))
        assert len(killed) == 1
        assert '"error"' in last
    killed[0].start()
