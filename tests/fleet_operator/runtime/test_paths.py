"""What a container reads of its mount paths."""

from pathlib import Path

import pytest

from fleet_operator.runtime.paths import command_line, expand, mount_table, translate

MOUNTS = {"/models/tiny": Path("/host/m"), "/models/tiny/extra": Path("/host/x"), "/etc/router": Path("/state/cm")}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("/models/tiny", "/host/m"),
        ("/models/tiny/config.json", "/host/m/config.json"),
        ("/models/tiny/extra/a", "/host/x/a"),
        ("/models/tiny2", "/models/tiny2"),
        ("/other/models/tiny", "/other/models/tiny"),
        ("--model=/models/tiny", "--model=/host/m"),
        ("dir:/etc/router", "dir:/state/cm"),
        ('{"model":"/models/tiny","n":1}', '{"model":"/host/m","n":1}'),
        ('{"model":"\\"/models/tiny\\""}', '{"model":"\\"/host/m\\""}'),
        ("file:///models/tiny/x", "file:///host/m/x"),
        ("/a:/models/tiny:/b", "/a:/host/m:/b"),
        ("nothing here", "nothing here"),
    ],
)
def test_translate(text, seen):
    assert translate(text, MOUNTS) == seen


def test_a_rewritten_path_is_not_rewritten_again():
    assert translate("/a", {"/a": Path("/b"), "/b": Path("/c")}) == "/b"


@pytest.mark.parametrize(
    ("text", "value"),
    [("$(IP):1", "127.1.1.1:1"), ("$(UNKNOWN)", "$(UNKNOWN)"), ("$$(IP)", "$(IP)"), ("$IP", "$IP")],
)
def test_expand(text, value):
    assert expand(text, {"IP": "127.1.1.1"}) == value


def test_mounts_use_sub_paths_and_name_missing_volumes():
    container = {"volumeMounts": [{"name": "v", "mountPath": "/data", "subPath": "a"}]}
    assert mount_table(container, {"v": Path("/h")}) == {"/data": Path("/h/a")}
    with pytest.raises(KeyError, match="v"):
        mount_table(container, {})


def test_a_command_line_is_command_then_args():
    container = {"command": ["run", "/data/x"], "args": ["--ip", "$(IP)"]}
    assert command_line(container, {"IP": "::1"}, {"/data": Path("/h")}) == ["run", "/h/x", "--ip", "::1"]
    assert command_line({"args": ["only"]}, {}, {}) == []
