"""What images are built from: one base, named by digest, and nobody's rights."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("operator", "router", "worker")
PINNED = re.compile(r"[a-z0-9./-]+:[a-z0-9.-]+@sha256:[0-9a-f]{64}")


def would_run(*args: str) -> str:
    """What make would do for a target, with a builder that is not started."""
    mine = {name: value for name, value in os.environ.items() if name not in ("BASE", "KIND_BASE_IMAGE", "MAKEFLAGS")}
    argv = ["make", "--dry-run", *args, "BUILDER=docker"]
    return subprocess.run(argv, cwd=ROOT, env=mine, capture_output=True, text=True, check=True).stdout


def base_of(commands: str) -> set[str]:
    return set(re.findall(r"--build-arg BASE=(\S+)", commands))


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_stands_on_a_base_that_is_named_by_digest_and_runs_as_nobody(image: str):
    lines = (ROOT / image / "Dockerfile").read_text().splitlines()
    (base,) = [line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE=")]
    assert PINNED.fullmatch(base), base
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"${BASE}"}
    assert [line for line in lines if line.startswith("USER ")] == ["USER 65532:65532"]
    assert base_of(would_run("images")) == {base}, "make images and the Dockerfiles name one base"


def test_where_no_registry_can_be_reached_kind_has_its_images_from_a_base_that_is_there():
    (pinned,) = base_of(would_run("images"))
    assert base_of(would_run("kind-images", "KIND_BASE_IMAGE=")) == {pinned}
    assert base_of(would_run("kind-images", "KIND_BASE_IMAGE=local:1")) == {"local:1"}
    assert base_of(would_run("images", "BASE=other:2")) == {"other:2"}


INSTALLS = re.compile(r"\bpip(?:\" | )(?:-q )?install (.*)")


def test_what_is_installed_from_the_index_is_named_by_version():
    """What the index has newest would run on whoever builds or tests, unlooked at."""
    argv = ["git", "ls-files", "Makefile", "*/Dockerfile", "*/get-*"]
    files = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [(ROOT / name).read_text().replace("\\\n", " ") for name in files]
    found = [words for text in texts for words in INSTALLS.findall(text)]
    assert len(found) > 10
    assert [words for words in found if "==" not in words and " -r " not in words] == []
