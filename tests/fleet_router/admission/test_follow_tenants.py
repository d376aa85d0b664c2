"""The tenants file is followed; a bad one never replaces a good one, and what is told of it holds no value."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fleet_router.admission.tenants import TenantsError, parse_tenants
from fleet_router.follow.documents import Documents
from fleet_router.follow.tenants import read_again
from fleet_router.process import Router, Settings
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.admission.made import CONFIG, key_of, parsed, tenants_file


def test_a_file_is_read_when_it_changes_and_not_otherwise(tmp_path: Path):
    file, seen, told, problems = tmp_path / "tenants.json", None, list[str](), list[str]()

    def again() -> None:
        nonlocal seen
        seen = read_again(file, seen, lambda tenants: told.append(",".join(t.name for t in tenants.tenants)), problems.append)

    again()
    assert problems == [f"tenants: {file}: No such file or directory"]
    file.write_bytes(tenants_file(acme={}))
    again()
    again()
    assert told == ["acme"]
    file.write_bytes(b'{"salt": "sk-secret"}')
    again()
    again()
    assert (told, len(problems)) == (["acme"], 2)
    assert "sk-secret" not in problems[-1]
    replaced = tmp_path / "new"
    replaced.write_bytes(tenants_file(acme={}, other={}))
    replaced.replace(file)
    again()
    assert told == ["acme", "acme,other"]
    file.unlink()
    again()
    assert len(told) == 2


def test_a_router_without_its_tenants_is_not_ready_and_answers_nobody(tmp_path: Path, capfd):
    router = Router(Settings("dir:/none", "127.0.0.1", 0, tmp_path / "tenants.json"))
    router._followed_at = 0.0
    assert router.plain(b"/ready")[2] == b"no tenants yet\n"
    file = tmp_path / "tenants.json"
    file.write_bytes(tenants_file(acme={"class": "gold"}))
    read_again(file, None, router.know, router.failed)
    assert router.plain(b"/ready")[2] == b"no worker can answer a whole request\n"
    text = router.plain(b"/metrics")[2].decode()
    assert 'fleet_router_authentication{mode="keys"} 1' in text
    assert "fleet_router_tenants 1" in text
    said = capfd.readouterr().err
    assert "no class gold" in said
    assert key_of("acme") not in said + text


def test_a_class_that_a_fleet_loses_is_told_of_where_tenants_name_it(capfd):
    """Requests of such a tenant went on in the class `default`, with its priority and its time, and nobody was told."""
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    endpoints = Endpoints(fleet="f", namespace="n")
    router.apply(Documents(CONFIG, endpoints))
    router.know(parsed(acme={"class": "interactive"}))
    assert "no class" not in capfd.readouterr().err
    without = msgspec.structs.replace(CONFIG, classes=CONFIG.classes[1:])
    router.apply(Documents(without, endpoints))
    assert "tenant acme: no class interactive in this fleet" in capfd.readouterr().err
    router.apply(Documents(without, endpoints))
    assert "no class" not in capfd.readouterr().err  # once


def test_metrics_of_many_tenants_are_bounded():
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    router._desk.know(parsed(**{f"t{i}": {} for i in range(500)}))
    for account in router._desk.accounts.values():
        account.counts["answered"] += 1
    lines = router.plain(b"/metrics")[2].decode().splitlines()
    mine = [line for line in lines if line.startswith("fleet_router_tenant_requests_total{")]
    assert len(mine) == 101
    assert 'fleet_router_tenant_requests_total{tenant="_others",result="answered"} 400' in mine


@pytest.mark.parametrize(
    ("then", "others"),
    [
        pytest.param(["t0", "t1", "t2", "t3"], 2, id="one without a name of its own goes"),
        pytest.param(["t1", "t2", "t3", "t4"], 3, id="one with a name of its own goes"),
        pytest.param(["t4", "t3", "t2", "t1", "t0"], 3, id="others come first"),
        pytest.param(["new", "t1", "t2", "t3", "t4"], 3, id="a new one gets the name that is free"),
    ],
)
def test_what_tenants_without_a_name_of_their_own_have_used_goes_down_with_no_tenant(
    monkeypatch: pytest.MonkeyPatch, then: list[str], others: int
):
    """Where one of more than a hundred left the file, `_others` fell by what one of them had ever used: for a rate a restart of
    all of them."""
    monkeypatch.setattr("fleet_router.admission.labels.OWN_MOST", 2)
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    router.know(parsed(t0={}, t1={}, t2={}, t3={}, t4={}))
    accounts = dict(router._desk.accounts)
    for account in accounts.values():
        account.inflight = 2
        account.settle(7, "answered", (7, 5), 0)

    def told() -> dict[str, int]:
        rows = [line.rpartition(" ") for line in router.plain(b"/metrics")[2].decode().splitlines()]
        return {name: int(value) for name, _, value in rows if 'tenant="_others"' in name}

    requests, tokens, inflight = (
        f'fleet_router_tenant_{what}' for what in (
            'requests_total{tenant="_others",result="answered"}', 'tokens_total{tenant="_others",direction="output"}',
            'inflight{tenant="_others"}',
        )
    )  # fmt: skip
    assert told() | {requests: 3, tokens: 15, inflight: 3} == told()
    router.know(parsed(**{name: {} for name in then}))
    assert told() | {requests: 3, tokens: 15, inflight: 3} == told()
    for account in accounts.values():  # what ran for those that are gone ends
        account.settle(7, "answered", (7, 5), 0)
    assert told() | {requests: 6, tokens: 30, inflight: 0} == told()
    router.know(parsed(**{name: {} for name in then}))
    assert told() | {requests: 6, tokens: 30, inflight: 0} == told()
    assert len(router._desk._labels._others) == others


@pytest.mark.parametrize("tenants", [None, Path("/none")], ids=["open", "keys"])
def test_tokens_are_shown_where_they_are_counted(tenants: Path | None):
    router = Router(Settings("dir:/none", "127.0.0.1", 0, tenants))
    if tenants is not None:
        router.know(parsed(acme={}))
    for account in router._desk.accounts.values() or [router._desk._everybody]:
        account.inflight = 1
        account.settle(7, "answered", (7, 5), 0)
    text = router.plain(b"/metrics")[2].decode()
    name = "" if tenants is None else "acme"
    assert f'fleet_router_tenant_requests_total{{tenant="{name}",result="answered"}} 1' in text
    assert (f'fleet_router_tenant_tokens_total{{tenant="{name}",direction="output"}} 5' in text) == (tenants is not None)
    assert ("fleet_router_tenant_tokens_total" in text) == (tenants is not None)


def test_a_tenants_name_has_no_line_break_behind_it():
    """It is a label of metrics, and a line break in one makes the whole scrape unreadable."""
    with pytest.raises(TenantsError, match="name"):
        parse_tenants(tenants_file(**{"acme\n": {}}))
