"""Errors of the engine, each with the HTTP status and the `type` of vLLM's error shape."""

from __future__ import annotations


class EngineError(Exception):
    """Base: `status` and `kind` go into the answer; `retryable` tells the router whether another worker may help."""

    status = 500
    kind = "InternalServerError"
    retryable = False


class ModelFilesError(EngineError):
    """The model folder cannot be served; the process exits with 2."""

    kind = "BadModel"


class BadRequestError(EngineError):
    """The request cannot be served as asked; `param` names the field."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(BadRequestError):
    """404: another model was asked for."""

    status = 404
    kind = "NotFoundError"


class BadAdapterError(BadRequestError):
    """400: the adapter cannot be applied exactly, or not at all; the message names file and field."""

    kind = "BadAdapterError"


class UnknownAdapterError(BadRequestError):
    """404: no adapter of this name is loaded, or its folder is not there."""

    status = 404
    kind = "NotFoundError"


class NotAllowedError(BadRequestError):
    """403: only the agent of this pod loads and unloads adapters."""

    status = 403
    kind = "ForbiddenError"


class TooLargeError(BadRequestError):
    """413: the body is larger than the bound."""

    status = 413
    kind = "RequestEntityTooLarge"


class OverloadedError(EngineError):
    """503: the waiting queue is full."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class EngineLeavingError(EngineError):
    """503: the engine was told to go; it ends what it has, and takes nothing new."""

    status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class EngineStoppedError(EngineError):
    """503: the engine loop has ended; every open request gets it."""

    status = 503
    kind = "EngineStoppedError"
    retryable = True
