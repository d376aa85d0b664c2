"""The command line: defaults, and a sentence for whatever cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_operator import options as module
from fleet_operator.certs.issue import carry_out, read
from fleet_operator.certs.plan import Lifetimes, Work
from fleet_operator.options import DEFAULT_NAMESPACE, parse_options


def test_the_defaults_are_one_operator_for_all_namespaces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOUNTED_NAMESPACE", Path("/nowhere"))
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    given = parse_options([])
    assert (given.selection.names, given.selection.labels, given.installation, given.election) == ((), {}, None, None)
    assert (given.health_port, given.log_format, given.webhook, given.namespace) == (8081, "text", None, DEFAULT_NAMESPACE)


def test_in_a_pod_an_installation_has_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POD_NAMESPACE", "ours")
    assert parse_options([]).installation == "ours/inferencefleet-operator"
    assert parse_options(["--lease-name", "blue"]).installation == "ours/blue"
    assert parse_options(["--installation", "team-a"]).installation == "team-a"


def test_the_namespace_of_the_service_account_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "namespace").write_text("mounted\n")
    monkeypatch.setattr(module, "MOUNTED_NAMESPACE", tmp_path / "namespace")
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert parse_options([]).namespace == "mounted"


def test_all_of_it():
    given = parse_options(
        ["--namespace", "a", "--namespace", "b", "--namespace", "a", "--leader-elect", "--lease-duration", "30",
         "--renew-deadline", "20", "--retry-period", "3", "--health-port", "0", "--log-format", "json",
         "--operator-namespace", "sys",
         "--webhook-port", "9443", "--webhook-name", "10.0.0.1", "--sick-taint", "x", "--drain-timeout", "5",
         "--router-pull-secret", "a.b", "--router-pull-secret", "c", "--router-pull-secret", "a.b"]
    )  # fmt: skip
    assert given.selection.names == ("a", "b")
    assert given.election is not None
    assert (given.election.lease_s, given.election.renew_s, given.election.retry_s) == (30, 20.0, 3.0)
    assert given.webhook is not None
    assert given.webhook.names == {"inferencefleet-webhook.sys.svc", "inferencefleet-webhook.sys.svc.cluster.local", "10.0.0.1"}
    assert given.platform.sick_taints[-1] == "x"
    assert given.platform.drain_most_s == 5
    assert given.platform.router_pull_secrets == ("a.b", "c")
    assert parse_options(["--namespace-selector", "team=a"]).selection.labels == {"team": "a"}


@pytest.mark.parametrize("name", ["2001:DB8:0::1", "::0001", "10.0.0.1", "*.A-b.svc", "x1.example.com"])
def test_a_certificate_has_the_names_that_it_was_asked_for(name: str):
    """2001:DB8::1 came back as 2001:db8::1: a new certificate was made without end, and none was ever served."""
    webhook = parse_options(["--webhook-port", "9443", "--webhook-name", name]).webhook
    assert webhook is not None
    made = read(carry_out(Work("everything", ""), None, webhook.names, 1e9, Lifetimes()))
    assert made.serving.names == webhook.names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kubeconfig", "/nowhere"], "no such file"),
        (["--drain-timeout", "0"], "must be positive"),
        (["--drain-timeout", "nan"], "must be positive"),
        (["--sick-taint", "example.com/gpu=bad:NoExecute"], "without value and effect"),
        (["--namespace-selector", "team=a b"], "key=value"),
        (["--namespace-selector", "a/b/c=d"], "key=value"),
        (["--health-port", "70000"], "--health-port must be a port"),
        (["--webhook-port", "-1"], "--webhook-port must be a port"),
        (["--webhook-port", "1", "--webhook-name", "é.svc"], "--webhook-name é.svc: a DNS name"),
        (["--webhook-port", "1", "--webhook-name", ""], "a DNS name"),
        (["--webhook-port", "1", "--webhook-name", "fe80::1%eth0"], "--webhook-name fe80::1%eth0: a DNS name"),
        (["--webhook-port", "1", "--webhook-name", "https://a:1"], "a DNS name"),
        (["--namespace", "a", "--namespace-selector", "b=c"], "not both"),
        (["--namespace", ""], "argument --namespace: '': no namespace"),
        (["--namespace", "a", "--namespace", "b,c"], "argument --namespace: 'b,c': no namespace"),
        (["--namespace", "Team"], "no namespace can have this name"),
        (["--namespace", "a" * 64], "no namespace can have this name"),
        (["--router-pull-secret", "A"], "argument --router-pull-secret: 'A': no object can have this name"),
        (["--operator-namespace", "a/b"], "argument --operator-namespace: 'a/b': no namespace"),
        (["--namespace-selector", "b"], "key=value"),
        (["--leader-elect", "--renew-deadline", "15"], "at most 0.9"),
        (["--lease-duration", "1"], "between 2 and 600"),
        (["--log-format", "xml"], "invalid choice"),
    ],
)
def test_what_cannot_work_is_told(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_options(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
