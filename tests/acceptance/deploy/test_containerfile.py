"""The Containerfile: valid, not root, free of secrets, with locked packages, and able to live on a
read-only root.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.hosts.deployed import DEPLOY, ROOT, image_environment

pytestmark = pytest.mark.acceptance

PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", re.MULTILINE)
BINARY = Path(sys.executable).parent / "hadolint"


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, value) of each instruction."""
    parser = DockerfileParser(path=None, fileobj=_Buffer(text.encode()))
    steps = parser.structure
    return [
        (step["instruction"], step["value"]) for step in steps if step["instruction"] != "COMMENT"
    ]


class _Buffer:
    """What the parser needs of a file, without one: it writes to the path that it is given
    otherwise.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def seek(self, _position: int) -> None:
        pass

    def readlines(self) -> list[bytes]:
        return self._content.splitlines(keepends=True)

    def read(self) -> bytes:
        return self._content


STEPS = instructions((DEPLOY / "Containerfile").read_text())
FINAL = STEPS[max(index for index, (name, _) in enumerate(STEPS) if name == "FROM") :]


def lint(text: str) -> list[str]:
    """The rules that hadolint finds broken."""
    done = subprocess.run(
        [str(BINARY), "--format", "json", "--no-fail", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return [problem["code"] for problem in json.loads(done.stdout)]


def test_linter_finds_no_problem() -> None:
    assert lint((DEPLOY / "Containerfile").read_text()) == []


def test_linter_finds_a_mistake() -> None:
    """The control of the linter."""
    assert "DL3002" in lint("FROM python:3.11-slim-bookworm\nUSER root\n")
    assert "DL1000" in lint("FORM python:3.11\n")


def test_program_is_not_root_and_started_without_a_shell() -> None:
    last = dict(FINAL)
    user, group = map(int, last["USER"].split(":"))
    assert user > 0
    assert group > 0
    for name in ("ENTRYPOINT", "CMD", "VOLUME"):
        assert isinstance(json.loads(last[name]), list), f"{name} is in exec form"
    assert json.loads(last["ENTRYPOINT"]) == ["/opt/keylane/bin/keylane"]
    after = [name for name, _ in FINAL[[name for name, _ in FINAL].index("USER") :]]
    assert "RUN" not in after
    assert "COPY" not in after


def test_image_writes_to_its_volume_alone() -> None:
    assert image_environment()["PYTHONDONTWRITEBYTECODE"] == "1"
    assert json.loads(dict(FINAL)["VOLUME"]) == ["/var/lib/keylane"]
    assert dict(FINAL)["WORKDIR"] == "/var/lib/keylane"


def test_image_is_made_of_the_wheel_and_locked_packages() -> None:
    """The last stage has what the first one has installed, and nothing of the build."""
    copied = [value for name, value in STEPS if name in {"COPY", "ADD"}]
    assert copied == [
        "deploy/requirements.lock /build/requirements.lock",
        "dist/keylane-*.whl /build/",
        "--from=build /opt/keylane /opt/keylane",
    ]
    installs = [value for name, value in STEPS if name == "RUN" and "pip install" in value]
    assert ["--require-hashes" in line or "--no-deps" in line for line in installs] == [True, True]
    context = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    assert context == ["*", "!deploy/requirements.lock", "!dist/keylane-*.whl"]


def test_image_has_no_secret() -> None:
    assert not any(name == "ARG" for name, _ in STEPS)
    text = (DEPLOY / "Containerfile").read_text().lower()
    assert not re.search(r"password|secret|token|\.key\b|://", text)


def test_image_is_tagged_with_the_version() -> None:
    """Compose and Kubernetes name the tag that the page builds."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tags = {
        tag
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for tag in re.findall(r"\bkeylane:(\d\S*?)(?=[}\s`]|$)", path.read_text())
    }
    assert tags == {version}


def needed(requirement: Requirement, seen: set[str]) -> Iterator[str]:
    """The installed packages that a requirement leads to, on this machine."""
    name = canonicalize_name(requirement.name)
    if name in seen:
        return
    seen.add(name)
    yield name
    extras = requirement.extras or {""}
    for text in metadata.requires(name) or ():
        further = Requirement(text)
        marker: Marker | None = further.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield from needed(further, seen)


def of_extra(extras: dict[str, list[str]], extra: str) -> Iterator[str]:
    """The requirements of an extra of ours, and of the extras that it includes."""
    for text in extras[extra]:
        requirement = Requirement(text)
        if requirement.name != "keylane":
            yield text
        for other in requirement.extras if requirement.name == "keylane" else ():
            yield from of_extra(extras, other)


def test_lock_of_the_image_is_a_part_of_the_whole_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *of_extra(extras, "server")]
    wanted += of_extra(extras, "postgresql")
    seen: set[str] = set()
    names = {name for text in wanted for name in needed(Requirement(text), seen)}
    own = dict(PIN.findall((DEPLOY / "requirements.lock").read_text()))
    whole = dict(PIN.findall((ROOT / "requirements.lock").read_text()))
    assert names <= own.keys(), "run: make lock"
    assert own.items() <= whole.items(), "run: make lock"
    assert not {"pyspark", "pytest", "mypy"} & own.keys()
