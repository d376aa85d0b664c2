"""A kind cluster of its own, made and deleted by the test: real kubelets, real containers, real Services.

It never outlives the test: a shell that waits for the end of this process deletes it, however the process ends.
Whatever `docker` reaches is used, as on a laptop. KIND_NODE_IMAGE and KIND_CONFIG may name a node image and a configuration.
Every node gets the torch environment and the test's model mounted read-only at /opt/inferencefleet.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from e2e.kube.controlplane import binaries
from fleet_cli.up.bundled import cache_folder, tiny_model

HERE = Path(__file__).resolve().parent
TORCH, MODELS = "/opt/inferencefleet/torch", "/opt/inferencefleet/models"
CREATE_S, DELETE_S = 300.0, 600.0
"""Deleting is a matter of seconds, but of minutes on a machine that has much else to do: three file systems with images."""
DEVICES_IMAGE = "fakedp:1"


class KindError(Exception):
    """A command of kind, docker or kubectl failed; its words."""


class KindCluster:
    """A context manager; everything it made is gone afterwards."""

    def __init__(self) -> None:
        self.name = f"fleet-e2e-{secrets.token_hex(3)}"
        self.dir = Path(tempfile.mkdtemp(prefix="inferencefleet-kind-"))
        self.kubeconfig = self.dir / "kubeconfig"
        self._kind = _script("get-kind")
        self._remover = self._watching()

    def __enter__(self) -> KindCluster:
        image = ["--image", os.environ["KIND_NODE_IMAGE"]] if os.environ.get("KIND_NODE_IMAGE") else []
        config = self.dir / "nodes.yaml"
        try:
            mounts = {_script("get-torch"): TORCH, str(self._models()): MODELS}
            config.write_text(yaml.safe_dump(with_mounts(_config(), mounts)))
            self._run(
                self._kind, "create", "cluster", "--name", self.name, "--config", str(config), "--wait", "120s",
                "--kubeconfig", str(self.kubeconfig), *image, timeout_s=CREATE_S,
            )  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _, words = self._remover.communicate(timeout=DELETE_S)  # the end of its stdin is what it waits for
        if self._remover.returncode:
            raise KindError(f"kind delete cluster --name {self.name}: {words.strip()}")

    def _watching(self) -> subprocess.Popen[str]:
        """A shell that reads until nobody can write to it any more, and then removes everything."""
        script = 'cat > /dev/null; "$0" delete cluster --name "$1" --kubeconfig "$2/kubeconfig"; code=$?; rm -rf "$2"; exit $code'
        argv = ["sh", "-c", script, self._kind, self.name, str(self.dir)]
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def _models(self) -> Path:
        """A copy that everybody may read: workers run as nobody, and safetensors writes files for their owner alone."""
        model = tiny_model()
        copied = Path(shutil.copytree(model, self.dir / "models" / model.name))
        for path in (self.dir, copied.parent, copied, *copied.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return copied.parent

    def load(self, *images: str) -> None:
        """Images of the local docker into every node that runs pods."""
        nodes = ",".join(self.workers())
        self._run(self._kind, "load", "docker-image", *images, "--name", self.name, "--nodes", nodes, timeout_s=300)

    def kubectl_argv(self) -> list[str]:
        """As administrator; arguments follow."""
        return [_kubectl(), "--kubeconfig", str(self.kubeconfig)]

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """As administrator; KindError with its words when it fails and `check` is set."""
        done = subprocess.run(
            [*self.kubectl_argv(), *args], input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        if check and done.returncode:
            raise KindError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done

    def items(self, kind: str, *args: str) -> list[dict[str, Any]]:
        """Objects of a kind."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json", *args).stdout)["items"]
        return found

    def workers(self) -> list[str]:
        """Names of the nodes that run pods; also the names of their containers in docker."""
        names = [node["metadata"]["name"] for node in self.items("nodes")]
        return sorted(name for name in names if "control-plane" not in name)

    def offer_gpus(self, count: int) -> None:
        """Imaginary GPUs on every worker: by a real device plugin when its image and manifest are there, else as an extended
        resource of the node, as an administrator would."""
        manifest = Path(os.environ.get("KIND_CONFIG", "/nowhere")).parent / "fake-devices.yaml"
        plugin = subprocess.run(["docker", "image", "inspect", DEVICES_IMAGE], capture_output=True, check=False).returncode == 0
        if plugin and manifest.exists():
            self.load(DEVICES_IMAGE)
            self.kubectl("apply", "-f", str(manifest))
        else:
            patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(count)}}})
            for node in self.workers():
                self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
        self.wait("GPUs on every worker", lambda: all(self._gpus(node) for node in self.workers()), 60)

    def _gpus(self, node: str) -> int:
        (found,) = [n for n in self.items("nodes") if n["metadata"]["name"] == node]
        return int(found["status"].get("allocatable", {}).get("nvidia.com/gpu", 0))

    def pause(self, node: str) -> None:
        """Freeze a node with everything on it."""
        self._run("docker", "pause", node)

    def unpause(self, node: str) -> None:
        """Let it go on."""
        self._run("docker", "unpause", node)

    def wait(self, what: str, check: Callable[[], bool], timeout_s: float) -> None:
        """Poll `check`; AssertionError when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.5)

    def _run(self, *argv: str, timeout_s: float = 60) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise KindError(f"{' '.join(argv[:4])}: {done.stderr.strip()[-2_000:]}")
        return done.stdout


def with_mounts(config: dict[str, Any], mounts: dict[str, str]) -> dict[str, Any]:
    """`config` with host folders mounted read-only into every node."""
    added = [{"hostPath": host, "containerPath": inside, "readOnly": True} for host, inside in mounts.items()]
    nodes = [{**node, "extraMounts": [*node.get("extraMounts", []), *added]} for node in config["nodes"]]
    return {**config, "nodes": nodes}


def _config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(os.environ.get("KIND_CONFIG") or HERE / "nodes.yaml").read_text())
    return found


@functools.cache
def _kubectl() -> str:
    """Beside the control plane of `make kube` when that is there, else on PATH, else made with it (minutes)."""
    near = [Path(os.environ.get("KUBEBUILDER_ASSETS", "/nowhere")) / "kubectl", *cache_folder().glob("kube-*/kubectl")]
    there = [str(path) for path in near if path.exists()]
    return there[0] if there else shutil.which("kubectl") or str(binaries() / "kubectl")


def _script(name: str) -> str:
    done = subprocess.run([HERE / name], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]
