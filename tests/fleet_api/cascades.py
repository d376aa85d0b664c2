"""Cascades and tiers with models of their own, as rows of bad_manifests.py: refused, and not."""

from __future__ import annotations

from typing import Any

TIER = "spec.tiers.0"
LARGE = {"source": "file:///models/large"}


def tier(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "accelerator": {"type": "cpu"}, **more}


def cascade(*changes: tuple[str, Any], **given: Any) -> tuple[tuple[str, Any], ...]:
    """Tier a with the fleet's model, b with a larger one, asked in this order."""
    return (
        ("spec.tiers", [tier("a"), tier("b", model=LARGE)]),
        ("spec.routing", {"cascade": {"tiers": ["a", "b"], **given}}),
        *changes,
    )


Changes = tuple[tuple[str, Any], ...]
BAD_CASCADES: tuple[tuple[str, Changes], ...] = (
    ("a tier's model without a cascade", ((f"{TIER}.model", LARGE),)),
    ("a tier's model from nowhere", cascade((f"{TIER}.model", {"source": "/models/small"}))),
    ("a tier's model without a source", cascade((f"{TIER}.model", {"revision": "v1"}))),
    ("a tier's model climbs", cascade((f"{TIER}.model", {"source": "file:///models/../small"}))),
    ("a tier's revision of a folder", cascade((f"{TIER}.model", {"source": "file:///models/small", "revision": "v1"}))),
    ("a cascade of one tier", (("spec.routing", {"cascade": {"tiers": ["a"]}}),)),
    ("a cascade of five tiers", cascade(tiers=["a", "b", "c", "d", "e"])),
    ("a cascade to a tier that is not there", cascade(tiers=["a", "b", "c"])),
    ("a cascade that leaves a tier out", cascade(("spec.tiers", [tier("a"), tier("b"), tier("c")]))),
    ("a cascade that comes back to a tier", cascade(tiers=["a", "b", "a"])),
    ("a cascade without tiers", (("spec.routing", {"cascade": {}}),)),
    ("adapters and a tier's model", cascade(("spec.model.adapters", [{"name": "x", "source": "file:///models/tiny/x"}]))),
    ("a cascade behind a gateway's picker", cascade(("spec.routing.endpointPicker", {}))),
    ("a cascade of a fleet that sleeps", cascade(("spec.scaling", {"toZero": {"enabled": True}}))),
    ("drafts too small", cascade(heldSize="1k")),
    ("drafts too large", cascade(heldSize="5Mi")),
    ("drafts of a wrong unit", cascade(heldSize="1MB")),
    ("a reason to end with a capital", cascade(check={"finishReasons": ["Length"]})),
    ("nine reasons to end", cascade(check={"finishReasons": ["length"] * 9})),
    ("a phrase of nothing", cascade(check={"phrases": [""]})),
    ("a phrase of 129 characters", cascade(check={"phrases": ["x" * 129]})),
    ("33 phrases", cascade(check={"phrases": ["x"] * 33})),
    ("a mean log-probability above zero", cascade(("spec.engine", {"type": "vllm"}), check={"minMeanLogprob": 0.5})),
    ("log-probabilities of an engine that tells none", cascade(check={"minMeanLogprob": -1.0})),
    ("a token where no tier has a hub's model", cascade(("spec.model.tokenSecretRef", {"name": "hf"}))),
    ("a cache where no tier has a hub's model", cascade(("spec.model.cache", {"type": "nodeLocal", "path": "/c"}))),
)
GOOD_CASCADES: tuple[tuple[str, Changes], ...] = (
    ("a cascade of two models", cascade()),
    (
        "a cascade whose large model is a hub's",
        cascade(
            ("spec.tiers.1.model", {"source": "hf://org/large", "revision": "v1"}),
            ("spec.model.tokenSecretRef", {"name": "hf"}),
            ("spec.model.cache", {"type": "nodeLocal", "path": "/c", "prefetch": {"parallel": 1}}),
            ("spec.scaling", {"toZero": {"enabled": False}}),
            ("spec.engine", {"type": "vllm"}),
            heldSize="4Mi",
            check={"finishReasons": [], "phrases": ["I don't know"], "minMeanLogprob": -0.8},
        ),
    ),
    (
        "a cascade of one model in two precisions",
        (
            ("spec.engine", {"type": "vllm"}),
            ("spec.tiers", [tier("a", quantization="fp8"), tier("b")]),
            ("spec.routing", {"cascade": {"tiers": ["a", "b"], "heldSize": "1Ki", "check": {"minMeanLogprob": 0}}}),
        ),
    ),
    ("no adapters, and a tier's model", cascade(("spec.model.adapters", []))),
)
