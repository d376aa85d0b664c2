"""What of a vLLM worker's arguments, variables and shape decides how its KV blocks look is part of its compatibility."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator.cluster.interface import CONFIG_MAP
from fleet_operator.observe import workers_told
from fleet_operator.render.revision import compat_of
from fleet_operator.settings import Platform
from fleet_wire.endpoints import Endpoint
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

GPU = {"name": "t", "accelerator": {"type": "h100-sxm"}}
DRAFTER = '{"method": "eagle", "model": "org/draft", "num_speculative_tokens": 3}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def vllm(args: list[str] | None = None, **tier: Any) -> dict[str, Any]:
    return manifest(engine={"type": "vllm", **({"args": args} if args else {})}, tiers=[{**GPU, **tier}])


def compat(wish: dict[str, Any]) -> str:
    fleet = parse_fleet(wish)
    return compat_of(fleet, fleet.spec.tiers[0], Platform())


def both(**role: Any) -> dict[str, Any]:
    return {"prefill": role, "decode": role}


def env(name: str, value: str) -> dict[str, Any]:
    return both(podTemplate={"env": [{"name": name, "value": value}]})


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(vllm(["--dtype=float16"]), id="dtype"),
        pytest.param(vllm(["--dtype", "float16"]), id="dtype-in-two-words"),
        pytest.param(vllm(["--attention-backend=FLASHINFER"]), id="backend"),
        pytest.param(vllm(["--attention-config.backend=FLASHINFER"]), id="backend-in-dots"),
        pytest.param(vllm(["-ac.backend", "FLASHINFER"]), id="backend-in-dots-by-its-letters"),
        pytest.param(vllm(["-sc.method=eagle3"]), id="drafter-in-dots-by-its-letters"),
        pytest.param(vllm(["--hf-overrides", '{"rope_theta": 1}']), id="overrides"),
        pytest.param(vllm(["--revision=v2"]), id="weights"),
        pytest.param(vllm(["--block-size=32"]), id="block-size"),
        pytest.param(vllm(["--speculative-config", DRAFTER]), id="drafter"),
        pytest.param(vllm(["--spec-method=eagle3", "--spec-model", "org/draft"]), id="drafter-by-its-own-names"),
        pytest.param(vllm(["--spec_model=org/draft"]), id="drafter-by-its-model-alone"),
        pytest.param(vllm(["-sc", '{"method": "dflash", "model": "org/draft"}']), id="newer-drafter"),
        pytest.param(vllm(**both(args=["--dtype=float16"])), id="dtype-of-the-roles"),
        pytest.param(vllm(**env("VLLM_KV_CACHE_LAYOUT", "NHD")), id="layout"),
        pytest.param(vllm(parallelism={"tensor": 4}), id="ranks"),
        pytest.param(vllm(decode={"parallelism": {"tensor": 2}}), id="ranks-of-a-role"),
    ],
)
def test_what_changes_kv_is_another_compatibility(other: dict[str, Any]) -> None:
    """Incident: in a rollout that set --dtype old prefill workers were paired with new decode workers. vLLM compares a hash of
    its own when these greet each other and hands nothing over (kv_load_failure_policy fail): such requests failed."""
    assert compat(other) != compat(vllm())


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp"])
def test_how_many_tokens_a_models_own_heads_draft_is_another_compatibility(method: str) -> None:
    """With several heads vLLM 0.32 leaves the prompt's last tokens to the decode worker, one fewer than are drafted, and no hash
    of its own holds how many (nixl/base_scheduler.py, `_prefill_backoff`): in a rollout from 3 to 2 the new decode workers would
    take KV of a token that the old prefill workers did not compute, whatever lies in its place."""

    def tokens(count: int) -> str:
        return compat(vllm([f"--spec-method={method}", "--spec-tokens", str(count)]))

    assert tokens(3) != tokens(2)
    assert tokens(3) == compat(vllm(["-sc", f'{{"num_speculative_tokens": 3, "method": "{method}"}}']))


TEMPLATE = "--chat-template=/etc/chat/t.jinja"


def mounted(name: str, *args: str) -> dict[str, Any]:
    volume = {"name": "chat", "configMap": {"name": name}}
    template = {"volumes": [volume], "volumeMounts": [{"name": "chat", "mountPath": "/etc/chat"}]}
    return vllm([*args], **both(podTemplate=template))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(vllm(), vllm([TEMPLATE]), id="template"),
        pytest.param(vllm([TEMPLATE]), vllm(["--chat-template=/etc/chat/u.jinja"]), id="another-template"),
        pytest.param(mounted("v1", TEMPLATE), mounted("v2", TEMPLATE), id="another-file-at-its-path"),
        pytest.param(vllm(), vllm(["--tokenizer", "org/other"]), id="tokenizer"),
        pytest.param(vllm(), vllm(["--tokenizer-mode=slow"]), id="tokenizer-mode"),
        pytest.param(vllm(), vllm(["--default-chat-template-kwargs.enable_thinking=false"]), id="template-arguments"),
        pytest.param(vllm(), vllm(["--interleave-mm-strings"]), id="where-pictures-stand"),
        pytest.param(vllm(["--video-pruning-rate=0.5"]), vllm(["--video-pruning-rate=0.7"]), id="tokens-of-videos"),
        pytest.param(vllm(), vllm(**env("TZ", "Asia/Tokyo")), id="clock-of-templates"),
    ],
)
def test_what_makes_other_tokens_of_a_request_is_another_compatibility(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Both legs render a conversation, and NIXL compares no prompts: in a rollout that set --chat-template new decode workers
    read the KV of the old template's prompt, answered by it with 200, and kept it under the new one's name for all who came."""
    assert compat(old) != compat(new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(vllm(), vllm(["--hf-config-path=org/longer"]), id="set"),
        pytest.param(vllm(["--hf-config-path=org/a"]), vllm(["--hf-config-path", "org/b"]), id="another"),
        pytest.param(mounted("v1", "--hf-config-path=/etc/chat"), mounted("v2", "--hf-config-path=/etc/chat"), id="file"),
    ],
)
def test_another_config_of_the_same_weights_is_another_compatibility(old: dict[str, Any], new: dict[str, Any]) -> None:
    """vLLM hashes the model's name and the size of its heads into a hand-off, and not how keys are rotated: in a rollout that set
    another config (a longer context by rope scaling) new decode workers would read keys that the old config had rotated."""
    assert compat(old) != compat(new)


