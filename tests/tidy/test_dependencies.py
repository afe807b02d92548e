"""Every dependency has a reason, a range and a pin."""

import re

import pytest

from tidy.tree import PROJECT, ROOT

DECLARED = {
    "": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
}
LOCKED = set(
    re.findall(r"^([a-z0-9][a-z0-9._-]*)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
)


TRIED = dict(
    line.split(" ;")[0].split("==")
    for line in (ROOT / "tests" / "lowest.txt").read_text().split("\n")[:-1]
)
"""The versions with which `make lowest` passed last."""
RANGED = ("", "server", "cli", "access", "outbox", "arrow", "postgresql", "mysql", "pydantic")
"""The extras that it installs; `make spark-versions` is for Spark's."""


def names(requirements: list[str]) -> set[str]:
    packages = {re.split(r"[\[<>=!~ ;]", requirement)[0] for requirement in requirements}
    return packages - {"keylane"}


def reasons() -> dict[str, str]:
    """The rows of the tables of packages: name -> reason."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split("\n## Dependencies\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| (.*?) ?\|$", section, re.MULTILINE)
    return {
        name: f"{used_by} {why}" for name, used_by, why in rows if name not in {"package", "---"}
    }


def test_dependencies_have_their_reason_in_the_architecture():
    declared = set().union(*(names(requirements) for requirements in DECLARED.values()))
    assert set(reasons()) == declared


@pytest.mark.parametrize("extra", DECLARED)
def test_dependencies_are_locked(extra):
    assert names(DECLARED[extra]) <= LOCKED, "run: make lock"


def test_demo_installs_packages_of_the_lock_and_no_tools():
    packages = set((ROOT / "demo-packages.txt").read_text().split())
    included = {"", "demo", "server", "cli", "access", "spark", "arrow"}
    assert set().union(*(names(DECLARED[extra]) for extra in included)) <= packages, (
        "run: make lock"
    )
    assert packages <= LOCKED, "run: make lock"
    assert not packages & names(DECLARED["dev"])


def test_lower_bounds_are_the_oldest_versions_that_were_tried():
    bounds = {
        name: bound
        for extra in RANGED
        for requirement in DECLARED[extra]
        for name, bound in re.findall(r"^([a-z0-9-]+)(?:\[.*?\])?>=([0-9.]+)", requirement)
    }
    assert set(bounds) == set().union(*(names(DECLARED[extra]) for extra in RANGED))
    tried = {name.partition("[")[0]: version for name, version in TRIED.items()}
    assert {name: version_of(bound) for name, bound in bounds.items()} == {
        name: version_of(version) for name, version in tried.items()
    }, "run: make lowest"


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at its end."""
    numbers = [int(number) for number in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
