"""The process runtime with real small processes on the in-memory store."""

import asyncio
import base64
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fleet_operator.cluster.interface import CONFIG_MAP, DEPLOYMENT, NODE, POD, NotFoundError
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.runtime.deployments import DeploymentController
from fleet_operator.runtime.kubelet import ProcessKubelet
from fleet_operator.runtime.leftovers import MARK, kill_leftovers, mark_of
from fleet_operator.runtime.scheduler import MemoryScheduler
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.runtime.volumes import PodVolumes

FAST = RuntimeSettings(restart_base_s=0.05, restart_cap_s=0.1, retry_s=0.05, retry_cap_s=0.1)
SERVE = """
import http.server, os, signal, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        open(os.environ['TRACE'], 'a').write(self.path + '\\n')
        ok = self.path != '/gate' or os.path.exists(os.environ['TRACE'] + '.open')
        self.send_response(200 if ok else 503); self.end_headers(); self.wfile.write(os.environ['FLEET_POD_IP'].encode())
    def log_message(self, *a): pass
def stop(*_):
    open(os.environ['TRACE'], 'a').write('SIGTERM\\n'); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer((os.environ['FLEET_BIND_HOST'], 8000), H).serve_forever()
"""


class Local:
    """A store, a scheduler, a Deployment controller and one node."""

    def __init__(self, state: Path, **options) -> None:
        self.cluster = MemoryCluster()
        self.kubelet = ProcessKubelet(self.cluster, "node-a", {"cpu": "8"}, state, dict(os.environ), settings=FAST, **options)
        self.parts = [self.kubelet, MemoryScheduler(self.cluster, {"node-a": {}}), DeploymentController(self.cluster)]

    @contextlib.asynccontextmanager
    async def running(self):
        tasks = [asyncio.create_task(part.run()) for part in self.parts]
        try:
            await asyncio.wait_for(self.kubelet.ready.wait(), 10)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self.cluster.close()
        assert [type(result) for result in results] == [asyncio.CancelledError] * len(tasks)

    async def apply(self, name, *containers, **spec):
        metadata = {"name": name, "namespace": "default"}
        await self.cluster.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}}
        )

    async def until(self, name, check, kind=POD):
        """The object, once `check` holds for it; every change is looked at, so nothing needs a sleep."""
        async with asyncio.timeout(20):
            async with contextlib.aclosing(self.cluster.watch(kind, "default")) as events:
                async for event in events:
                    if event.type in ("ADDED", "MODIFIED") and event.object["metadata"]["name"] == name and check(event.object):
                        return event.object
        raise AssertionError

    async def gone(self, name):
        async with asyncio.timeout(20):
            async with contextlib.aclosing(self.cluster.watch(POD, "default")) as events:
                async for event in events:
                    if event.type == "SYNCED" and name not in {
                        pod["metadata"]["name"] for pod in await self.cluster.list(POD, "default")
                    }:
                        return
                    if event.type == "DELETED" and event.object["metadata"]["name"] == name:
                        return


def run(scenario):
    asyncio.run(scenario())


def python(code, **more):
    return {"name": "main", "image": "none", "command": ["python", "-c", code], **more}


def phase(wanted):
    return lambda pod: pod.get("status", {}).get("phase") == wanted


def condition(pod, name):
    return next((c for c in pod.get("status", {}).get("conditions", []) if c["type"] == name), {})


def is_ready(pod):
    return condition(pod, "Ready").get("status") == "True"


def state(pod):
    statuses = pod.get("status", {}).get("containerStatuses") or [{"state": {}}]
    return statuses[0]["state"]


def marked(state_dir):
    """Processes of this runtime that are alive."""
    mark = f"{MARK}={mark_of(state_dir)}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def gate(trace, *, open_):
    flag = trace.with_name(f"{trace.name}.open")
    if open_:
        flag.touch()
    else:
        flag.unlink()


def fetch(ip, path):
    return urllib.request.urlopen(f"http://{ip}:8000{path}", timeout=5).read().decode()


