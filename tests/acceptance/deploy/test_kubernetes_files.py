"""The Kubernetes manifests: valid by its schemas, confined, and fit for what `keylane cluster init`
makes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from keylane.protocol.endpoints import LIVE, READY
from support.hosts.deployed import DEPLOY, documents, image_environment, make_folder, settings_in

pytestmark = pytest.mark.acceptance

VERSION = "1.37"
PAGE = (DEPLOY / "README.md").read_text()
FILES = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.glob("kubernetes/*.yaml"))
OBJECTS = [document for name in FILES for document in documents(name)]
CLASSES = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.glob("storage-classes/*"))


def kind(name: str) -> list[dict[str, Any]]:
    return [document for document in OBJECTS if document["kind"] == name]


WORKLOADS = {each["metadata"]["name"]: each for each in kind("StatefulSet") + kind("Deployment")}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_object_fits_the_schema(number: int) -> None:
    kubernetes_validate.validate(OBJECTS[number], VERSION, strict=True)


@pytest.mark.parametrize("name", CLASSES)
def test_storage_class_fits_the_schema(name: str) -> None:
    (storage_class,) = documents(name)
    kubernetes_validate.validate(storage_class, VERSION, strict=True)
    assert storage_class["kind"] == "StorageClass"
    assert storage_class["reclaimPolicy"] == "Retain"
    assert storage_class["metadata"]["name"] == "keylane-replicated"


def test_schema_refuses_a_mistake() -> None:
    """The control of the schemas."""
    wrong = copy.deepcopy(WORKLOADS["keylane-broker"])
    pod_of(wrong)["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_objects_are_those_of_a_cluster() -> None:
    assert WORKLOADS.keys() == {"keylane-broker", "keylane-metaserver"}
    assert len(kind("Service")) == 2
    assert not kind("Secret"), "secrets are named, and made by a command"
    assert {each["metadata"].get("namespace", "keylane") for each in OBJECTS} == {"keylane"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_pod_is_confined(name: str) -> None:
    pod = pod_of(WORKLOADS[name])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert "command" not in container, "the entry point of the image"


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_ask_whether_the_server_lives_and_is_ready(name: str) -> None:
    (container,) = pod_of(WORKLOADS[name])["containers"]
    asked = {
        probe: container[f"{probe}Probe"]["httpGet"]
        for probe in ("startup", "liveness", "readiness")
    }
    assert {probe: get["path"] for probe, get in asked.items()} == {
        "startup": LIVE.path,
        "liveness": LIVE.path,
        "readiness": READY.path,
    }
    for get in asked.values():
        assert (get["scheme"], get["port"]) == ("HTTPS", container["ports"][-1]["name"])
        assert "host" not in get, "the pod's address"
        assert "httpHeaders" not in get


def test_labels_and_volumes_lead_to_what_is_there() -> None:
    """The schemas know no references."""
    for name, workload in WORKLOADS.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        pod = pod_of(workload)
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
        settings = next(volume for volume in pod["volumes"] if volume["name"] == "settings")
        if workload["kind"] == "StatefulSet":
            assert settings["projected"]["defaultMode"] == 0o440
            sources = [source["secret"] for source in settings["projected"]["sources"]]
            assert [source["name"] for source in sources] == [
                f"{name}-{number}" for number in range(workload["spec"]["replicas"])
            ]
            for source in sources:
                assert all(
                    item["path"] == f"{source['name']}/{item['key']}" for item in source["items"]
                )
            assert workload["spec"]["serviceName"] == name
            assert workload["spec"]["podManagementPolicy"] == "Parallel"
            assert all(claim["spec"]["accessModes"] == ["ReadWriteOncePod"] for claim in claims)
            assert claims
        else:
            assert settings["secret"] == {"secretName": name, "defaultMode": 0o440}
    for selecting in kind("Service"):
        assert len(selected(selecting["spec"]["selector"])) == 1
    budgets = {each["metadata"]["name"]: each["spec"] for each in kind("PodDisruptionBudget")}
    assert {
        name: len(selected(budget["selector"]["matchLabels"])) for name, budget in budgets.items()
    } == {"keylane-broker": 1, "keylane-metaserver": 1}
    assert budgets["keylane-broker"]["maxUnavailable"] == 1


def selected(labels: dict[str, str]) -> list[str]:
    """The workloads whose pods have these labels."""
    return [
        name
        for name, workload in WORKLOADS.items()
        if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_policies_let_in_whom_they_name() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in kind("NetworkPolicy")}
    assert policies.keys() == WORKLOADS.keys()
    for name, policy in policies.items():
        assert selected(policy["podSelector"]["matchLabels"]) == [name]
        (container,) = pod_of(WORKLOADS[name])["containers"]
        ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert ports == {port["name"] for port in container["ports"]}
        assert all(rule["from"] for rule in policy["ingress"]), "nobody else"


def test_monitors_scrape_each_pod_at_the_port_that_always_answers() -> None:
    monitors = documents("kubernetes/prometheus/service-monitors.yaml")
    assert {monitor["kind"] for monitor in monitors} == {"ServiceMonitor"}
    services = kind("Service")
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (
            each
            for each in services
            if labels.items() <= each["metadata"].get("labels", {}).items()
        )
        (name,) = selected(service["spec"]["selector"])
        (endpoint,) = monitor["spec"]["endpoints"]
        (container,) = pod_of(WORKLOADS[name])["containers"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["port"] == container["readinessProbe"]["httpGet"]["port"]
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == "localhost"
        secret = endpoint["tlsConfig"]["ca"]["secret"]
        assert f"secret generic {secret['name']} --from-file made/{secret['key']}" in PAGE
    assert len(monitors) == len(WORKLOADS)


def pods_of(workload: dict[str, Any]) -> dict[str, str]:
    """The host name of each pod of a workload, by the name of its Secret."""
    name = workload["metadata"]["name"]
    if workload["kind"] == "Deployment":
        (service,) = (
            each for each in kind("Service") if name in selected(each["spec"]["selector"])
        )
        return {name: f"{service['metadata']['name']}.keylane.svc"}
    return {
        f"{name}-{number}": f"{name}-{number}.{workload['spec']['serviceName']}.keylane.svc"
        for number in range(workload["spec"]["replicas"])
    }


def test_servers_run_with_the_files_of_a_new_cluster(tmp_path: Path) -> None:
    """Each with TLS and access control, under its own name; all broker pods are one group."""
    made = make_folder("Kubernetes", tmp_path)
    hosts, follow = set(), []
    for workload in WORKLOADS.values():
        (container,) = pod_of(workload)["containers"]
        (service,) = (
            each
            for each in kind("Service")
            if workload["metadata"]["name"] in selected(each["spec"]["selector"])
        )
        for secret, host in pods_of(workload).items():
            hosts.add(host)
            assert f"secret generic {secret} --from-file made/{host}" in PAGE
            given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
            environment = image_environment() | given
            # the folder of the pod's name is that of its host
            environment["KEYLANE_CONFIG"] = environment["KEYLANE_CONFIG"].replace(
                "$(POD_NAME)/", ""
            )
            settings = settings_in(made / host, container["args"], environment)
            assert settings.is_guarded
            assert settings.tls_cert == made / host / "server.pem"
            assert settings.reached_as == host
            assert settings.metrics_hosts == ("*",)
            ports = [port["port"] for port in service["spec"]["ports"]]
            assert ports == [port["containerPort"] for port in container["ports"]]
            if container["args"][0] == "broker":
                assert ports == [settings.port, settings.health_port]
                assert (settings.group, settings.failover) == ("g1", True)
                assert settings.meta == ("keylane-meta.keylane.svc:7000",)
                follow.append(settings.follow)
            else:
                assert ports == [settings.port]
    assert follow == [False, True, True]
    assert {path.name for path in made.iterdir() if path.is_dir()} == hosts
