"""What stops a worker, each with the exit code that the pod's status shows."""

from __future__ import annotations

EXIT_CLEAN = 0
EXIT_ENGINE_DIED = 1
EXIT_BAD_INPUT = 2


class WorkerError(Exception):
    """Base; `reason` is CamelCase for conditions and events, `exit_code` what the process ends with."""

    reason = "WorkerFailed"
    exit_code = EXIT_ENGINE_DIED


class ConfigError(WorkerError):
    """The configuration or identity that the pod was given cannot be used. Retrying does not help."""

    reason = "BadWorkerConfig"
    exit_code = EXIT_BAD_INPUT


class ModelError(WorkerError):
    """The model cannot be used; the message names the cause and the path or the repository."""

    reason = "BadModel"
    exit_code = EXIT_BAD_INPUT


class AdapterError(WorkerError):
    """One adapter cannot be had now; the worker goes on without it, and it is tried again."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupLostError(WorkerError):
    """Another pod of this worker is gone. All of its pods start again, and wait for each other."""

    reason = "GroupLost"


class EngineDiedError(WorkerError):
    """The engine process ended by itself; the message carries its last words. Restarting the container may help."""

    reason = "EngineDied"

    def __init__(self, message: str, exit_code: int = EXIT_ENGINE_DIED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