def test_the_life_of_a_server_pod(tmp_path):
    trace = tmp_path / "trace"

    async def scenario():
        async with Local(tmp_path / "state").running() as local:
            probe = {"httpGet": {"port": "http", "path": "/gate"}, "periodSeconds": 0.05, "failureThreshold": 1}
            await local.apply(
                "server",
                python(
                    SERVE,
                    env=[{"name": "TRACE", "value": str(trace)}],
                    ports=[{"name": "http", "containerPort": 8000}],
                    readinessProbe=probe,
                    lifecycle={"preStop": {"httpGet": {"port": 8000, "path": "/drain"}}},
                ),
            )
            pod = await local.until("server", lambda pod: "running" in state(pod))
            assert not is_ready(pod)
            gate(trace, open_=True)
            pod = await local.until("server", is_ready)
            ip = pod["status"]["podIP"]
            assert ip.startswith("127.")
            assert await asyncio.to_thread(fetch, ip, "/hello") == ip
            gate(trace, open_=False)
            await local.until("server", lambda pod: not is_ready(pod))
            await local.cluster.delete(POD, "default", "server")
            await local.gone("server")
            assert marked(tmp_path / "state") == []
            tail = [line for line in trace.read_text().splitlines() if line != "/gate"]
            assert tail == ["/hello", "/drain", "SIGTERM"]

    run(scenario)


def test_a_server_goes_on_while_its_hook_sleeps(tmp_path):
    trace = tmp_path / "trace"

    async def scenario():
        async with Local(tmp_path / "state").running() as local:
            env = [{"name": "TRACE", "value": str(trace)}]
            ports = [{"name": "http", "containerPort": 8000}]
            probe = {"tcpSocket": {"port": "http"}, "periodSeconds": 0.05}
            hook = {"preStop": {"sleep": {"seconds": 1}}}
            await local.apply("server", python(SERVE, env=env, ports=ports, readinessProbe=probe, lifecycle=hook))
            ip = (await local.until("server", is_ready))["status"]["podIP"]
            await local.cluster.delete(POD, "default", "server")
            assert await asyncio.to_thread(fetch, ip, "/still-there") == ip
            await local.gone("server")
            assert [line for line in trace.read_text().splitlines() if line != "/gate"] == ["/still-there", "SIGTERM"]

    run(scenario)


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        "open('up', 'w'); time.sleep(600)"
    )

    async def scenario():
        async with Local(tmp_path).running() as local:
            up = {"exec": {"command": ["test", "-e", "up"]}, "periodSeconds": 0.1}
            await local.apply("stubborn", python(stubborn, readinessProbe=up), terminationGracePeriodSeconds=1)
            await local.until("stubborn", is_ready)
            assert len(marked(tmp_path)) == 2
            await local.cluster.delete(POD, "default", "stubborn")
            await local.gone("stubborn")
            assert marked(tmp_path) == []

    run(scenario)


def test_a_port_in_use_becomes_the_termination_message(tmp_path):
    bind = "import socket; s = socket.socket(); s.bind(('127.0.0.1', {port}))"

    async def scenario(port):
        async with Local(tmp_path).running() as local:
            await local.apply("second", python(bind.format(port=port)), restartPolicy="Never")
            pod = await local.until("second", phase("Failed"))
            ended = state(pod)["terminated"]
            assert (ended["exitCode"], ended["reason"]) == (1, "Error")
            assert ended["message"].endswith("OSError: [Errno 98] Address already in use")
            assert condition(pod, "Ready")["reason"] == "PodFailed"

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asyncio.run(scenario(taken.getsockname()[1]))


def test_a_crashing_container_restarts_with_back_off(tmp_path):
    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.apply("crashes", python("import sys; sys.exit('no model here')"))
            pod = await local.until(
                "crashes", lambda p: "waiting" in state(p) and p["status"]["containerStatuses"][0]["restartCount"]
            )
            status = pod["status"]["containerStatuses"][0]
            assert status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
            assert status["lastState"]["terminated"]["message"] == "no model here"
            assert pod["status"]["phase"] == "Running"
            await local.until("crashes", lambda p: p["status"]["containerStatuses"][0]["restartCount"] >= 3)

    run(scenario)


def test_a_failing_liveness_probe_restarts_the_container(tmp_path):
    async def scenario():
        async with Local(tmp_path).running() as local:
            never = {"exec": {"command": ["false"]}, "periodSeconds": 0.05, "failureThreshold": 2, "timeoutSeconds": 15}
            await local.apply("wedged", python("import time; time.sleep(600)", livenessProbe=never))
            pod = await local.until("wedged", lambda p: p.get("status", {}).get("containerStatuses", [{}])[0].get("restartCount"))
            ended = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
            assert ended["message"].startswith("liveness probe failed: command exited with 1")
            assert ended["signal"] == signal.SIGTERM

    run(scenario)


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        ({"command": ["no-such-program"]}, "CreateContainerError", 'exec: "no-such-program": executable file not found in $PATH'),
        ({}, "CreateContainerError", 'container "main" has no command, and the process runtime has no images'),
        (
            {"command": ["true"], "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            "CreateContainerConfigError",
            'secret "s" not found',
        ),
    ],
)
def test_a_container_that_cannot_start_says_why(tmp_path, container, reason, message):
    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.apply("broken", {"name": "main", "image": "none", **container})
            pod = await local.until("broken", lambda pod: state(pod).get("waiting", {}).get("message"))
            assert state(pod)["waiting"] == {"reason": reason, "message": message}
            assert pod["status"]["phase"] == "Pending"
            await local.cluster.delete(POD, "default", "broken")
            await local.gone("broken")

    run(scenario)


