"""/metrics under vLLM's names, so that router, operator and dashboards cannot tell the engines apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.sequence import Sequence

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
TRANSFER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 5)
BYTES_BUCKETS = tuple(2.0**power for power in range(16, 35, 2))
DESCRIPTOR_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
SEED_STRANGERS = "fleet:kv_seed_strangers"
HANDOFF_STRANGERS = "fleet:kv_handoff_strangers"
STRANGERS = {
    SEED_STRANGERS: "Questions for hot prefixes, and answers, without a proof of the fleet's key.",
    HANDOFF_STRANGERS: "Greetings of KV hand-offs, and answers, without a proof of the fleet's key.",
}
HANDOFF_GUARDED = "1: KV goes to and comes from those alone that prove the fleet's key."


class EngineMetrics:
    """One registry per engine. Histograms are observed where things happen; totals are copied from the core at scrape."""

    def __init__(self, served_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._labels = {"model_name": served_name, "engine": "0"}
        names = tuple(self._labels)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help_text, names, buckets=buckets, registry=self._registry).labels(**self._labels)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", ITL_BUCKETS)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS)
        self._transfer = histogram("vllm:nixl_xfer_time_seconds", "Start of a pull to its proof.", TRANSFER_BUCKETS)
        self._bytes = histogram("vllm:nixl_bytes_transferred", "Bytes per pull.", BYTES_BUCKETS)
        self._descriptors = histogram("vllm:nixl_num_descriptors", "Descriptors per pull.", DESCRIPTOR_BUCKETS)
        self._gauges: dict[str, Gauge] = {}
        self._making = threading.Lock()
        self._cache_info: Gauge | None = None
        self._counters: dict[str, tuple[Counter, dict[str, float]]] = {}
        self._reason_counter = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*names, "finished_reason"), registry=self._registry
        )
        self._reasons: dict[str, int] = {}
        self._stranger_counters = {
            name: Counter(name, words, (*names, "reason"), registry=self._registry) for name, words in STRANGERS.items()
        }
        self._strange: dict[tuple[str, str], int] = {}

    def _gauge(self, name: str, help_text: str, value: float) -> None:
        """By the engine's thread and by the server's, when that one is late: one of them makes it."""
        with self._making:
            if name not in self._gauges:
                made = Gauge(name, help_text, tuple(self._labels), registry=self._registry)
                self._gauges[name] = made.labels(**self._labels)
        self._gauges[name].set(value)

    def _counter(self, name: str, help_text: str, total: float) -> None:
        if name not in self._counters:
            made = Counter(name, help_text, tuple(self._labels), registry=self._registry).labels(**self._labels)
            self._counters[name] = (made, {"seen": 0.0})
        counter, state = self._counters[name]
        counter.inc(total - state["seen"])
        state["seen"] = total

    def _strangers(self, name: str, refused: Mapping[str, int]) -> None:
        for reason, total in refused.items():
            counter = self._stranger_counters[name].labels(**self._labels, reason=reason)
            counter.inc(total - self._strange.get((name, reason), 0))
            self._strange[name, reason] = total

    def token(self, sequence: Sequence, now: float) -> None:
        """A token was delivered."""
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self.ttft.observe(now - sequence.arrived_at)
        elif sequence.last_token_at is not None:
            self.itl.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def collect(self, core: EngineCore) -> None:
        """Copy the core's state; called by the engine thread, so that nothing is read half changed."""
        scheduler, counters = core.scheduler, core.counters
        blocks = scheduler.blocks
        self._requests(len(scheduler.running) + len(scheduler.pulling), len(scheduler.waiting))
        self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV pool, 1 = all.", blocks.used / blocks.total)
        self._gauge("fleet:kv_blocks_free", "KV blocks that an allocation may take.", blocks.available)
        if self._cache_info is None:
            self._cache_info = Gauge(
                "vllm:cache_config_info", "Shape of the KV pool, in its labels.",
                (*self._labels, "block_size", "num_gpu_blocks"), registry=self._registry,
            )  # fmt: skip
            shape = {"block_size": str(core.scheduler.block_tokens), "num_gpu_blocks": str(blocks.total)}
            self._cache_info.labels(**self._labels, **shape).set(1)
        self._gauge("fleet:kv_blocks_total", "KV blocks of the pool.", blocks.total)
        self._counter("vllm:prompt_tokens", "Prompt tokens admitted.", counters.prompt_tokens)
        self._counter("vllm:generation_tokens", "Tokens generated.", counters.generated_tokens)
        self._counter("vllm:num_preemptions", "Sequences computed again for lack of blocks.", scheduler.preemptions)
        self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", scheduler.prefix_queries)
        self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", scheduler.prefix_hits)
        self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens asked from a prefill worker.", counters.external_queries
        )
        self._counter("vllm:external_prefix_cache_hits", "Prompt tokens whose KV was pulled and proven.", counters.external_hits)
        self._counter("vllm:nixl_num_failed_transfers", "Pulls that failed or could not be proven.", counters.failed_transfers)
        self._counter("vllm:nixl_num_kv_expired_reqs", "Leases that expired unread.", counters.expired_leases)
        dropped = core.connector.dropped_frames() if core.connector else 0
        self._counter("fleet:kv_frames_dropped", "What came over the KV side channel and could not be used.", dropped)
        if core.connector is not None:
            self._strangers(HANDOFF_STRANGERS, core.connector.strangers())
            self._gauge("fleet:kv_handoff_guarded", HANDOFF_GUARDED, int(core.connector.is_guarded()))
        self._counter("fleet:kv_blocks_received", "KV blocks pulled and proven.", counters.blocks_received)
        if core.hot is not None:
            given, taken = core.hot.lender, core.hot.seeder
            self._counter("fleet:kv_seed_blocks_lent", "KV blocks of hot prefixes lent to new workers.", given.lent_blocks)
            self._counter("fleet:kv_seed_blocks_taken", "KV blocks of hot prefixes taken and proven.", taken.seeded_blocks)
            self._counter("fleet:kv_seed_blocks_refused", "KV blocks of hot prefixes that were not proven.", taken.refused_blocks)
            self._strangers(SEED_STRANGERS, core.hot.strangers())
        for reason, total in counters.finished.items():
            self._reason_counter.labels(**self._labels, finished_reason=reason).inc(total - self._reasons.get(reason, 0))
            self._reasons[reason] = total
        fetches, counters.fetches = counters.fetches, []
        for fetch in fetches:
            self._transfer.observe(fetch.seconds)
            self._bytes.observe(fetch.transferred_bytes)
            self._descriptors.observe(fetch.descriptors)

    def collect_outside(self, requests_open: int, leases_open: int, *, is_leaving: bool = False) -> None:
        """What the server knows without its engine. A lease is granted before its request's end is told here, so that these two
        numbers, read together, never miss one that is between them."""
        self._gauge("fleet:requests_open", "Requests for tokens that came in and are not answered to the end.", requests_open)
        self._gauge("fleet:kv_leases_open", "KV leases of requests, granted and not ended.", leases_open)
        self._gauge("fleet:engine_leaving", "1: a SIGTERM came; no new request is taken.", int(is_leaving))

    def collect_overdue(self, core: EngineCore, requests_open: int) -> None:
        """The engine is in a long step, or stuck in one: what it last said of its requests may be from before they came. Lengths
        can be read from any thread; what came in and is not running waits."""
        running = min(requests_open, len(core.scheduler.running) + len(core.scheduler.pulling))
        self._requests(running, requests_open - running)

    def _requests(self, running: int, waiting: int) -> None:
        self._gauge("vllm:num_requests_running", "Requests being computed or pulled.", running)
        self._gauge("vllm:num_requests_waiting", "Requests that wait for blocks or a place in the batch.", waiting)

    def finished(self, sequence: Sequence, now: float | None = None) -> None:
        """A request ended with an answer."""
        self.e2e.observe((now if now is not None else time.monotonic()) - sequence.arrived_at)

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)
