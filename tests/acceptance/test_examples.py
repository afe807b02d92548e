"""The programs and projects in examples/ do what they say, run as their reader runs them.

`make examples` runs the tests that need packages which the lock does not have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet
import pytest

from keylane import Producer
from keylane.cli.java import find_java
from support.cluster import Cluster
from support.java import environment_without_java
from support.pages import blocks_of
from tidy.tree import ROOT, tracked_files

pytestmark = pytest.mark.acceptance

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 200
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The example ends before the second compiler or a parallel collector pays off."""
TESTS = {
    "spark_reprocessing": ["test_jobs.py"],
    "warehouse": ["test_copy_changes.py"],
    "web_shop": ["test_billing.py"],
}
"""The tests of projects that need no packages of their own."""
ONLY_IN_MAKE_EXAMPLES = {
    "django_shop/test_shop.py",
    "warehouse/test_report.py",
    "web_shop/test_api.py",
}


def run(
    cluster: Cluster, name: str, *arguments: str, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The lines that an example prints."""
    return run_python(cluster, str(EXAMPLES / name), *arguments, environment=environment)


def run_python(
    cluster: Cluster,
    *arguments: str,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "KEYLANE_META": cluster.meta},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def fill(cluster: Cluster, subject: str, pairs: list[tuple[bytes, bytes]]) -> None:
    await cluster.create(subject)
    async with Producer(cluster.meta) as producer:
        await producer.send_all(subject, pairs)


@pytest.mark.parametrize("project", TESTS)
def test_project_passes_its_tests(project):
    """With the settings of pytest that a copy of the project has."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            *TESTS[project],
        ],
        cwd=EXAMPLES / project,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_test_of_a_project_is_run_here_or_in_make_examples():
    found = {
        name.removeprefix("examples/")
        for name in tracked_files()
        if name.startswith("examples/") and Path(name).name.startswith("test_")
    }
    here = {f"{project}/{name}" for project, names in TESTS.items() for name in names}
    assert found == here | ONLY_IN_MAKE_EXAMPLES


def test_every_example_compiles():
    for name in tracked_files():
        if name.startswith("examples/") and name.endswith(".py"):
            compile((ROOT / name).read_text(), name, "exec")


def test_readme_of_a_project_is_short():
    pages = list(EXAMPLES.glob("*/README.md"))
    assert len(pages) == 5
    assert all(len(page.read_text().splitlines()) <= 40 for page in pages)


async def test_ack_by_hand(cluster, tmp_path):
    """What was acked is in the file, once, and a second run gets the next ones."""
    await fill(cluster, "orders", [(b"k", b"%d" % n) for n in range(20)])
    path = tmp_path / "orders.txt"
    for upto in (10, 20):
        assert run(cluster, "ack_by_hand.py", str(path)) == [f"wrote 10 messages to {path}"]
        assert path.read_text().split() == [str(n) for n in range(upto)]


async def test_refuse_a_paused_owner(cluster, tmp_path):
    """The page about it shows what the program prints, but for the tokens."""
    await cluster.create("orders", partitions=1)
    lines = run(cluster, "refuse_a_paused_owner.py", str(tmp_path / "billing.db"))
    page = ROOT / "docs" / "do" / "fence-effects.md"
    (shown,) = [block.text.splitlines() for block in blocks_of(page) if block.language == "text"]
    places = re.compile(r"\b(token|partition) \d+")
    assert [places.sub(r"\1 n", line) for line in lines] == [
        places.sub(r"\1 n", line) for line in shown
    ]
    first, second = (int(re.findall(r"token (\d+)", line)[0]) for line in (lines[0], lines[2]))
    assert first < second


@pytest.mark.spark
async def test_spark_reprocessing(cluster, tmp_path):
    """Old orders get cents, and the report adds them up, on the Java of a Python package."""
    environment = environment_without_java(tmp_path)
    environment["JAVA_HOME"] = str(find_java(environment).path)
    environment["SPARK_SUBMIT_OPTS"] = JAVA_OPTIONS
    orders = [(b"ada", {"cents": 1}), (b"bob", {"cents": 3}), (b"ada", {"total": "12.50"})]
    await fill(cluster, "orders", [(key, json.dumps(order).encode()) for key, order in orders])
    project = EXAMPLES / "spark_reprocessing"
    made = tmp_path / "made"
    run_python(
        cluster,
        *("-m", "keylane.cli", "spark", "reprocess", "--source", "orders"),
        *("--target", f"parquet:{made}", "--job", "jobs:in_cents"),
        environment=environment,
        folder=project,
    )
    values = [json.loads(row) for row in pyarrow.parquet.read_table(made)["value"].to_pylist()]
    assert sorted(value["cents"] for value in values) == [1, 3, 1250]
    report = run(cluster, "spark_reprocessing/report.py", environment=environment)
    shown = [line.replace(" ", "") for line in report]
    assert "|ada|2|1|" in shown
    assert "|bob|1|3|" in shown


def test_every_single_program_is_run():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