def test_environment_volumes_and_init_containers(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    look = (
        "import json, os, sys; c = json.loads(os.environ['CONF']);"
        "print(json.dumps([os.listdir(c['model']), open(sys.argv[1] + '/made').read(), os.environ['NAME'], os.environ['IP'],"
        " os.environ['URL'], os.environ['NODE']]), file=sys.stderr); sys.exit(3)"
    )
    mounts = [{"name": "model", "mountPath": "/models/tiny"}, {"name": "scratch", "mountPath": "/scratch"}]

    def field(name, path):
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    async def scenario():
        async with Local(tmp_path / "state", pvc_dirs={"weights": model}).running() as local:
            init = python("open('/scratch/made', 'w').write('by init')", volumeMounts=mounts)
            main = python(
                look,
                args=["/scratch"],
                volumeMounts=mounts,
                env=[
                    {"name": "CONF", "value": json.dumps({"model": "/models/tiny"})},
                    field("NAME", "metadata.name"),
                    field("IP", "status.podIP"),
                    field("NODE", "spec.nodeName"),
                    {"name": "URL", "value": "http://$(IP):1"},
                ],
            )
            volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}, {"name": "scratch", "emptyDir": {}}]
            init["name"] = "prepare"
            await local.apply("looks", main, initContainers=[init], volumes=volumes, restartPolicy="Never")
            pod = await local.until("looks", phase("Failed"))
            ip = pod["status"]["podIP"]
            seen = json.loads(state(pod)["terminated"]["message"])
            assert seen == [["config.json"], "by init", "looks", ip, f"http://{ip}:1", "node-a"]
            await local.cluster.delete(POD, "default", "looks")
            await local.gone("looks")

    run(scenario)
    assert (model / "config.json").exists()
    assert list((tmp_path / "state" / "pods").iterdir()) == []


def config_map(text):
    metadata = {"name": "settings", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a.json": text}}


def test_config_map_files_follow_the_config_map(tmp_path):
    follow = "import sys, time\nwhile open('/etc/conf/a.json').read() != 'two': time.sleep(0.02)\nsys.exit('saw two')"
    container = python(follow, volumeMounts=[{"name": "conf", "mountPath": "/etc/conf"}])
    volumes = [{"name": "conf", "configMap": {"name": "settings"}}]

    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.apply("follower", container, volumes=volumes, restartPolicy="Never")
            pod = await local.until("follower", lambda pod: state(pod).get("waiting", {}).get("message"))
            message = 'MountVolume.SetUp failed for volume "conf": configmap "settings" not found'
            assert state(pod)["waiting"] == {"reason": "ContainerCreating", "message": message}
            await local.cluster.apply(config_map("one"))
            await local.until("follower", lambda pod: "running" in state(pod))
            await local.cluster.apply(config_map("two"))
            pod = await local.until("follower", phase("Failed"))
            assert state(pod)["terminated"]["message"] == "saw two"
            await local.cluster.delete(CONFIG_MAP, "default", "settings")

    run(scenario)


def test_files_that_cannot_be_written_are_written_later_and_end_nothing(tmp_path, monkeypatch):
    """A full disk: the kubelet ended, and with it every pod of the node; later it said so in a log on that disk alone."""
    follow = "import sys, time\nwhile open('/etc/conf/a.json').read() != 'two': time.sleep(0.02)\nsys.exit('saw two')"
    container = python(follow, volumeMounts=[{"name": "conf", "mountPath": "/etc/conf"}])
    full, refresh = [OSError(errno.ENOSPC, "No space left on device", "a.json")] * 2, PodVolumes.refresh

    async def refuse(volumes):
        if full:
            raise full.pop()
        await refresh(volumes)

    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.cluster.apply(config_map("one"))
            volumes = [{"name": "conf", "configMap": {"name": "settings"}}]
            await local.apply("follower", container, volumes=volumes, restartPolicy="Never")
            await local.until("follower", lambda pod: "running" in state(pod))
            monkeypatch.setattr(PodVolumes, "refresh", refuse)
            await local.cluster.apply(config_map("two"))
            pod = await local.until("follower", lambda pod: pod["status"].get("message"))
            assert pod["status"]["message"] == "its files are not written: a.json: No space left on device"
            pod = await local.until("follower", phase("Failed"))
            assert state(pod)["terminated"]["message"] == "saw two"
            assert "message" not in pod["status"]
            assert full == []

    run(scenario)


@pytest.mark.parametrize("projected", [False, True])
def test_secret_files_follow_the_secret(tmp_path, projected):
    """A certificate that is renewed reaches a pod that runs."""
    follow = "import sys, time\nwhile open('/etc/tls/tls.crt').read() != 'two': time.sleep(0.02)\nsys.exit('saw two')"
    container = python(follow, volumeMounts=[{"name": "tls", "mountPath": "/etc/tls"}])
    volume = {"projected": {"sources": [{"secret": {"name": "web"}}]}} if projected else {"secret": {"secretName": "web"}}

    def secret(text):
        data = {"tls.crt": base64.b64encode(text.encode()).decode()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "web", "namespace": "default"}, "data": data}

    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.cluster.apply(secret("one"))
            await local.apply("follower", container, volumes=[{"name": "tls", **volume}], restartPolicy="Never")
            await local.until("follower", lambda pod: "running" in state(pod))
            await local.cluster.apply(secret("two"))
            pod = await local.until("follower", phase("Failed"))
            assert state(pod)["terminated"]["message"] == "saw two"

    run(scenario)