@pytest.mark.parametrize("name", ["--mamba-cache-dtype", "--mamba-ssm-cache-dtype"])
def test_another_number_format_of_states_is_another_compatibility(name: str) -> None:
    """vLLM compares how long a state is: bfloat16 (`auto` of most models) and float16 are as long as each other."""
    assert compat(vllm([f"{name}=float16"])) != compat(vllm())


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(vllm(["--gpu-memory-utilization=0.8"]), id="memory"),
        pytest.param(vllm(["--max-num-batched-tokens", "512"]), id="batch"),
        pytest.param(vllm(["--speculative-config", NGRAM]), id="no-drafter"),
        pytest.param(vllm(["--spec-method=ngram", "--spec-tokens=3"]), id="no-drafter-by-its-own-names"),
        pytest.param(vllm(**env("VLLM_LOGGING_LEVEL", "DEBUG")), id="another-variable"),
        pytest.param(vllm(parallelism={"tensor": 1}), id="a-default-written-out"),
        pytest.param(vllm(decode={"args": ["--max-num-seqs=8"]}), id="of-one-role"),
    ],
)
def test_what_does_not_change_kv_is_none(same: dict[str, Any]) -> None:
    assert compat(same) == compat(vllm())


def test_a_volume_that_no_argument_reads_changes_no_kv() -> None:
    assert compat(mounted("v1")) == compat(mounted("v2")) == compat(vllm())


def test_however_it_is_written_it_is_one_compatibility() -> None:
    written = [vllm(["--dtype=float16"]), vllm(["--dtype", "float16"]), vllm(**both(args=["--dtype=float16"]))]
    assert len({compat(wish) for wish in written}) == 1


def test_old_and_new_workers_of_such_a_rollout_serve_in_pairs_of_their_own() -> None:
    """What routers are told at each step: never an old prefill worker for a new decode worker, or the other way round."""
    cpu = [{"name": "t", "accelerator": {"type": "cpu"}}]

    async def scenario(world: World) -> None:
        old = {one.compat for one in await told(world)}
        await world.user.apply(manifest(engine={"type": "vllm", "args": ["--dtype=float16"]}, tiers=cpu))
        for _ in range(20):
            await world.step()
            groups: dict[str, set[str]] = {}
            for one in await told(world):
                groups.setdefault(one.compat, set()).add(one.role)
            assert groups
            assert all(roles == {"prefill", "decode"} for roles in groups.values())
        assert old.isdisjoint(groups)

    play(scenario, engine={"type": "vllm"}, tiers=cpu)


async def told(world: World) -> list[Endpoint]:
    """Workers that routers may use."""
    found = workers_told(await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))
    assert found is not None
    return [one for one in found if one.state == "serving"]
