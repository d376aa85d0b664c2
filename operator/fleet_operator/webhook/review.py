"""AdmissionReview v1: bytes to a typed request, a verdict to the answer. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

API_VERSION: Final = "admission.k8s.io/v1"
WARNINGS_MOST: Final = 12
WARNING_MOST: Final = 240
"""The API server cuts what is longer than 256 characters and drops what exceeds 4096 together."""
MESSAGE_MOST: Final = 8192


class ReviewError(ValueError):
    """The body is no AdmissionReview that we understand."""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody wants to do."""

    uid: str
    kind: str
    subresource: str
    operation: str
    user: str
    namespace: str
    name: str
    object: Mapping[str, Any]
    """Empty on DELETE."""
    old: Mapping[str, Any]
    """Empty on CREATE."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: refused with a message and HTTP code, or allowed, perhaps with warnings and a JSON patch."""

    allowed: bool = True
    message: str = ""
    code: int = 422
    reason: str = "Invalid"
    warnings: tuple[str, ...] = ()
    patch: tuple[Mapping[str, Any], ...] = ()


def parse_review(body: bytes) -> Request:
    """The request of a body; ReviewError names what is wrong with it."""
    try:
        review = json.loads(body)
    except RecursionError as error:
        raise ReviewError("the body is nested too deeply") from error
    except ValueError as error:
        raise ReviewError("the body is not JSON") from error
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview" or review.get("apiVersion") != API_VERSION:
        raise ReviewError(f"the body is not an AdmissionReview of {API_VERSION}")
    request = review.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str) or not request["uid"]:
        raise ReviewError("request.uid is missing")
    return Request(
        uid=request["uid"],
        kind=_text(_map(request.get("requestKind") or request.get("kind")).get("kind")),
        subresource=_text(request.get("requestSubResource") or request.get("subResource")),
        operation=_text(request.get("operation")),
        user=_text(_map(request.get("userInfo")).get("username")),
        namespace=_text(request.get("namespace")),
        name=_text(request.get("name")),
        object=_map(request.get("object")),
        old=_map(request.get("oldObject")),
    )


def render_review(request: Request, verdict: Verdict) -> dict[str, Any]:
    """The AdmissionReview to answer with."""
    response: dict[str, Any] = {"uid": request.uid, "allowed": verdict.allowed}
    if not verdict.allowed:
        message = _cut(verdict.message, MESSAGE_MOST)
        response["status"] = {"status": "Failure", "message": message, "reason": verdict.reason, "code": verdict.code}
    if verdict.warnings:
        kept = [_cut(warning, WARNING_MOST) for warning in verdict.warnings[:WARNINGS_MOST]]
        if len(verdict.warnings) > WARNINGS_MOST:
            kept.append(f"and {len(verdict.warnings) - WARNINGS_MOST} more")
        response["warnings"] = kept
    if verdict.allowed and verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(list(verdict.patch)).encode()).decode()
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
