"""Typed configuration of one worker pod: the operator renders it, the agent reads it from FLEET_WORKER_CONFIG (JSON).

Identity that only the kubelet knows comes beside it as environment: FLEET_POD_NAME, FLEET_POD_UID, FLEET_POD_IP (downward
API). Secrets never travel here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec

CONFIG_ENV = "FLEET_WORKER_CONFIG"
POD_NAME_ENV = "FLEET_POD_NAME"
POD_UID_ENV = "FLEET_POD_UID"
POD_IP_ENV = "FLEET_POD_IP"

ROLE_ENV = "FLEET_ROLE"
"""The pod's role as its label says: a container that starts again after a role flip has the role that it flipped to."""

FETCH_ENV = "FLEET_FETCH"
"""Source that `fleet-worker fetch` brings into the cache."""
ENGINE_TOKEN_ENV = "FLEET_ENGINE_TOKEN"  # noqa: S105 - the name of a variable
ENGINE_TOKEN_HEADER = "x-fleet-agent"  # noqa: S105 - the name of a header
"""What the agent gives its torch engine at start, and shows when it changes adapters: nobody else may."""
SEED_PEERS_ENV = "FLEET_SEED_PEERS"
"""Side channels of workers that a new one may take hot prefixes from, as its pod's annotation names them: ADDRESS:PORT, with
commas between, IPv6 in brackets."""
MOST_SEED_PEERS = 4
ADAPTERS_ENV = "FLEET_ADAPTERS"
"""The adapters that the pod's annotation names: a container that starts again loads what it had."""
STEP_TIMEOUT_ENV = "ENGINE_STEP_TIMEOUT_S"
STEP_TIMEOUT_S = 120.0
"""Torch engine: a step, or a turn of its KV transfers, that lasts longer is taken for stuck, and the worker restarts. A pod
template's env may say otherwise, therefore no name of ours: 256 tokens of a large model on few CPUs may take a minute."""
STILL_S = 300.0
"""vLLM: the same, of requests that run and of which nothing moves. It is what vLLM itself gives a step of several processes."""
MEMBER_ENV = "LWS_WORKER_INDEX"
LEADER_ENV = "LWS_LEADER_ADDRESS"
GROUP_SIZE_ENV = "LWS_GROUP_SIZE"
"""LeaderWorkerSet's names for place, leader and size of a group; only pods of workers over several nodes have them."""
HOSTS_ENV = "FLEET_HOSTS_FILE"
"""Where the process runtime writes names of pods, as /etc/hosts has them: one machine has no cluster DNS."""
GROUP_UID_ENV = "FLEET_GROUP_UID"
"""Uid of the leader's pod; empty on the leader itself."""

Role = Literal["prefill", "decode"]
EngineType = Literal["torch", "vllm"]
TransportName = Literal["auto", "tcp", "shm", "rdma"]
MEMORY_TRANSPORTS = {"": (), "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"), "rocm": ("rocm_copy", "rocm_ipc")}
"""Without these UCX cannot touch the memory of a device at all."""

RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")
"""In UCX's words. srd is AWS's EFA, whose NICs can do neither rc nor dc; one that a node has not costs a warning of UCX."""


def ucx_transports(transport: TransportName, *, required: bool = False, memory: str = "") -> str | None:
    """UCX_TLS for the asked transport; None: everything. `memory` is a key of MEMORY_TRANSPORTS.

    shm keeps tcp even when required: NIXL needs one transport that notices a dead peer, which shared memory does not. Whether
    the blocks themselves go through memory is for the probe to prove.
    """
    if transport == "auto":
        return None
    lists = {
        "tcp": ("tcp",),
        "shm": ("sm", "tcp"),
        "rdma": (*RDMA_TRANSPORTS, "sm") if required else (*RDMA_TRANSPORTS, "sm", "tcp"),
    }
    return ",".join((*lists[transport], "self", *MEMORY_TRANSPORTS[memory]))


