"""Engine processes as a function of the configuration."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import msgspec
import pytest

from fleet_api.arguments import DECIDED, LETTERS, shortened
from fleet_router import costly
from fleet_worker.agent.command import (
    UCX_TELLS,
    VLLM_DECIDED,
    VLLM_GPU_DEFAULTS,
    VLLM_LETTERS,
    Place,
    check_names,
    counts_open,
    engine_command,
    sees_gpu,
)
from fleet_worker.agent.engine_client import parse_load
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.identity import read_identity
from fleet_worker.agent.life import Load
from fleet_worker.config import AdapterSettings, KvSettings, Parallel, Ports, WorkerConfig, decode, encode


def config(**changes: object) -> WorkerConfig:
    base = WorkerConfig(
        fleet="f", namespace="n", tier="t", role="prefill", revision="r", compat="c", model="/m", served_name="tiny"
    )
    return msgspec.structs.replace(base, **changes)


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_vllm_gets_its_kv_role_lease_and_addresses(role: str, has_gpu: bool):
    given = config(role=role, engine="vllm", kv=KvSettings(lease_s=12.0, cache_bytes=1), engine_args=("--dtype", "float32"))
    place = Place("/m", "127.1.2.3", "/v/vllm", "/scratch", has_gpu, {"UCX_TCP_TX_SEG_SIZE": "256k"})
    command = engine_command(given, place)
    transfer = json.loads(option(command.argv, "--kv-transfer-config"))
    events = json.loads(option(command.argv, "--kv-events-config"))
    assert command.argv[:3] == ("/v/vllm", "serve", "/m")
    assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 12}
    assert transfer["kv_load_failure_policy"] == "fail"
    assert ("kv_buffer_device" in transfer, "--enforce-eager" in command.argv) == (not has_gpu, not has_gpu)
    assert "--enable-server-load-tracking" in command.argv
    assert events["endpoint"] == "ipc:///scratch/kv-events"
    assert events["replay_endpoint"] == "ipc:///scratch/kv-replay"
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.1.2.3"
    assert command.env["VLLM_RPC_BASE_PATH"] == "/scratch"
    assert command.env.get("VLLM_CPU_KVCACHE_SPACE") == (None if has_gpu else "1")
    own = {"VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "16512"} if has_gpu else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert command.defaults == UCX_TELLS | {"UCX_TCP_TX_SEG_SIZE": "256k"} | own
    assert command.argv[-2:] == ("--dtype", "float32")


def test_vllm_has_room_for_all_bad_words_that_routers_let_pass():
    """No token stands for less than a byte, a tokenizer may put one before a text, and vLLM looks for each word with a space
    before it, too. Of one token more than it has room for its engine died on a GPU."""
    told = int(VLLM_GPU_DEFAULTS["VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"])
    assert told == 2 * (costly.STOP_BYTES_MOST + costly.STOPS_MOST)


@pytest.mark.parametrize(
    ("devices", "seen"),
    [
        pytest.param(["nvidiactl", "nvidia0", "nvidia-uvm"], True, id="nvidia"),
        pytest.param(["kfd", "dri"], True, id="amd"),
        pytest.param(["dri", "null"], False, id="a-screen"),
        pytest.param(["null"], False, id="none"),
    ],
)
def test_a_gpu_is_seen_by_its_drivers_device(tmp_path: Path, devices: list[str], seen: bool):
    """On AMD's (amd.com/gpu) vLLM was started as without one: eager, its KV in the host's memory, and no adapters."""
    for name in devices:
        (tmp_path / name).touch()
    assert sees_gpu(tmp_path) is seen


def test_vllm_knows_the_fleets_limit_of_output_tokens():
    """It is the limit of every request there: a chat that named none ran to the end of the context."""
    given = config(engine="vllm", max_output_tokens=77, engine_args=("--override-generation-config", "{}"))
    argv = engine_command(given, Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True)).argv
    assert json.loads(option(argv, "--override-generation-config")) == {"max_new_tokens": 77}
    assert argv[-2:] == ("--override-generation-config", "{}")  # the user's own comes last and wins


def test_vllm_is_told_its_shape():
    shape = {"parallel": Parallel(tensor=2, pipeline=2, data=4, expert=8), "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    given = config(engine="vllm", **shape, ports=Ports(dp_rpc=7000))
    argv = engine_command(given, Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True)).argv
    for name, value in (
        ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2"), ("--data-parallel-size", "4"),
        ("--data-parallel-rpc-port", "7000"), ("--quantization", "fp8"), ("--kv-cache-dtype", "fp8_e4m3"),
    ):  # fmt: skip
        assert option(argv, name) == value
    assert "--enable-expert-parallel" in argv
    assert json.loads(option(argv, "--kv-events-config")) == {"enable_kv_cache_events": False}


def test_adapters_on_vllm_need_a_gpu_and_the_refusal_says_why():
    """Its CPU kernels answer base requests under an adapter that shares the batch (v0.32, seen in the adapter suite)."""
    given = config(engine="vllm", adapters=AdapterSettings(most=2, max_rank=16, root="/a"))
    argv = engine_command(given, Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True)).argv
    assert (option(argv, "--max-loras"), option(argv, "--max-lora-rank")) == ("2", "16")
    with pytest.raises(ConfigError, match=r"maxSimultaneousAdapters: vLLM without a GPU answers .* under an adapter"):
        engine_command(given, Place("/m", "127.1.2.3", "/v/vllm", "/scratch", False))


@pytest.mark.parametrize(("data", "most", "member"), [(2, 2, 0), (2, 0, 0), (1, 2, 0), (2, 2, 1)])
def test_adapters_over_data_parallel_ranks_have_one_server(data: int, most: int, member: int):
    """vLLM 0.32 ended before it began: "VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1", and without
    a word of ours it takes as many servers as ranks. A follower has none, and may be told of none."""
    settings = AdapterSettings(most=most, max_rank=16, root="/a")
    given = config(engine="vllm", parallel=Parallel(data=data), adapters=settings, nodes=1 + (member > 0))
    argv = engine_command(given, Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True, member=member, master="127.1.2.4")).argv
    told = option(argv, "--api-server-count") if "--api-server-count" in argv else None
    assert told == ("1" if data > 1 and most and not member else None)
    assert counts_open(given) is (data == 1 or most > 0)


def test_what_is_not_asked_is_not_said():
    argv = engine_command(config(engine="vllm"), Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True)).argv
    assert not [part for part in argv if "parallel" in part or part in ("--quantization", "--kv-cache-dtype")]


def test_torch_reads_the_same_configuration():
    command = engine_command(config(), Place("/m", "127.1.2.3"))
    assert command.argv[1:] == ("-m", "fleet_worker.engine")
    assert command.stop_signal == signal.SIGINT  # SIGTERM would drain it once more
    assert command.env["FLEET_MODEL_PATH"] == "/m"
    assert decode(command.env["FLEET_WORKER_CONFIG"]) == config()


GOOD_ENV = {
    "FLEET_WORKER_CONFIG": encode(config()), "FLEET_POD_NAME": "p", "FLEET_POD_UID": "u", "FLEET_POD_IP": "127.0.0.9",
}  # fmt: skip


def test_identity_is_read_from_the_environment():
    given, identity = read_identity(GOOD_ENV)
    assert (given, identity.pod_ip) == (config(), "127.0.0.9")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FLEET_WORKER_CONFIG": ""}, "FLEET_WORKER_CONFIG: not set"),
        ({"FLEET_WORKER_CONFIG": "{"}, "FLEET_WORKER_CONFIG: Input data was truncated"),
        ({"FLEET_WORKER_CONFIG": '{"fleet": 1}'}, "Expected `str`, got `int` - at `$.fleet`"),
        ({"FLEET_POD_UID": ""}, "FLEET_POD_UID: not set"),
        ({"FLEET_POD_IP": "nowhere"}, "FLEET_POD_IP: 'nowhere'"),
        ({"FLEET_WORKER_CONFIG": encode(config(engine_args=("-x",)))}, "engine_args: the torch engine takes none"),
    ],
)
def test_bad_environment_names_the_variable(change: dict[str, str], words: str):
    with pytest.raises(ConfigError) as caught:
        read_identity({**GOOD_ENV, **change})
    assert words in str(caught.value)


def test_load_is_summed_over_label_sets_and_absent_is_none():
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\nvllm:num_requests_waiting 1\n'
    assert parse_load(text) == Load(5, 1, None)


SHORT_FORMS: list[tuple[tuple[str, ...], str | None]] = [
    (("--por", "1"), "--por"),
    (("--seed", "1", "--hos=0.0.0.0"), "--hos"),
    (("--kv_transfer_c", "{}"), "--kv_transfer_c"),
    (("--kv-transfer-con.kv_role", "kv_both"), "--kv-transfer-con"),
    (("--headl",), "--headl"),
    (("--api-k", "s3cret"), "--api-k"),
    (("--tensor-parallel", "2"), "--tensor-parallel"),
    (("--no-enable-lora",), "--no-enable-lora"),
    (("--seed", "1", "--no-enable-exp"), "--no-enable-exp"),
    (("--no-data-parallel-hybrid-lb",), "--no-data-parallel-hybrid-lb"),
    (("--grp",), "--grp"),
    (("--kv-off", "8"), "--kv-off"),
    (("--disable-log",), "--disable-log"),
    (("-t", "2"), "-t"),
    (("-e",), "-e"),
    (("-qawq",), "-qawq"),
    (("-n2",), "-n2"),
    (("-r1",), "-r1"),
    (("-dpl", "1"), "-dpl"),
    (("-dph",), "-dph"),
    (("--max-num-seqs", "4", "--seed", "7", "--enable-prefix-caching", "--port", "1"), None),
    (("--no-enable-prefix-caching", "--seed", "-1", "-ac", "{}", "-asc=1", "-dcp", "2", "--grpc-port", "1"), None),
]


@pytest.mark.parametrize(("words", "refused"), SHORT_FORMS)
def test_short_forms_do_not_get_past_the_operators_refusals(words: tuple[str, ...], refused: str | None):
    """Incident: vLLM takes any unambiguous beginning of a name, so that `--por 1` moved an engine from the port that all know."""
    asked, place = config(engine="vllm", engine_args=words), Place("/m", "127.1.2.3", "/v/vllm", "/scratch", True)
    if refused is None:
        assert engine_command(asked, place).argv[-len(words) :] == words
        return
    with pytest.raises(ConfigError, match=f"{refused} is short for --") as caught:
        engine_command(asked, place)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("words", [row[0] for row in SHORT_FORMS])
def test_admission_refuses_short_forms_with_the_workers_words(words: tuple[str, ...]):
    """They passed it, and every worker of the fleet crashed."""
    assert (DECIDED, LETTERS) == (VLLM_DECIDED, VLLM_LETTERS)
    said = list[str]()
    for word in words:
        try:
            check_names([word])
        except ConfigError as error:
            said.append(str(error).removeprefix("engine.args: "))
    assert [why for word in words if (why := shortened(word))] == said
