"""One Spark session for all tests of this folder: it costs ten seconds, a test a third of one."""

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
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator:
    session = local_session(
        cores=2, app_name="keylane tests", java_home=find_java().path, java_options=JAVA_OPTIONS
    )
    yield session
    session.stop()
