"""The Kubernetes manifests: valid by its schemas, confined, and fit for what `keylane cluster init`
makes.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from keylane.protocol.endpoints import LIVE, READY
from support.hosts.deployed import DEPLOY, documents, image_environment, make_folder, settings_in

pytestmark = pytest.mark.acceptance

VERSION = "1.37"
FILES = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.glob("kubernetes/*"))
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
def test_storage_class_is_what_brokers_ask_for(name: str) -> None:
    (storage_class,) = documents(name)
    kubernetes_validate.validate(storage_class, VERSION, strict=True)
    assert storage_class["kind"] == "StorageClass"
    assert storage_class["reclaimPolicy"] == "Retain"
    brokers = [each for each in WORKLOADS.values() if each["kind"] == "StatefulSet"]
    claims = [claim for each in brokers for claim in each["spec"]["volumeClaimTemplates"]]
    assert {claim["spec"]["storageClassName"] for claim in claims} == {
        storage_class["metadata"]["name"]
    }
    assert all(claim["spec"]["accessModes"] == ["ReadWriteOncePod"] for claim in claims)


def test_schema_refuses_a_mistake() -> None:
    """The control of the schemas."""
    wrong = copy.deepcopy(WORKLOADS["keylane-broker-1"])
    pod_of(wrong)["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_objects_are_those_of_a_cluster() -> None:
    assert WORKLOADS.keys() == {
        *("keylane-broker-1", "keylane-broker-2", "keylane-broker-3", "keylane-metaserver")
    }
    assert len(kind("Service")) == 4
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
        assert (get["scheme"], get["port"]) == ("HTTPS", container["ports"][0]["name"])
        assert get["httpHeaders"] == [{"name": "Host", "value": "localhost"}]


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
        assert settings["secret"] == {"secretName": name, "defaultMode": 0o440}
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["replicas"] == 1
            assert workload["spec"]["serviceName"] == name
            assert claims
    for selecting in kind("Service"):
        assert len(selected(selecting["spec"]["selector"])) == 1
    budgets = {each["metadata"]["name"]: each["spec"] for each in kind("PodDisruptionBudget")}
    assert {
        name: len(selected(budget["selector"]["matchLabels"])) for name, budget in budgets.items()
    } == {"keylane-broker": 3, "keylane-metaserver": 1}
    assert budgets["keylane-broker"]["maxUnavailable"] == 1


def selected(labels: dict[str, str]) -> list[str]:
    """The workloads whose pods have these labels."""
    return [
        name
        for name, workload in WORKLOADS.items()
        if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_brokers_differ_in_their_number_alone() -> None:
    texts = {
        json.dumps([service, WORKLOADS[service["metadata"]["name"]]]).replace(
            service["metadata"]["name"], "keylane-broker-N"
        )
        for service in kind("Service")
        if service["metadata"]["name"] in WORKLOADS
    }
    assert len(texts) == 1


def test_servers_run_with_the_files_of_a_new_cluster(tmp_path: Path) -> None:
    """Each with TLS and access control, under the name of its Service."""
    made = make_folder("Kubernetes", tmp_path)
    groups = set()
    for service in kind("Service"):
        host = f"{service['metadata']['name']}.keylane.svc"
        (name,) = selected(service["spec"]["selector"])
        (container,) = pod_of(WORKLOADS[name])["containers"]
        command = f"--from-file made/{host}"
        assert f"secret generic {name} {command}" in (DEPLOY / "README.md").read_text()
        environment = image_environment() | {
            each["name"]: each["value"] for each in container.get("env", ())
        }
        settings = settings_in(made / host, container["args"], environment)
        assert settings.is_guarded
        assert settings.tls_cert == made / host / "server.pem"
        assert settings.reached_as == host
        (port,) = service["spec"]["ports"]
        assert settings.port == port["port"] == container["ports"][0]["containerPort"]
        if container["args"][0] == "broker":
            groups.add(settings.group)
            assert settings.meta == ("keylane-meta.keylane.svc:7000",)
    assert groups == {"g1", "g2", "g3"}
    assert {path.name for path in made.iterdir() if path.is_dir()} == {
        f"{service['metadata']['name']}.keylane.svc" for service in kind("Service")
    }
