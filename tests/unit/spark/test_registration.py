"""The class that Spark registers, and a session that has found it before."""

from __future__ import annotations

import inspect
from pathlib import Path
from runpy import run_path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from keylane.spark import register
from keylane.spark.registration import source_class
from keylane.spark.source import KeylaneReader, KeylaneSource, KeylaneTask

ROOT = Path(__file__).resolve().parents[3]


class RefusedByTheSession(AnalysisException):
    """An error of the JVM, of a condition."""

    def __init__(self, condition: str) -> None:
        super().__init__(message=condition)
        self._condition = condition

    def getCondition(self) -> str:
        return self._condition


class SessionOfJava:
    """A session whose register raises what it is given."""

    def __init__(self, condition: str = "") -> None:
        self.registered: list[type] = []
        self.dataSource = self
        self._condition = condition

    def register(self, source: type) -> None:
        if self._condition:
            raise RefusedByTheSession(self._condition)
        self.registered.append(source)


def test_registered_class_makes_a_source():
    session = SessionOfJava()
    register(session)  # type: ignore[arg-type]
    (made,) = session.registered
    assert issubclass(made, DataSource)
    assert isinstance(made(options={}), KeylaneSource)
    assert inspect.ismethod(made.name), "Spark asks for a class method"


def test_format_may_be_known_before():
    """PySpark before 4.1 refuses a format that it has found by itself; other errors are raised."""
    register(SessionOfJava("DATA_SOURCE_ALREADY_EXISTS"))  # type: ignore[arg-type]
    with pytest.raises(AnalysisException):
        register(SessionOfJava("OUT_OF_MEMORY"))  # type: ignore[arg-type]


def test_search_of_spark_finds_the_class():
    """As PySpark searches: a top-level package of a name, and its DefaultSource."""
    package = run_path(str(ROOT / "pyspark_keylane" / "__init__.py"))
    assert issubclass(package["DefaultSource"], DataSource)
    assert package["DefaultSource"].name() == source_class().name() == KeylaneSource.name()


def test_reader_needs_only_what_pyspark_has_since_4_0():
    """Names of PySpark's classes that came later would fail where an older one is installed."""
    assert issubclass(KeylaneReader, DataSourceReader)
    assert issubclass(KeylaneTask, InputPartition)
    assert "pushFilters" not in vars(KeylaneReader), (
        "Spark refuses a reader that has it, by default"
    )
