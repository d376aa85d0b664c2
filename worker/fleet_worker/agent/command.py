"""How each engine is started: argv and environment as a pure function of the configuration.

vLLM's options are those of 0.32 (NixlConnector, KV lease, KV events); `kv_both` is deprecated there and its hand-off failed in
the conformance suite, so a prefill worker is a kv_producer and a decode worker a kv_consumer, from its process's start on.
One that changes its role is started anew (`role.py`).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleet_worker.agent.errors import ConfigError
from fleet_worker.config import CONFIG_ENV, ENGINE_TOKEN_ENV, POD_IP_ENV, AdapterSettings, WorkerConfig, encode
from fleet_worker.transfer.transport import ucx_defaults

MODEL_PATH_ENV = "FLEET_MODEL_PATH"
GIB = 1024**3
KV_EVENTS_TOPIC = "kv-events"
VLLM_CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM's own choice ties every worker of a node to the same cores; there the second one starved for minutes behind the first
one's NIXL progress thread, which never sleeps."""
VLLM_GPU_DEFAULTS = {"VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "16512"}
"""Tokens of a request's `bad_words`: all that routers let pass (64 of 8 KiB), with and without a space before each. Of more than
it has room for (1,024 by itself) the engine dies on a GPU. 17 MB of one with 256 requests at once."""
UCX_TELLS = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr"}
"""UCX then says by which transport it reads; `supervise.py` listens (see transfer/ucxlog.py)."""
ONE_SERVER = ("--api-server-count", "1")
"""With data parallel ranks vLLM starts as many servers as ranks. Only one of them would hear of an adapter, so it ends before it
begins where adapters come and go (`run_multi_api_server` of 0.32). One server tells all ranks."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank takes."""
VLLM_DECIDED = tuple(
    f"--{name}" for name in (
        "host", "port", "served-model-name", "max-model-len", "kv-transfer-config", "kv-events-config", "tensor-parallel-size",
        "pipeline-parallel-size", "data-parallel-size", "data-parallel-rpc-port", "enable-expert-parallel", "quantization",
        "kv-cache-dtype", "enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-modules", "nnodes", "node-rank",
        "master-addr", "master-port", "headless", "config", "uds", "root-path", "api-key", "ssl-keyfile", "ssl-certfile", "grpc",
        "kv-offloading-size", "disable-log-stats",
    )
)  # fmt: skip
"""What the operator takes from no user (fleet_api: rules_pod.OWNED_ARGS, compat.OWNED)."""
VLLM_LETTERS = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel", "-q": "--quantization", "-n": "--nnodes", "-r": "--node-rank",
}  # fmt: skip
"""Other names of some of these."""
DEVICES: Final = Path("/dev")
DRIVERS: Final = ("nvidiactl", "kfd")
"""Device of each driver that vLLM computes with, NVIDIA's and AMD's, in a container that has one of their GPUs."""
VLLM_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute: argv, what to add to the agent's own environment, and what to add only where that says nothing."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM
    """Ends it now, in its own order."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine starts: the vLLM executable (empty for torch), a folder for its sockets, whether a device is visible."""

    model_path: str
    pod_ip: str
    vllm: str = ""
    scratch: str = ""
    has_gpu: bool = False
    ucx: Mapping[str, str] = field(default_factory=dict)
    """What UCX is told where the pod's environment says nothing."""
    token: str = ""
    """What the torch engine wants to see before it changes its adapters."""
    member: int = 0
    """Place in a worker over several nodes."""
    master: str = ""
    """Where the engines of its nodes meet: the leader's address."""


def sees_gpu(devices: Path = DEVICES) -> bool:
    """This container was given a GPU."""
    return any((devices / name).exists() for name in DRIVERS)


def ucx_told(environment: Mapping[str, str], devices: Path = DEVICES) -> dict[str, str]:
    """What makes UCX faster with what this container has."""
    return ucx_defaults(environment, (devices / DRIVERS[0]).exists())


def engine_command(config: WorkerConfig, place: Place) -> EngineCommand:
    """The engine's process."""
    return torch_command(config, place) if config.engine == "torch" else vllm_command(config, place)


def torch_command(config: WorkerConfig, place: Place) -> EngineCommand:
    """Our engine is a module of this distribution and reads the same configuration."""
    env = {MODEL_PATH_ENV: place.model_path, CONFIG_ENV: encode(config), POD_IP_ENV: place.pod_ip, ENGINE_TOKEN_ENV: place.token}
    argv = (sys.executable, "-m", "fleet_worker.engine")
    return EngineCommand(argv, env, {**UCX_TELLS, **place.ucx}, signal.SIGINT)  # SIGTERM drains


def vllm_command(config: WorkerConfig, place: Place) -> EngineCommand:
    """`vllm serve` with the NIXL connector in the worker's role; the user's own arguments come last and win. `max_new_tokens` is
    vLLM's limit for every request, of which it takes what its context leaves: without it a chat runs to the context's end."""
    argv = [
        place.vllm, "serve", place.model_path,
        "--host", place.pod_ip,
        "--port", str(config.ports.http),
        "--served-model-name", config.served_name,
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_batch),
        "--override-generation-config", json.dumps({"max_new_tokens": config.max_output_tokens}),
        "--enable-server-load-tracking",
        "--kv-transfer-config", json.dumps(vllm_transfer(config, place.has_gpu), sort_keys=True),
        "--kv-events-config", json.dumps(vllm_events(config, place), sort_keys=True),
    ]  # fmt: skip
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.pod_ip,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(config.ports.side_channel),
        "VLLM_RPC_BASE_PATH": place.scratch,
    }
    argv += vllm_shape(config) + vllm_node(config, place)
    check_names(config.engine_args)
    if config.nodes > 1:
        env["VLLM_HOST_IP"] = place.pod_ip
    if config.adapters.most:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        argv += vllm_adapters(config.adapters, place.has_gpu)
        if config.parallel.data > 1 and place.member == 0:
            argv += ONE_SERVER
    if place.has_gpu:
        return EngineCommand((*argv, *config.engine_args), env, {**UCX_TELLS, **place.ucx, **VLLM_GPU_DEFAULTS})
    env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-config.kv.cache_bytes // GIB)))
    return EngineCommand((*argv, "--enforce-eager", *config.engine_args), env, {**UCX_TELLS, **place.ucx, **VLLM_CPU_DEFAULTS})


