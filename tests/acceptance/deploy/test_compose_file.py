"""The compose file: valid by the schema of its specification, and fit for what `keylane cluster
init` makes.
"""

from __future__ import annotations

import copy
import json
import re
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest

from support.hosts.deployed import PASSWORD, documents, image_environment, make_folder, settings_in

pytestmark = pytest.mark.acceptance

(COMPOSE,) = documents("compose.yaml")
SERVICES = COMPOSE["services"]
SERVERS = {
    name: service
    for name, service in SERVICES.items()
    if service.get("command", [""])[0] in {"broker", "metaserver"}
}
OURS = {name: service for name, service in SERVICES.items() if name != "postgresql"}
SCHEMA = json.loads(
    (resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
)


def check_compose(document: object) -> None:
    jsonschema.validators.validator_for(SCHEMA)(SCHEMA).validate(document)


def test_file_fits_the_schema_of_the_specification() -> None:
    check_compose(COMPOSE)


def test_schema_refuses_a_mistake() -> None:
    """The control of the schema."""
    for change in ({"read_onyl": True}, {"healthcheck": {"interval": 10}}, {"ports": "7000"}):
        wrong = copy.deepcopy(COMPOSE)
        wrong["services"]["broker-1"] |= change
        with pytest.raises(jsonschema.ValidationError):
            check_compose(wrong)


def test_references_lead_to_what_is_declared() -> None:
    """The schema knows no references: volumes, secrets and services that others wait for."""
    volumes = {
        volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]
    }
    assert {name for name in volumes if not name.startswith("./")} == COMPOSE["volumes"].keys()
    assert {
        secret for service in SERVICES.values() for secret in service.get("secrets", ())
    } == COMPOSE["secrets"].keys()
    for service in SERVICES.values():
        for name, needs in service.get("depends_on", {}).items():
            assert needs == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[name]


def test_servers_are_two_metaservers_and_three_brokers() -> None:
    programs = sorted(service["command"][0] for service in SERVERS.values())
    assert programs == ["broker"] * 3 + ["metaserver"] * 2


@pytest.mark.parametrize("name", OURS)
def test_container_is_confined(name: str) -> None:
    service = OURS[name]
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "ports", "network_mode", "pid"}
    assert all(volume.endswith((":ro", ":/var/lib/keylane")) for volume in service["volumes"]), (
        "it writes to its data alone"
    )


def test_secrets_are_files() -> None:
    text = json.dumps(COMPOSE)
    assert not re.search(r"PASSWORD\"|KEYLANE_TOKEN\"|://[^\"]*:[^\"]*@", text)
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())


def test_servers_run_with_the_files_of_a_new_cluster(tmp_path: Path) -> None:
    """Each with TLS and access control, under its own name and certificate, on one database."""
    made = make_folder("Compose", tmp_path)
    assert {path.name for path in made.iterdir() if path.is_dir()} == SERVERS.keys()
    databases, groups = set(), set()
    for name, service in SERVERS.items():
        mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
        assert mounts == {f"./made/{name}": "/etc/keylane", name: "/var/lib/keylane"}
        environment = image_environment() | service.get("environment", {})
        settings = settings_in(made / name, service["command"], environment)
        assert settings.is_guarded
        assert settings.tls_cert == made / name / "server.pem"
        assert settings.reached_as == service["hostname"] == name
        assert settings.data.is_relative_to("/var/lib/keylane")
        url = urlsplit(service["healthcheck"]["test"][4])
        assert (url.scheme, url.port, url.path) == ("https", settings.port, "/health/ready")
        if service["command"][0] == "metaserver":
            databases.add(settings.database_url)
        else:
            groups.add(settings.group)
            assert settings.meta == ("meta-1:7000", "meta-2:7000")
    assert databases == {f"postgresql+asyncpg://keylane:{PASSWORD}@postgresql/keylane"}
    assert groups == {"g1", "g2", "g3"}
    database = SERVICES["postgresql"]["environment"]
    assert database["POSTGRES_USER"] == database["POSTGRES_DB"] == "keylane"
    metaservers = SERVICES["keylane"]["environment"]["KEYLANE_META"]
    assert metaservers == "meta-1:7000,meta-2:7000"