class Ports(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TCP ports of a worker pod; every pod has its own IP, so that they are the same everywhere but on the host's network."""

    http: int = 8000
    """Engine: OpenAI routes, /health, /metrics; the router talks to it directly."""
    agent: int = 9000
    """Agent: /live, /ready, /state, /drain, /role, /metrics."""
    side_channel: int = 5600
    """KV handshake and lease messages."""
    kv_events: int = 5557
    kv_replay: int = 5558
    dp_rpc: int = 29550
    """Rendezvous of data parallel ranks."""
    group: int = 9010
    """Agents of one worker's other nodes join its leader here."""
    master: int = 29501
    """Rendezvous of vLLM's ranks on several nodes."""


class SeedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hot prefixes between workers: a new one takes them before it is ready, and gives them on when it serves. Torch only."""

    share: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.25
    """Of a new worker's cache, at most."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """What it may delay readiness, all tries together."""


class KvSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache and hand-off."""

    transport: TransportName = "auto"
    required: bool = False
    """The worker does not serve without `transport`."""
    lease_s: float = 30.0
    block_tokens: int = 16
    """Torch engine only; vLLM on CPU uses 128."""
    cache_bytes: int = 64 * 1024 * 1024
    """Size of the KV pool of one worker."""
    seed: SeedSettings | msgspec.UnsetType = msgspec.UNSET
    """Unset: hot prefixes are neither taken nor given, and images older than this field do not read of it."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vLLM spreads over the worker's devices."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    """1, or tensor x data."""


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that may come and go while the worker runs. Which ones is not said here: they restart nothing."""

    most: int = 0
    """Loaded at once; 0: none is served."""
    max_rank: int = 64
    root: str | None = None
    """Folder that adapters given as relative paths lie in."""


class AdapterWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that a worker should have."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=1200)]
    """hf://ORG/NAME@REVISION, or a path below AdapterSettings.root."""


MOST_ADAPTERS = 64
Wishes = Annotated[tuple[AdapterWish, ...], msgspec.Meta(max_length=MOST_ADAPTERS)]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the agent needs to become one worker."""

    fleet: str
    namespace: str
    tier: str
    role: Role
    revision: str
    compat: str
    engine: EngineType = "torch"
    engine_args: tuple[str, ...] = ()
    """Passed to `vllm serve` after our own arguments; refused for torch."""
    parallel: Parallel = Parallel()
    nodes: int = 1
    """Pods of this worker; the first one leads."""
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    model: str
    """A path inside the pod, or hf://ORG/NAME[@REVISION] that the agent fetches."""
    served_name: str
    max_model_len: int = 2048
    """Tokens, prompt plus output."""
    max_batch: int = 32
    """Requests that the engine runs at once."""
    max_output_tokens: int = 4096
    drain_timeout_s: float = 30.0
    ports: Ports = Ports()
    kv: KvSettings = KvSettings()
    adapters: AdapterSettings = AdapterSettings()


def encode(config: WorkerConfig) -> str:
    """Canonical JSON: equal configurations give equal text."""
    return msgspec.json.encode(config, order="deterministic").decode()


def decode(raw: str | bytes) -> WorkerConfig:
    """Parse; raises `msgspec.ValidationError` naming the field."""
    return msgspec.json.decode(raw, type=WorkerConfig)


def step_timeout_s(env: Mapping[str, str], default: float = STEP_TIMEOUT_S) -> float:
    """STEP_TIMEOUT_ENV in seconds, or its default; ValueError names it."""
    given = env.get(STEP_TIMEOUT_ENV) or str(default)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{STEP_TIMEOUT_ENV}: {given!r} is no number of seconds above 0")
    return seconds


def encode_adapters(wishes: Iterable[AdapterWish]) -> str:
    """Canonical JSON, in order of names."""
    return msgspec.json.encode(sorted(wishes, key=lambda wish: wish.name), order="deterministic").decode()


def decode_adapters(raw: str | bytes) -> tuple[AdapterWish, ...]:
    """Parse; raises `msgspec.DecodeError` naming the field, or the name that several have: each would take the other's place."""
    wishes = msgspec.json.decode(raw, type=Wishes)
    if twice := [name for name, count in Counter(wish.name for wish in wishes).items() if count > 1]:
        raise msgspec.ValidationError(f"several adapters are called {twice[0]}")
    return wishes
