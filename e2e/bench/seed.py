"""`make bench-seed`: the first requests of a worker that joins, with and without the hot prefixes of one that serves; and what
giving them does to that one's streams.

Three torch engines without agents: one serves and has answered every shared prompt twice, one is new and takes hot prefixes from
it while it streams, one is new and takes none. Both new ones then answer the same prompts, in turn. Prints a table and, as the
last line, one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from e2e.bench.table import report
from fleet_cli.up.bundled import tiny_model
from fleet_worker.agent.command import MODEL_PATH_ENV
from fleet_worker.config import (
    CONFIG_ENV,
    ENGINE_TOKEN_ENV,
    ENGINE_TOKEN_HEADER,
    POD_IP_ENV,
    KvSettings,
    SeedSettings,
    WorkerConfig,
    encode,
)

PREFIXES, PREFIX_TOKENS, TAIL_TOKENS = 24, 960, 16
CACHE_BYTES = 256 * 1024 * 1024
SHARE = 0.5
WITHIN_S = 5.0
CALM_S = 2.0
"""The stream runs so long before anybody takes anything."""
TOKEN = "bench"
"""Of engines that live for a minute."""
SERVING, SEEDED, COLD = (f"127.80.90.{n}" for n in (1, 2, 3))


@contextmanager
def engine(host: str, folder: Path) -> Iterator[str]:
    """An engine that answers, as its URL."""
    model = tiny_model()
    config = WorkerConfig(
        fleet="bench", namespace="bench", tier="t", role="prefill", revision="r", compat="bench", model=str(model),
        served_name="tiny", kv=KvSettings(cache_bytes=CACHE_BYTES, seed=SeedSettings(share=SHARE)),
    )  # fmt: skip
    env = {
        **os.environ, CONFIG_ENV: encode(config), MODEL_PATH_ENV: str(model), POD_IP_ENV: host, ENGINE_TOKEN_ENV: TOKEN,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / f"{host}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "fleet_worker.engine"], env=env, stdout=log, stderr=log)
    url = f"http://{host}:{config.ports.http}"
    try:
        while not answers(url):
            if process.poll() is not None:
                raise RuntimeError((folder / f"{host}.log").read_text())
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def prompt(number: int, tail: int) -> list[int]:
    """A prefix that several share, then tokens of one's own."""
    return [100 + (number * 37 + at * (number + 3)) % 400 for at in range(PREFIX_TOKENS)] + [50 + tail] * TAIL_TOKENS


def ask(url: str, asked: list[int]) -> tuple[float, list[int]]:
    """(seconds to the first token, the answer's tokens)."""
    begun, first, found = time.perf_counter(), 0.0, list[int]()
    body = {"model": "tiny", "prompt": asked, "max_tokens": 4, "temperature": 0, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
                found += json.loads(line[6:])["choices"][0]["token_ids"]
    return first, found


def computed(url: str) -> float:
    """Prompt tokens that the engine did not find in its cache, so far."""
    text = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text if line.startswith("vllm:prefix_cache_")}
    return values["vllm:prefix_cache_queries_total"] - values["vllm:prefix_cache_hits_total"]


class Stream(threading.Thread):
    """One stream, with the times of its tokens."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.at: list[float] = []
        self.over = False

    def run(self) -> None:
        """Until `over`."""
        body = {"model": "tiny", "prompt": [7] * 8, "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.at.append(time.perf_counter())
                if self.over:
                    return

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """Between two tokens each."""
        times = [at for at in self.at if since <= at <= until]
        return [1000 * (after - before) for before, after in pairwise(times)]


def taken(url: str) -> dict[str, Any]:
    """What a new engine says of what it took."""
    body = {"host": SERVING, "port": 5600, "most_share": SHARE, "within_s": WITHIN_S}
    answer = httpx.post(f"{url}/kv/seed", json=body, headers={ENGINE_TOKEN_HEADER: TOKEN}, timeout=30)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as name, engine(SERVING, folder := Path(name)) as serving:
        expected = {number: [ask(serving, prompt(number, tail))[1] for tail in (0, 1)][1] for number in range(PREFIXES)}
        with engine(SEEDED, folder) as seeded, engine(COLD, folder) as cold:
            stream = Stream(serving)
            stream.start()
            time.sleep(1.0)
            calm = time.perf_counter()
            time.sleep(CALM_S)
            begun = time.perf_counter()
            found = taken(seeded)
            ended = time.perf_counter()
            stream.over = True
            stream.join()
            before, during = stream.gaps_ms(calm, begun), stream.gaps_ms(begun, ended)
            results = {}
            for label, url in (("seeded", seeded), ("cold", cold)):
                ask(url, [9] * 8)  # nobody's first request
                had, times = computed(url), list[float]()
                for number in range(PREFIXES):
                    first, tokens = ask(url, prompt(number, 1))
                    if tokens != expected[number]:
                        raise AssertionError(f"{label}: another answer to prompt {number}")
                    times.append(1000 * first)
                results[label] = (computed(url) - had, statistics.median(times), max(times))
    rows = [[label, *figures] for label, figures in results.items()]
    figures = {
        "blocks": found["blocks"], "mib": round(found["nbytes"] / 2**20, 1), "seconds": round(found["seconds"], 3),
        "reason": found["reason"], "peer_gap_ms_before": [round(statistics.median(before), 2), round(max(before), 2)],
        "peer_gap_ms_during": [round(statistics.median(during), 2), round(max(during), 2)],
        **{f"{label}_{what}": round(value, 1) for label, values in results.items()
           for what, value in zip(("computed_tokens", "ttft_ms_p50", "ttft_ms_max"), values, strict=True)},
    }  # fmt: skip
    report([f"first {PREFIXES} requests of a new worker", "tokens computed", "TTFT p50 ms", "TTFT max ms"], rows, figures)


if __name__ == "__main__":
    main()
