"""The fleet that `fleet up` runs when nobody gives it one: one prefill and two decode workers on a tiny Llama made here."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleet_cli.errors import RunError
from fleet_worker.tinymodel import SEED

MODEL = f"tiny-llama-{SEED}"
VLLM_ENV = "FLEET_VLLM_BIN"
MAKING_TIMEOUT_S = 120.0
ENDING_S = 5.0
"""Seconds in which the process that makes it removes what it began."""


def cache_folder() -> Path:
    """Where things outside the checkout live: $INFERENCEFLEET_CACHE, else ~/.cache/inferencefleet. RunError: nobody knows
    where home is, or where we are."""
    chosen = os.environ.get("INFERENCEFLEET_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return (Path(chosen) if chosen else Path(base) / "inferencefleet").expanduser().absolute()
    except RuntimeError as error:
        raise RunError("no home folder is known for the cache: set HOME or INFERENCEFLEET_CACHE") from error
    except FileNotFoundError as error:  # of a path that begins there
        raise RunError("the folder that you are in is gone: give INFERENCEFLEET_CACHE a whole path") from error


def vllm_program() -> str | None:
    """Path of the vLLM to run: $FLEET_VLLM_BIN, what `make vllm` put into the cache, or `vllm` on PATH."""
    if chosen := os.environ.get(VLLM_ENV):
        return chosen
    installed: list[str] = []
    with contextlib.suppress(RunError):  # no home: nothing was put there
        installed = sorted(str(path) for path in cache_folder().glob("vllm-*/bin/vllm"))
    return installed[-1] if installed else shutil.which("vllm")


def tiny_model() -> Path:
    """The folder of the tiny model, made when absent. In a process of its own: torch would stay in this one's memory for ever."""
    folder = cache_folder() / "models" / MODEL
    try:
        if (folder / "config.json").is_file():
            return folder
    except OSError as error:
        raise RunError(f"the tiny model cannot be read in {folder}: {error.strerror}") from error
    command = [sys.executable, "-m", "fleet_worker.tinymodel", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as making:
        try:
            _, said = making.communicate(timeout=MAKING_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            _end(making)
            raise RunError(f"the tiny model was not made within {MAKING_TIMEOUT_S:g} s") from error
        except BaseException:
            _end(making)
            raise
    if making.returncode:
        last = (said.strip().splitlines() or ["no output"])[-1]
        raise RunError(f"the tiny model could not be made in {folder}: {last}")
    return folder


def _end(making: subprocess.Popen[str]) -> None:
    """Told, so that it removes what it began; then killed."""
    making.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        making.wait(ENDING_S)
    making.kill()


def bundled_manifest(model: Path) -> dict[str, Any]:
    """The bundled fleet on a model folder. Bounds are small: every worker is a process on the user's machine."""
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "tiny", "namespace": "default"},
        "spec": {
            "model": {"source": f"file://{model}"},
            "engine": {"type": "torch", "maxModelLen": 1024, "cacheSize": "64Mi"},
            "tiers": [
                {
                    "name": "local",
                    "accelerator": {"type": "cpu"},
                    "prefill": {"minReplicas": 1, "maxReplicas": 2},
                    "decode": {"minReplicas": 2, "maxReplicas": 4},
                }
            ],
            # Low enough that the sentence which `fleet up` offers to paste goes through the prefill worker.
            "routing": {"remotePrefill": {"minUncachedTokens": 16}},
            "telemetry": {"interval": "1s"},
        },
    }
