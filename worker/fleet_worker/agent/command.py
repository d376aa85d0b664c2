"""How each engine is started: argv and environment as a pure function of the configuration.

vLLM's options are those of 0.32 (NixlConnector, KV lease, KV events); `kv_both` is deprecated there, so a prefill worker is
a kv_producer and a decode worker a kv_consumer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

from fleet_worker.config import CONFIG_ENV, POD_IP_ENV, WorkerConfig, encode

MODEL_PATH_ENV = "FLEET_MODEL_PATH"
GIB = 1024**3
KV_EVENTS_TOPIC = "kv-events"
VLLM_CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM's own choice ties every worker of a node to the same cores; there the second one starved for minutes behind the first
one's NIXL progress thread, which never sleeps."""
VLLM_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to execute: argv, what to add to the agent's own environment, and what to add only where that says nothing."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)


def engine_command(config: WorkerConfig, *, model_path: str, pod_ip: str, vllm: str, has_gpu: bool) -> EngineCommand:
    """The engine's process. `vllm` is the vLLM executable, `has_gpu` whether a device is visible."""
    if config.engine == "torch":
        return torch_command(config, model_path, pod_ip)
    return vllm_command(config, model_path, pod_ip, vllm, has_gpu)


def torch_command(config: WorkerConfig, model_path: str, pod_ip: str) -> EngineCommand:
    """Our engine is a module of this distribution and reads the same configuration."""
    env = {MODEL_PATH_ENV: model_path, CONFIG_ENV: encode(config), POD_IP_ENV: pod_ip}
    return EngineCommand((sys.executable, "-m", "fleet_worker.engine"), env)


def vllm_command(config: WorkerConfig, model_path: str, pod_ip: str, vllm: str, has_gpu: bool) -> EngineCommand:
    """`vllm serve` with the NIXL connector in the worker's role; the user's own arguments come last and win."""
    argv = [
        vllm, "serve", model_path,
        "--host", pod_ip,
        "--port", str(config.ports.http),
        "--served-model-name", config.served_name,
        "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_batch),
        "--kv-transfer-config", json.dumps(vllm_transfer(config, has_gpu), sort_keys=True),
        "--kv-events-config", json.dumps(vllm_events(config, pod_ip), sort_keys=True),
    ]  # fmt: skip
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": pod_ip,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(config.ports.side_channel),
    }
    if has_gpu:
        return EngineCommand((*argv, *config.engine_args), env)
    env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-config.kv.cache_bytes // GIB)))
    return EngineCommand((*argv, "--enforce-eager", *config.engine_args), env, VLLM_CPU_DEFAULTS)


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


def vllm_events(config: WorkerConfig, pod_ip: str) -> dict[str, object]:
    """vLLM's kv_events_config: publisher and replay sockets on the pod's own address."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{pod_ip}:{config.ports.kv_events}",
        "replay_endpoint": f"tcp://{pod_ip}:{config.ports.kv_replay}",
        "topic": KV_EVENTS_TOPIC,
    }