def test_cancelling_the_runtime_kills_everything_and_says_good_bye(tmp_path):
    async def scenario():
        local = Local(tmp_path)
        async with local.running():
            await local.apply("sleeps", python("import time; time.sleep(600)"))
            await local.until("sleeps", is_ready)
            assert len(marked(tmp_path)) == 1
        assert marked(tmp_path) == []
        node = await local.cluster.get(NODE, None, "node-a")
        assert [(c["type"], c["status"]) for c in node["status"]["conditions"]] == [("Ready", "False")]
        assert node["status"]["capacity"]["cpu"] == "8"

    run(scenario)


def test_a_dead_runtimes_processes_are_killed_by_the_next(tmp_path):
    env = {**os.environ, MARK: mark_of(tmp_path, "uid", "main")}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env) as left:
        assert kill_leftovers(tmp_path) == 1
        assert left.wait(10) == -signal.SIGKILL


def test_a_container_dies_with_a_killed_runtime(tmp_path):
    script = f"""
import asyncio, os
from pathlib import Path
from fleet_operator.runtime.logs import ContainerLog
from fleet_operator.runtime.process import start
async def main():
    log = ContainerLog(Path({str(tmp_path)!r}) / "c.log", 1000)
    argv = ["sleep", "600"]
    p = start(argv, os.environ, Path("/"), log, message_bytes=10, mark="m", pids=Path({str(tmp_path)!r}) / "pids")
    print(p.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    pid = int(done.stdout)
    with contextlib.suppress(ProcessLookupError):  # gone already, or about to be: waiting for it is what pidfd is for
        descriptor = os.pidfd_open(pid)
        assert select.select([descriptor], [], [], 10)[0]
        os.close(descriptor)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_logs_are_bounded(tmp_path):
    async def scenario():
        local = Local(tmp_path)
        local.kubelet._settings = RuntimeSettings(log_bytes=10_000)
        async with local.running():
            await local.apply("chatty", python("for i in range(5000): print('line', i)"), restartPolicy="Never")
            await local.until("chatty", phase("Succeeded"))
        log = local.kubelet.log_path("chatty", "main")
        assert log.read_text().endswith("line 4999\n")
        assert sum(path.stat().st_size for path in log.parent.iterdir()) <= 20_000

    run(scenario)


def test_a_deployment_makes_pods_and_deletion_cascades(tmp_path):
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [python("import time; time.sleep(600)")], "terminationGracePeriodSeconds": 1},
    }
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    web = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "default"}, "spec": spec}

    async def scenario():
        async with Local(tmp_path).running() as local:
            await local.cluster.apply(web)
            await local.until("web", lambda d: d.get("status", {}).get("readyReplicas") == 2, DEPLOYMENT)
            [one, two] = await local.cluster.list(POD, "default", {"app": "web"})
            assert one["status"]["podIP"] != two["status"]["podIP"]
            await local.cluster.delete(POD, "default", one["metadata"]["name"], grace_s=1)
            await local.gone(one["metadata"]["name"])
            await local.until("web", lambda d: d["status"]["readyReplicas"] == 2, DEPLOYMENT)
            await local.cluster.delete(DEPLOYMENT, "default", "web")
            for pod in await local.cluster.list(POD, "default"):
                await local.gone(pod["metadata"]["name"])
            with pytest.raises(NotFoundError):
                await local.cluster.get(DEPLOYMENT, "default", "web")
            assert marked(tmp_path) == []

    run(scenario)
