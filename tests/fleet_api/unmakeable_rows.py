"""Specs whose pods an API server refuses, and their neighbours, which it takes, as changes of bad_manifests.GOOD.

e2e/test_unmakeable.py asks a real API server about the pods of each row.
"""

from __future__ import annotations

from typing import Any

from tests.fleet_api.bad_manifests import HUB, TIER, adapters

Changes = tuple[tuple[str, Any], ...]
DECODE = f"{TIER}.decode"
AT = "spec.tiers[0].decode.podTemplate"
NODES = "requiredDuringSchedulingIgnoredDuringExecution"
WISHES = "preferredDuringSchedulingIgnoredDuringExecution"
KEYS = ("labels", "annotations", "nodeSelector")
MOUNTED = {"volumes": [{"name": "v", "emptyDir": {}}]}
OWN_DEVICES = tuple((f"{TIER}.{role}", {"accelerator": {"type": "a"}}) for role in ("prefill", "decode"))


def near(**selector: Any) -> dict[str, Any]:
    wish = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": selector}}
    return {"affinity": {"podAntiAffinity": {WISHES: [wish]}}}


def together(key: str) -> dict[str, Any]:
    return {"affinity": {"podAffinity": {NODES: [{"topologyKey": key, "labelSelector": {}}]}}}


def node(key: str = "zone", **requirement: Any) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": key, **requirement}]}
    return {"affinity": {"nodeAffinity": {NODES: {"nodeSelectorTerms": [term]}}}}


def wished(key: str = "zone", **requirement: Any) -> dict[str, Any]:
    wish = {"weight": 1, "preference": {"matchExpressions": [{"key": key, **requirement}]}}
    return {"affinity": {"nodeAffinity": {WISHES: [wish]}}}


def huge(requests: Any = None, limits: Any = None) -> dict[str, Any]:
    amounts = {"requests": requests, "limits": limits}
    return {"resources": {kind: {"hugepages-2Mi": most} for kind, most in amounts.items() if most is not None}}


def from_key(kind: str, key: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {kind: {"name": "s", "key": key}}}]}


def on_host(path: str) -> dict[str, Any]:
    return {"volumes": [{"name": "v", "hostPath": {"path": path}}]}


def inside(path: str) -> dict[str, Any]:
    return {**MOUNTED, "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": path}]}


def device(name: str) -> Changes:
    return ((f"{TIER}.accelerator", {"type": "a", "resource": name}),)


def nic(name: str) -> Changes:
    return ((f"{TIER}.kvTransfer", {"transport": "rdma", "resource": name}),)


def gang(key: str) -> Changes:
    return (
        (f"{TIER}.parallelism", {"nodes": 2}),
        (f"{TIER}.accelerator.count", 2),
        (f"{TIER}.placement", {"gang": {"topologyKey": key}}),
    )


def cached(path: str) -> Changes:
    return (HUB, ("spec.model.cache", {"type": "nodeLocal", "path": path}))


def token(key: str) -> Changes:
    return (HUB, ("spec.model.tokenSecretRef", {"name": "s", "key": key}))


def image(name: str) -> Changes:
    return (("spec.engine", {"image": name}),)


