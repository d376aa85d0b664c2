"""vLLM without an agent: `vllm serve` as a process that a test starts, kills and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

from e2e.conftest import vllm_environment
from e2e.emulated.fleet import until

PORT = 8000
READY_S = 300.0


class Vllm:
    """One server at an address of its own, in a process group of its own: killing it kills its engine process, too."""

    def __init__(self, host: str, model: Path, folder: Path, *arguments: str) -> None:
        self.host, self.address = host, f"{host}:{PORT}"
        self._log = folder / f"vllm-{host}.log"
        self._argv = [
            vllm_environment()["FLEET_VLLM_BIN"], "serve", str(model), "--served-model-name", "tiny", "--host", host,
            "--port", str(PORT), "--enforce-eager", "--max-model-len", "1024", "--dtype", "float32", *arguments,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Vllm:
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            start_new_session=True)  # fmt: skip
        return self

    def wait(self) -> Vllm:
        until(f"vLLM at {self.host} is ready", self._ready, READY_S, lambda: self._log.read_text()[-2000:])
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to all of it."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
