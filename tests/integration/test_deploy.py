"""The files of deploy/: checked by the tools that exist for them, and three brokers that run with exactly the commands,
variables and paths that the manifests state, each on a host of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from natslog.client import ClientOptions, NatslogClient
from natslog.nats_server import end_with_parent, find_binary
from natslog.security.certificates import make_certificates
from tests.chaos.network import CLIENTS, NATS, Network, address, missing_for_network
from tests.harness import eventually, publish_acked
from tests.pages import runs
from tests.readme import Block

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
CHART = DEPLOY / "helm" / "natslog"
KUBERNETES = "1.33"
BIN = Path(sys.executable).parent
ALL_OF_IT = {
    "tlsSecret": "tls",
    "nats.credsSecret": "nats",
    "nats.leafUrl": "nats-leaf://nats:7422",
    "streams.tokenSecret": "admin",
    "settings.log_level": "debug",
    "env.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    "clusterSecret": "own",
}


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


# ---- by tools ----


def test_dockerfile_by_hadolint() -> None:
    run(BIN / "hadolint", "--failure-threshold", "warning", DEPLOY / "docker" / "Dockerfile")


@pytest.mark.long
def test_compose_file_by_its_schema_and_the_files_that_it_names() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    compose = yaml.safe_load(COMPOSE.read_text())
    mounts = [one for service in compose["services"].values() for one in service.get("volumes", [])]
    files = [one.split(":")[0] for one in mounts if one.startswith(".")]
    assert files
    assert [one for one in files if not (COMPOSE.parent / one).exists()] == []
    builds = [service["build"] for service in compose["services"].values() if "build" in service]
    assert all((COMPOSE.parent / one["context"] / one["dockerfile"]).is_file() for one in builds)


def test_systemd_unit_is_hardened(tmp_path: Path) -> None:
    """As systemd itself rates it: 10 is exposed, 0 is not."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze was not found (Debian: apt-get install systemd)")
    unit = (DEPLOY / "systemd" / "natslog.service").read_text()
    installed = tmp_path / "natslog.service"
    installed.write_text(unit.replace("/opt/natslog/bin/natslog", str(BIN / "natslog")))
    run("systemd-analyze", "verify", installed)
    run("systemd-analyze", "security", "--offline=true", "--threshold=25", installed)


@pytest.fixture(scope="module")
def helm() -> Path:
    return BIN / "helm"


