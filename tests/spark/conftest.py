"""One Spark session for all tests of this folder: it costs ten seconds, a test a third of one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane.cli.java import find_java
from keylane.spark.session import local_session

HERE = Path(__file__).parent
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Tests end before the second compiler or a parallel collector pays off."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/spark/"):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory) -> Iterator:
    """Finds `pyspark_keylane` on PYTHONPATH, as where a wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "pyspark_keylane").symlink_to(HERE.parents[1] / "pyspark_keylane")
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    session = local_session(
        cores=2, app_name="keylane tests", java_home=find_java().path, java_options=JAVA_OPTIONS
    )
    os.environ["PYTHONPATH"] = before
    yield session
    session.stop()