def counts_open(config: WorkerConfig) -> bool:
    """The engine has one server, so that its GET /load is of all that is open."""
    return config.engine == "vllm" and (config.parallel.data == 1 or config.adapters.most > 0)


def check_names(words: Sequence[str]) -> None:
    """ConfigError for a name that argparse takes for one that fields decide: its beginning, its negation, its letter with the
    value behind it. The operator, which refuses those names, reads whole ones."""
    for word in words:
        said = word.partition("=")[0].partition(".")[0]
        if whole := _meant(said.replace("_", "-")):
            raise ConfigError(f"engine.args: {said} is short for {whole}, which other fields decide: write names in full")


def _meant(name: str) -> str | None:
    """What fields decide and this name says in another way."""
    if name in VLLM_DECIDED or name in VLLM_LETTERS or name in ("-", "--"):
        return None
    if name.startswith("--"):
        switch = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        if switch != name and switch.startswith("--data-parallel"):
            return "--data-parallel-size"
        return next((decided for decided in VLLM_DECIDED if decided.startswith(switch)), None)
    if name.startswith("-dp"):  # -dpl, -dph ...
        return VLLM_LETTERS["-dp"]
    letters = (whole for letter, whole in VLLM_LETTERS.items() if letter.startswith(name) or name[:2] == letter)
    return next(letters, None) if name.startswith("-") else None


def vllm_shape(config: WorkerConfig) -> list[str]:
    """Parallel sizes and number formats; nothing where vLLM's own default is meant."""
    parallel = config.parallel
    sizes = (("tensor", parallel.tensor), ("pipeline", parallel.pipeline), ("data", parallel.data))
    argv = [part for name, size in sizes if size > 1 for part in (f"--{name}-parallel-size", str(size))]
    if parallel.data > 1:
        argv += ["--data-parallel-rpc-port", str(config.ports.dp_rpc)]
    if parallel.expert > 1:
        argv.append("--enable-expert-parallel")
    if config.quantization is not None:
        argv += ["--quantization", config.quantization]
    if config.kv_cache_dtype is not None:
        argv += ["--kv-cache-dtype", config.kv_cache_dtype]
    return argv


def vllm_adapters(settings: AdapterSettings, has_gpu: bool) -> list[str]:
    """As many adapters in one batch as may be loaded: none is ever put aside for another. ConfigError without a GPU: vLLM 0.32's
    CPU kernels take slot -1, "no adapter", for the last slot (lora/ops/torch_ops), so that a request for the base model that
    shares a batch with adapters is answered under whichever lies there: wrong tokens with status 200, seen in our suite."""
    if not has_gpu:
        raise ConfigError(
            "model.maxSimultaneousAdapters: vLLM without a GPU answers requests for the base model under an adapter when both "
            "share a batch; use a GPU tier, or engine torch"
        )
    most = str(settings.most)
    rank = next((size for size in VLLM_RANKS if size >= settings.max_rank), VLLM_RANKS[-1])
    return ["--enable-lora", "--max-loras", most, "--max-cpu-loras", most, "--max-lora-rank", str(rank)]


def vllm_node(config: WorkerConfig, place: Place) -> list[str]:
    """A worker over several nodes: the ranks of this one. Only the leader's serves HTTP."""
    if config.nodes == 1:
        return []
    argv = ["--nnodes", str(config.nodes), "--node-rank", str(place.member)]
    argv += ["--master-addr", place.master, "--master-port", str(config.ports.master)]
    return [*argv, "--headless"] if place.member > 0 else argv


def vllm_transfer(config: WorkerConfig, has_gpu: bool) -> dict[str, object]:
    """vLLM's kv_transfer_config; a failed load fails the request, so that no token comes from unproven KV."""
    transfer: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": VLLM_KV_ROLES[config.role],
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": max(1, round(config.kv.lease_s))},
    }
    if not has_gpu:
        transfer["kv_buffer_device"] = "cpu"
    return transfer


def vllm_events(config: WorkerConfig, place: Place) -> dict[str, object]:
    """vLLM's kv_events_config: the publisher and its replay on local sockets (see `forward.py`). Off with data parallel ranks:
    vLLM 0.32 gives each rank an endpoint of its own, and a local socket none."""
    if config.parallel.data > 1:
        return {"enable_kv_cache_events": False}
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events_socket(place),
        "replay_endpoint": f"ipc://{replay_socket(place)}",
        "topic": KV_EVENTS_TOPIC,
    }


def events_socket(place: Place) -> str:
    """Where vLLM publishes inside the pod."""
    return f"ipc://{place.scratch}/kv-events"


def replay_socket(place: Place) -> str:
    """Path of the socket at which vLLM replays inside the pod."""
    return f"{place.scratch}/kv-replay"