def rendered(helm: Path, values: Mapping[str, str] = {}, *more: str) -> list[dict[str, Any]]:
    given = [f"--set={name}={value}" for name, value in values.items()]
    text = run(helm, "template", "demo", CHART, "--namespace=prod", f"--kube-version={KUBERNETES}.0", *given, *more)
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "values", [{}, ALL_OF_IT, {"security": "false", "rackLabel": ""}], ids=["usual", "all", "open"]
)
def test_chart_by_helm_and_the_schemas_of_kubernetes(helm: Path, tmp_path: Path, values: dict[str, str]) -> None:
    run(helm, "lint", "--strict", CHART)
    streams = f"--set-file=streams.toml={DEPLOY / 'compose' / 'streams.toml'}"
    found = rendered(helm, values, streams if "streams.tokenSecret" in values or "security" in values else "--debug")
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(found))
    run(BIN / "kubernetes-validate", "--kubernetes-version", KUBERNETES, "--strict", file)
    kinds = {one["kind"] for one in found}
    assert {"StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "ConfigMap"} <= kinds
    has_racks = values.get("rackLabel") != ""
    assert ("ClusterRole" in kinds) == has_racks
    assert with_service_account_token(found) == ([("StatefulSet", "rack")] if has_racks else [])


def with_service_account_token(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The containers that have a token of the API of Kubernetes."""
    assert [one["automountServiceAccountToken"] for one in found if one["kind"] == "ServiceAccount"] == [False]
    named = []
    for one in found:
        if (pod := one.get("spec", {}).get("template", {}).get("spec")) is None:
            continue
        tokens = {
            volume["name"]
            for volume in pod["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            if pod.get("automountServiceAccountToken") is not False or tokens & mounted:
                named.append((one["kind"], container["name"]))
    return named


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_chart_refuses_declared_streams_without_a_token(helm: Path) -> None:
    command = [helm, "template", "demo", CHART, "--set=streams.toml=x", f"--kube-version={KUBERNETES}.0"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "streams.tokenSecret is needed with security" in done.stderr


# ---- as the manifests state ----


@dataclass
class Container:
    """A command with its variables. `mounts`: folders on the host, by where it sees them."""

    host: int
    command: list[str]
    environment: dict[str, str]
    mounts: dict[str, Path] = field(default_factory=dict)


@dataclass
class Hosts:
    network: Network
    folder: Path
    names: dict[str, str]
    _count: int = 0

    def _prepared(self, container: Container) -> tuple[list[str], dict[str, str]]:
        """The command that sees its mounts, the names of the hosts, and otherwise this machine; and its variables."""
        self._count += 1
        etc = self.folder / f"etc-of-{self._count}"
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        lines = [f"{place} {name}" for name, place in self.names.items()]
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        (etc / "natslog").mkdir(exist_ok=True)
        steps = [f"mount --bind {etc} /etc"]
        steps += [f"mount -t tmpfs tmpfs {place}" for place in ("/run", "/var/lib", "/var/cache")]
        steps += [f"mkdir -p {place} && mount --bind {source} {place}" for place, source in container.mounts.items()]
        script = " && ".join([*steps, 'cd / && exec "$@"'])
        prefix = [*self.network.prefix(container.host), "unshare", "--mount", "--propagation", "private"]
        variables = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"} | container.environment
        return [*prefix, "sh", "-euc", script, "sh", *container.command], variables

    @contextmanager
    def running(self, container: Container) -> Iterator[subprocess.Popen[bytes]]:
        command, variables = self._prepared(container)
        with open(self.folder / f"{container.host}.log", "ab") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, preexec_fn=end_with_parent)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def output(self, container: Container) -> str:
        """Of a command that ends with code 0."""
        command, variables = self._prepared(container)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, host: int) -> str:
        return (self.folder / f"{host}.log").read_text()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if (missing := missing_for_network()) is not None:
        pytest.skip(missing)
    found = Network(3, f"deploy{os.getpid()}")
    yield found
    found.close()


def folder(path: Path, files: Mapping[str, str] = {}, mode: int = 0o440) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
        (path / name).chmod(mode)
    return path


def check(
    hosts: Hosts,
    brokers: Sequence[Container],
    racks: Sequence[str],
    *,
    has_security: bool,
    streams: Container | None = None,
    page: Block | None = None,
) -> None:
    """They form a cluster that stores messages in all of them, and end on SIGTERM with code 0.

    Args:
        streams: what creates the declared ones. page: commands to execute on the broker that has the token.
    """
    nats = [str(find_binary()), "--config", str(DEPLOY / "compose" / "nats.conf")]
    with ExitStack() as running:
        running.enter_context(hosts.running(Container(NATS, nats, {})))
        processes = [running.enter_context(hosts.running(one)) for one in brokers]
        running.enter_context(hosts.network.entered())
        url = f"http://{address(1)}:9292"
        token = eventually(lambda: _token(brokers), 90, "a token was written") if has_security else None
        client = NatslogClient(url, ClientOptions(patience_s=90, token=token))
        eventually(lambda: _is_up(client), 90, f"three brokers\n{hosts.log(1)[-2000:]}", every_s=0.2)
        assert sorted(one["rack"] for one in client.cluster()["brokers"]) == sorted(racks)
        if streams is not None:
            if token is not None:
                (streams.mounts["/run/secrets/token"] / "token").write_text(token)
            hosts.output(streams)
        shown = ask(hosts, token, "stream", "ls", "--json")
        assert [one["max_age"] for one in shown] == ([] if streams is None else ["7d"])
        ask(hosts, token, "stream", "create", "tried", "--subject", "tried", "--replicas", "3", "--json")
        publish_acked(f"nats://{address(NATS)}:4222", "tried", [b"x"] * 10)
        assert sorted(ask(hosts, token, "stream", "info", "tried", "--json")["isr"]) == [1, 2, 3]
        if page is not None:
            follow(hosts, brokers, page)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(15) for process in processes] == [0, 0, 0]


def follow(hosts: Hosts, brokers: Sequence[Container], page: Block) -> None:
    """The commands of the page as they are printed, but as this user, who has all that is needed here."""
    (broker,) = (one for one in brokers if (one.mounts["/var/lib/natslog"] / "admin.token").is_file())
    script = page.text.replace("runuser -u natslog -- ", "").replace(" deploy/", f" {DEPLOY}/")
    command = ["bash", "-euxc", f"cd /var/lib/natslog\n{script}"]
    printed = hosts.output(Container(broker.host, command, {}, broker.mounts))
    assert "healthy: 3 of 3 brokers" in printed
    assert "0 problems" in printed
    assert "stream orders created" in printed
    token = (broker.mounts["/var/lib/natslog"] / "prometheus.token").read_text().strip()
    request = urllib.request.Request(f"http://{address(1)}:9292/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert b"natslog_metadata_session 1" in answer.read()


def ask(hosts: Hosts, token: str | None, *arguments: str) -> Any:
    """What the command line answers on a host of the cluster, where the names of the brokers are resolved."""
    variables = {"NATSLOG_SERVER": f"http://{address(1)}:9292"} | ({} if token is None else {"NATSLOG_TOKEN": token})
    return json.loads(hosts.output(Container(3, ["natslog", *arguments], variables)))


def _token(brokers: Sequence[Container]) -> str:
    for one in brokers:
        file = one.mounts["/var/lib/natslog"] / "admin.token"
        if file.is_file() and (text := file.read_text().strip()):
            return text
    return ""


def _is_up(client: NatslogClient) -> bool:
    brokers = client.cluster()["brokers"]
    return len(brokers) == 3 and all(one["alive"] and one["role"] == "voter" and one["url"] for one in brokers)


@pytest.mark.long
def test_three_brokers_of_the_compose_file(network: Network, tmp_path: Path) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    names = {"nats": address(NATS)} | {f"natslog-{at}": address(at) for at in (1, 2, 3)}
    secret = folder(tmp_path / "secrets", {"cluster_secret": "a" * 64 + "\n"})
    brokers = [
        Container(
            at,
            ["natslog", *services[f"natslog-{at}"]["command"]],
            services[f"natslog-{at}"]["environment"],
            {
                "/var/lib/natslog": folder(tmp_path / f"data-{at}"),
                "/run/secrets": secret,
            },
        )
        for at in (1, 2, 3)
    ]
    file = folder(tmp_path / "streams", {"streams.toml": (COMPOSE.parent / "streams.toml").read_text()})
    streams = Container(2, ["natslog", *services["streams"]["command"]], {}, {"/etc/natslog": file})
    check(Hosts(network, tmp_path, names), brokers, ["a", "b", "c"], has_security=False, streams=streams)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_three_brokers_of_the_chart(helm: Path, network: Network, tmp_path: Path) -> None:
    values = {"nats.leafUrl": "nats-leaf://nats:7422", "streams.tokenSecret": "admin"}
    found = rendered(helm, values, f"--set-file=streams.toml={COMPOSE.parent / 'streams.toml'}")
    (stateful,) = (one for one in found if one["kind"] == "StatefulSet")
    (config,) = (one for one in found if one["kind"] == "ConfigMap")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    files = folder(tmp_path / "config", config["data"])
    secret = folder(tmp_path / "secret", {"secret": "b" * 64})
    hosts = Hosts(
        network, tmp_path, {"nats": address(NATS)} | {f"demo-{at}.demo.prod.svc": address(at + 1) for at in range(3)}
    )
    brokers = []
    for at in range(3):
        fields = {"metadata.name": f"demo-{at}"}
        variables = environment_of(container, fields)
        places = {
            "data": folder(tmp_path / f"data-{at}"),
            "tmp": folder(tmp_path / f"tmp-{at}"),
            "run": folder(tmp_path / f"run-{at}", {"rack": f"zone-{at}"}),
            "config": files,
            "cluster": secret,
        }
        mounts = {one["mountPath"]: places[one["name"]] for one in container["volumeMounts"] if one["name"] != "tmp"}
        brokers.append(Container(at + 1, container["command"], variables, mounts))
    (job,) = (one["spec"]["template"]["spec"]["containers"][0] for one in found if one["kind"] == "Job")
    variables = {one["name"]: one["value"] for one in job["env"]}
    mounts = {"/etc/natslog": files, "/run/secrets/token": folder(tmp_path / "token")}
    streams = Container(2, job["command"], variables, mounts)
    check(hosts, brokers, ["zone-0", "zone-1", "zone-2"], has_security=True, streams=streams)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_rack_is_read_from_the_node_with_the_mounted_token(helm: Path, network: Network, tmp_path: Path) -> None:
    """The init container as the chart states it, and a server that answers as the API of Kubernetes does."""
    found = rendered(helm)
    (pod,) = (one["spec"]["template"]["spec"] for one in found if one["kind"] == "StatefulSet")
    (config,) = (one["data"] for one in found if one["kind"] == "ConfigMap")
    (container,), (sources,) = (
        pod["initContainers"],
        [one["projected"]["sources"] for one in pod["volumes"] if one["name"] == "node-reader"],
    )
    token, authority = sources[0]["serviceAccountToken"]["path"], sources[1]["configMap"]["items"][0]["path"]
    make_certificates(tmp_path / "tls", [address(CLIENTS)], ["client"], 30)
    places = {
        "config": folder(tmp_path / "config", config),
        "run": folder(tmp_path / "run"),
        "node-reader": folder(
            tmp_path / "account", {token: "the-token", authority: (tmp_path / "tls" / "ca.pem").read_text()}
        ),
    }
    requests: list[tuple[str, str | None]] = []

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()
            labels = {"topology.kubernetes.io/zone": "zone-b"}
            self.wfile.write(json.dumps({"metadata": {"name": "node-7", "labels": labels}}).encode())

    with network.entered():
        server = HTTPServer((address(CLIENTS), 0), Answering)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls" / "broker.pem", tmp_path / "tls" / "broker-key.pem")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        fields = {"spec.nodeName": "node-7"}
        variables = {"KUBERNETES_SERVICE_HOST": address(CLIENTS), "KUBERNETES_SERVICE_PORT": str(server.server_port)}
        mounts = {one["mountPath"]: places[one["name"]] for one in container["volumeMounts"]}
        own = environment_of(container, fields) | variables
        Hosts(network, tmp_path, {}).output(Container(1, container["command"], own, mounts))
        server.shutdown()
    server.server_close()
    assert requests == [("/api/v1/nodes/node-7", "Bearer the-token")]
    assert (tmp_path / "run" / "rack").read_text() == "zone-b"


def environment_of(container: dict[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """Args: fields: of the pod, which Kubernetes sets."""
    return {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }


@pytest.mark.long
@runs("DEPLOY.md", page="Machines with systemd (2)")
def test_three_brokers_of_the_systemd_unit(network: Network, tmp_path: Path, page: Block) -> None:
    unit = (DEPLOY / "systemd" / "natslog.service").read_text()
    example = (DEPLOY / "systemd" / "natslog.toml").read_text()
    (start,) = (line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart="))
    environment = dict(
        line.partition("=")[2].split("=", 1) for line in unit.splitlines() if line.startswith("Environment=")
    )
    assert tomllib.loads(example)["broker_id"] == 1
    names = {"nats": address(NATS)} | {f"log{at}": address(at) for at in (1, 2, 3)}
    brokers = []
    for at, rack in enumerate("abc", start=1):
        config = example.replace("broker_id = 1", f"broker_id = {at}").replace('rack = "a"', f'rack = "{rack}"')
        config = config.replace('advertise_url = "http://log1', f'advertise_url = "http://log{at}')
        files = folder(tmp_path / f"etc-{at}", {"natslog.toml": config, "secret": "c" * 64}, 0o400)
        mounts = {
            "/etc/natslog": files,
            "/var/lib/natslog": folder(tmp_path / f"data-{at}"),
        }
        command = [str(BIN / "natslog"), *start.split()[1:]]
        brokers.append(Container(at, command, environment, mounts))
    check(Hosts(network, tmp_path, names), brokers, ["a", "b", "c"], has_security=True, page=page)
