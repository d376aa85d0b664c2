"""Small models first on real vLLM: drafts are judged by log-probabilities, and who did not ask for these sees none of them.

One vLLM with the tiny model, one with other weights, a real router process. What clients get is what the engine says when it is
asked directly.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from e2e.bench.proxies import ours
from e2e.emulated.fleet import until
from e2e.vllm.serve import Vllm
from fleet_cli.up.bundled import tiny_model
from fleet_router.config import AnswerCheck, Cascade, RouterConfig
from fleet_wire import endpoints
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.adapters import make_adapter, merged

ROOT = Path(__file__).resolve().parents[1]
HOSTS = {"small": "127.88.0.1", "large": "127.88.0.2"}
ROUTER = "127.88.1.1:8080"
URL = f"http://{ROUTER}"
TALK: dict[str, Any] = {
    "/v1/completions": {"prompt": "the router asks a small model first " * 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the router asks a small model first " * 4}]},
}
COMMON: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ASKED = {"/v1/completions": 1, "/v1/chat/completions": True}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


class Said(NamedTuple):
    tier: str
    text: str
    logprobs: list[float]


def said_by(url: str, path: str, *, stream: bool = False, **more: Any) -> Said:
    """Text and log-probabilities of an answer, and the tier that its head names."""
    body = {**COMMON, **TALK[path], "stream": stream, **more}
    answer = httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
    assert not stream or "data: [DONE]" in lines
    choices = [one for line in lines if line.startswith("data: {") for one in json.loads(line[6:])["choices"]]
    text = "".join(one.get("text") or (one.get("message") or one.get("delta") or {}).get("content") or "" for one in choices)
    told = [one["logprobs"] for one in choices if one.get("logprobs")]
    values = [part["logprob"] for one in told for part in one.get("content") or ()]
    return Said(
        answer.headers.get("x-fleet-tier", ""), text, values or [v for one in told for v in one.get("token_logprobs") or ()]
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URL by tier."""
    subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True)
    folder = tmp_path_factory.mktemp("vllm")
    make_adapter(folder / "adapter", 1)
    models = {"small": tiny_model(), "large": merged(tiny_model(), folder / "adapter", folder / "large")}
    made = {tier: Vllm(host, models[tier], folder) for tier, host in HOSTS.items()}
    try:
        for one in made.values():  # one after the other: two cores
            one.start().wait()
        yield {tier: f"http://{one.address}" for tier, one in made.items()}
    finally:
        for one in made.values():
            one.stop()


@contextmanager
def router(folder: Path, engines: dict[str, str], least: float) -> Iterator[None]:
    """A router that asks the small model first."""
    cascade = Cascade(tiers=tuple(HOSTS), check=AnswerCheck(least_mean_logprob=least))
    config = RouterConfig(fleet="f", served_name="tiny", slow_start_s=0.0, cascade=cascade)
    with ours("ours", ROUTER, [], [url.removeprefix("http://") for url in engines.values()], folder, config):
        file = folder / ROUTER.replace(":", "-") / ENDPOINTS_KEY
        found = endpoints.decode(file.read_text())
        tiers = {host: tier for tier, host in HOSTS.items()}
        workers = tuple(msgspec.structs.replace(w, tier=tiers[w.address], compat=tiers[w.address]) for w in found.workers)
        file.write_bytes(endpoints.encode(msgspec.structs.replace(found, workers=workers)))
        until("both tiers serve", lambda: 'tier="large"' in httpx.get(f"{URL}/metrics", trust_env=False).text, 20.0)
        yield


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", TALK, ids=["text", "chat"])
def test_a_draft_is_kept_when_its_tokens_are_likely_enough(tmp_path: Path, engines: dict[str, str], path: str, stream: bool):
    direct = {tier: said_by(url, path, logprobs=ASKED[path]) for tier, url in engines.items()}
    assert direct["small"].text != direct["large"].text
    mean = statistics.mean(direct["small"].logprobs)
    for number, (least, tier) in enumerate(((mean - 0.05, "small"), (min(0.0, mean + 0.05), "large"))):
        (folder := tmp_path / str(number)).mkdir()
        with router(folder, engines, least):
            told = said_by(URL, path, stream=stream)
            assert told == Said(tier, direct[tier].text, [])
            asked = said_by(URL, path, stream=stream, logprobs=ASKED[path])
            assert (asked.tier, asked.text) == (tier, direct[tier].text)
            assert asked.logprobs == pytest.approx(direct[tier].logprobs, abs=1e-3)
