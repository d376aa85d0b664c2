"""`python -m fleet_operator.webhook.manifests`, as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import yaml

PRINTS = (sys.executable, "-m", "fleet_operator.webhook.manifests", "--service", "ml/hooks")


def test_what_it_prints_is_yaml():
    found = list(yaml.safe_load_all(subprocess.run(PRINTS, capture_output=True, check=True, text=True).stdout))
    assert [one["kind"] for one in found] == ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"]


def test_a_reader_that_left_is_no_traceback():
    """`... | head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    found = subprocess.run(PRINTS, stdout=writes, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writes)
    assert (found.returncode, found.stderr) == (-signal.SIGPIPE, "")