EXPRESSION = f"{AT}.affinity.nodeAffinity.{NODES}.nodeSelectorTerms[0].matchExpressions[0]"
WISH = f"{AT}.affinity.nodeAffinity.{WISHES}[0].preference.matchExpressions[0]"
NEAR = f"{AT}.affinity.podAntiAffinity.{WISHES}[0].podAffinityTerm.labelSelector"
HUGE_PAGES = "hugepages-2Mi: Invalid value"
COST = "controller.kubernetes.io/pod-deletion-cost"
APPARMOR = "container.apparmor.security.beta.kubernetes.io"
SECCOMP = "seccomp.security.alpha.kubernetes.io"
TEMPLATES: list[tuple[dict[str, Any], str]] = [
    ({"tolerations": [{"key": "gpu"}, {"value": "a"}]}, f"{AT}.tolerations[1].operator: Invalid value: must be Exists"),
    ({"tolerations": [{"key": "", "operator": "Equal"}]}, f"{AT}.tolerations[0].operator: Invalid value: must be Exists"),
    ({"tolerations": [{"key": "gpu", "operator": "Exists", "value": "a"}]}, f'{AT}.tolerations[0].value: Invalid value: "a"'),
    ({"tolerations": [{"operator": "Exists", "value": "a"}]}, f'{AT}.tolerations[0].value: Invalid value: "a"'),
    ({"tolerations": [{"key": "gpu", "value": "a b"}]}, f'{AT}.tolerations[0].value: Invalid value: "a b": a valid label'),
    ({"tolerations": [{"key": "gpu", "value": "a/b"}]}, f'{AT}.tolerations[0].value: Invalid value: "a/b": a valid label'),
    ({"tolerations": [{"key": "gpu", "tolerationSeconds": 60}]}, f"{AT}.tolerations[0].effect: Invalid value: must be NoExec"),
    (
        {"tolerations": [{"operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 0}]},
        f"{AT}.tolerations[0].effect: Invalid value: must be NoExec",
    ),
    ({"tolerations": [{"key": "a b", "operator": "Exists"}]}, f'{AT}.tolerations[0].key: Invalid value: "a b": a qualified name'),
    ({"tolerations": [{"key": "A.b/c"}]}, f'{AT}.tolerations[0].key: Invalid value: "A.b/c": a qualified name'),
    (node(operator="In"), f"{EXPRESSION}.values: Required value: operator In"),
    (node(operator="NotIn", values=[]), f"{EXPRESSION}.values: Required value: operator NotIn"),
    (node(operator="Exists", values=["a"]), f"{EXPRESSION}.values: Forbidden: operator Exists takes none"),
    (node(operator="DoesNotExist", values=["a"]), f"{EXPRESSION}.values: Forbidden: operator DoesNotExist takes none"),
    (node(operator="Gt", values=["1", "2"]), f"{EXPRESSION}.values: Required value: operator Gt needs exactly one"),
    (node(operator="Lt"), f"{EXPRESSION}.values: Required value: operator Lt needs exactly one"),
    (node(operator="In", values=["a", "a b"]), f'{EXPRESSION}.values[1]: Invalid value: "a b": a valid label'),
    (node(operator="Gt", values=["-1"]), f'{EXPRESSION}.values[0]: Invalid value: "-1": a valid label'),
    (node("a..b/c", operator="Exists"), f'{EXPRESSION}.key: Invalid value: "a..b/c": a qualified name'),
    (wished(operator="In"), f"{WISH}.values: Required value: operator In"),
    (wished("x" * 64, operator="Exists"), f"{WISH}.key: Invalid value"),
    (near(matchLabels={"a b": ""}), f'{NEAR}.matchLabels: Invalid value: "a b"'),
    (near(matchLabels={"A.b/c": ""}), f'{NEAR}.matchLabels: Invalid value: "A.b/c"'),
    (near(matchExpressions=[{"key": "a", "operator": "NotIn"}]), f"{NEAR}.matchExpressions[0].values: Required value"),
    (
        near(matchExpressions=[{"key": "a", "operator": "Exists", "values": ["x"]}]),
        f"{NEAR}.matchExpressions[0].values: Forbidden",
    ),
    (
        near(matchExpressions=[{"key": "a", "operator": "In", "values": ["a b"]}]),
        f'{NEAR}.matchExpressions[0].values[0]: Invalid value: "a b"',
    ),
    (near(matchExpressions=[{"key": "a..b/c", "operator": "Exists"}]), f"{NEAR}.matchExpressions[0].key: Invalid value"),
    (together("a..b/c"), f'{AT}.affinity.podAffinity.{NODES}[0].topologyKey: Invalid value: "a..b/c"'),
    *(({name: {key: ""}}, f"{AT}.{name}: Invalid value") for name in KEYS for key in ("my team", "-a", "a/b/c", "", "x" * 64)),
    *(({name: {key: ""}}, f"{AT}.{name}: Invalid value") for name in KEYS for key in ("a..b/c", "/b", f"{'a' * 254}/b", "é")),
    *(({name: {"A.b/c": ""}}, f'{AT}.{name}: Invalid value: "A.b/c"') for name in ("labels", "nodeSelector")),
    ({"annotations": {f"a{n}": "é" * 4096 for n in range(32)}}, f"{AT}.annotations: Too long: may not be more than 262144 bytes"),
    *(
        ({"annotations": {COST: value}}, f'{AT}.annotations[{COST}]: Invalid value: "{value}": must be a whole number of 32')
        for value in ("", "cheap", "1.5", "007", "+1", "2147483648", "-2147483649", "1_0", "\u0661")
    ),
    ({"annotations": {"kubernetes.io/config.mirror": ""}}, f"{AT}.annotations[kubernetes.io/config.mirror]: Invalid value"),
    ({"annotations": {f"{APPARMOR}/vllm": "unconfined"}}, f"{AT}.annotations[{APPARMOR}/vllm]: Invalid value"),
    ({"annotations": {f"{APPARMOR}/worker": "Unconfined"}}, f'{AT}.annotations[{APPARMOR}/worker]: Invalid value: "Unconfined"'),
    *(
        ({"annotations": {f"{SECCOMP}/pod": value}}, f'{AT}.annotations[{SECCOMP}/pod]: Invalid value: "{value}"')
        for value in ("", "unconfined", "RuntimeDefault", "localhost/a.json")
    ),
    *(
        ({"annotations": {f"container.{SECCOMP}/worker": value}}, f"{AT}.annotations[container.{SECCOMP}/worker]: Invalid value")
        for value in ("", "RuntimeDefault", "localhost//a.json", "localhost/../a.json")
    ),
    (huge("2Mi", "4Mi"), f"{AT}.resources.requests.{HUGE_PAGES}"),
    (huge(limits="3Mi"), f'{AT}.resources.limits.{HUGE_PAGES}: "3Mi": must be a multiple of 2Mi'),
    *((on_host(path), f"{AT}.volumes[0].hostPath.path: Invalid value") for path in ("/a/../b", "/..", "/a/..")),
    *((inside(path), f"{AT}.volumeMounts[0].subPath: Invalid value") for path in ("../x", "..", "a/..")),
    *(
        (from_key(kind, key), f'{AT}.env[0].valueFrom.{kind}.key: Invalid value: "{key}": must not be .')
        for kind in ("secretKeyRef", "configMapKeyRef")
        for key in (".", "..", "..a", "...")
    ),
]
LONG = "g" * 64
ROWS: list[tuple[Changes, str]] = [
    *((((DECODE, {"podTemplate": template}),), words) for template, words in TEMPLATES),
    *((image(name), "spec.engine.image: Invalid value: ") for name in ("w:1 ", " w", "w\n", "w\u00a0")),
    *((cached(path), f'spec.model.cache.path: Invalid value: "{path}"') for path in ("/c/../x", "/..", "/c/..")),
    *((token(key), f'spec.model.tokenSecretRef.key: Invalid value: "{key}"') for key in (".", "..", "..a")),
    (
        (
            *adapters({"name": "a", "source": "file:///models/tiny/a"}, {"name": "b", "source": "hf://org/b"}),
            ("spec.model.tokenSecretRef", {"name": "s", "key": ".."}),
        ),
        'spec.model.tokenSecretRef.key: Invalid value: ".."',
    ),
    (((f"{TIER}.accelerator.nodeSelector", {"": "a"}),), 'spec.tiers[0].accelerator.nodeSelector: Invalid value: ""'),
    (
        ((f"{TIER}.prefill", {"accelerator": {"type": "a", "nodeSelector": {"x" * 64: ""}}}),),
        "spec.tiers[0].prefill.accelerator.nodeSelector: Invalid value",
    ),
    (
        ((f"{TIER}.accelerator.nodeSelector", {"a b": "a"}), OWN_DEVICES[0]),
        "spec.tiers[0].accelerator.nodeSelector: Invalid value",
    ),
    *(
        (device(name), f'spec.tiers[0].accelerator.resource: Invalid value: "{name}": not the name of a resource')
        for name in ("a..b/gpu", "a.-b/gpu", "requests.a.b/gpu", f"a.b/{LONG}", f"{'a' * 245}/g", f"kubernetes.io/{LONG}")
    ),
    (
        ((f"{TIER}.prefill", {"accelerator": {"type": "a", "resource": "a..b/c"}}),),
        'spec.tiers[0].prefill.accelerator.resource: Invalid value: "a..b/c"',
    ),
    *(
        (nic(name), f'spec.tiers[0].kvTransfer.resource: Invalid value: "{name}": not the name of a resource')
        for name in ("rdma..x/ib", "requests.rdma/ib", f"rdma/{LONG}")
    ),
    *(
        (((f"{TIER}.placement", {"topologyKey": key}),), "spec.tiers[0].placement.topologyKey: Invalid value")
        for key in ("a..b/c", "x" * 64, f"{'a' * 254}/c")
    ),
    *((gang(key), "spec.tiers[0].placement.gang.topologyKey: Invalid value") for key in ("a..b/c", "x" * 64)),
]
"""(changes, how the words about them begin)."""
UNPULLED: list[tuple[Changes, str]] = [(image(name), "spec.engine.image: Invalid value") for name in ("a b", "a\tb", "w\x1c")]
"""Taken by the API server, refused here all the same: no kubelet can read such a name (InvalidImageName)."""
UNPLACED: list[tuple[Changes, str]] = [
    (((DECODE, {"podTemplate": template}),), words)
    for template, words in (
        *(
            (
                node(operator=operator, values=[value]),
                f'{EXPRESSION}.values[0]: Invalid value: "{value}": operator {operator} comp',
            )
            for operator, value in (("Gt", "abc"), ("Lt", ""), ("Gt", "1.5"), ("Lt", "5Gi"), ("Gt", "9223372036854775808"))
        ),
        (wished(operator="Gt", values=["abc"]), f'{WISH}.values[0]: Invalid value: "abc": operator Gt compares whole numbers'),
        (wished(operator="Gt", values=["-1"]), f'{WISH}.values[0]: Invalid value: "-1": a valid label'),
        (wished(operator="In", values=["a", "a b"]), f'{WISH}.values[1]: Invalid value: "a b": a valid label'),
    )
]
"""Taken by the API server as well: no node ever meets such a term, and of such a wish the scheduler says 'running PreScore plugin
"NodeAffinity"' and fails the pod, where two nodes or more would do."""
UNLIMITED: Changes = ((DECODE, {"podTemplate": huge(requests="2Mi")}),)
"""The other way round: refused by an API server, but not where a LimitRange sets the limit that is missing."""
LONGEST = f"{'a' * 253}/{'b' * 63}"
GOOD_KEYS = ("A", "A.b", "a_b", "1/1", "a.b/C", "a/b_c.d-E", LONGEST, "x" * 63)
GOOD_TEMPLATES: list[dict[str, Any]] = [
    {"tolerations": [{"operator": "Exists"}, {"key": "a.b/c", "value": ""}, {"operator": "Exists", "value": ""}]},
    {"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]},
    {
        "tolerations": [
            {"key": "a", "effect": "NoExecute", "tolerationSeconds": 60},
            {"operator": "Exists", "effect": "NoExecute"},
        ]
    },
    {"tolerations": [{"key": "", "operator": "Exists", "effect": "PreferNoSchedule"}, {"key": LONGEST, "value": "x" * 63}]},
    {"tolerations": [{"key": "a", "operator": "Equal", "value": "B_c.d-1", "effect": "NoSchedule"}, {"key": "a"}, {"key": "a"}]},
    {
        "tolerations": [
            {"key": "a", "value": None, "effect": None, "tolerationSeconds": None},
            {"key": None, "operator": "Exists"},
        ]
    },
    node(operator="In", values=["a", "A_b.c", "", "a"]),
    node(operator="NotIn", values=["a"]),
    node(operator="Exists", values=[]),
    node(operator="DoesNotExist"),
    node(operator="Gt", values=["007"]),
    node(operator="Lt", values=["5"]),
    node(LONGEST, operator="Exists"),
    wished(operator="In", values=["a", ""]),
    wished(operator="Gt", values=["9223372036854775807"]),
    wished(LONGEST, operator="DoesNotExist"),
    near(matchExpressions=[{"key": "a", "operator": "In", "values": [""]}], matchLabels={"a.b/c": ""}),
    near(matchExpressions=[{"key": "a", "operator": "NotIn", "values": ["x", "Y_z"]}, {"key": LONGEST, "operator": "Exists"}]),
    near(matchExpressions=[{"key": "a", "operator": "DoesNotExist"}, {"key": "a", "operator": "Exists", "values": []}]),
    near(matchExpressions=[], matchLabels={}),
    near(),
    together("topology.kubernetes.io/zone"),
    *({name: {key: "" for key in GOOD_KEYS}} for name in KEYS),
    *({"annotations": {COST: value}} for value in ("0", "-1", "-007", "2147483647", "-2147483648")),
    *({"annotations": {f"{APPARMOR}/worker": value}} for value in ("unconfined", "runtime/default", "localhost/a")),
    {"annotations": {f"{SECCOMP}/pod": "runtime/default"}},
    *({"annotations": {f"container.{SECCOMP}/worker": value}} for value in ("unconfined", "docker/default", "localhost/a/..b")),
    {"annotations": {"Example.com/X": "", "\u0130": "", "\u212a/k": "\n \u0001 é"}},
    {"annotations": {f"a{n}": "x" * 4096 for n in range(32)}},
    huge("2Mi", 2_097_152),
    huge("4Mi", "4096Ki"),
    huge(0, 0),
    huge(limits="2Mi"),
    huge(limits="2097151.5"),
    *(on_host(path) for path in ("/a/..b", "/a..b", "/a/...", "/a/b../c", "/.", "/a b", "/a:b")),
    *(inside(path) for path in ("a..b", "...", "..a", ".", "a/b../c")),
    {**MOUNTED, "volumeMounts": [{"name": "v", "mountPath": "/v/../w"}]},
    *(from_key(kind, key) for kind in ("secretKeyRef", "configMapKeyRef") for key in (".a", "a..b", "A_b-c.d")),
]
GOOD_ROWS: list[Changes] = [
    *(((DECODE, {"podTemplate": template}),) for template in GOOD_TEMPLATES),
    *map(image, ("w", "w:1", "Reg.example:5000/W:1", f"r.io/w@sha256:{'a' * 64}", f"r.io:5000/w:1@sha256:{'a' * 64}", "a..b/c")),
    *map(cached, ("/a..b", "/c/.../d", "/c/..d", "/.")),
    *map(token, (".a", "a..b", "A_b-c.d")),
    *map(
        device, ("a.b/GPU", "kubernetes.io/gpu", "requests.kubernetes.io/g", "limits.cpu/x", f"{'a' * 244}/g", f"a.b/{LONG[1:]}")
    ),
    *map(nic, ("rdma/ib", "nvidia.com/gpu")),
    *map(gang, ("rack", LONGEST)),
    ((f"{TIER}.placement", {"topologyKey": LONGEST, "policy": "required", "exclusive": True}),),
    ((f"{TIER}.accelerator", {"type": "a", "resource": "a..b/c", "nodeSelector": {"a b": ""}}), *OWN_DEVICES),
    (("spec.model.tokenSecretRef", {"name": "s"}), *cached("/c")),
]
