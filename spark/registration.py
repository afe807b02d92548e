"""Makes the format `keylane` known to a Spark session.  Needs pyspark.

Spark finds it by itself where the wheel of keylane is installed: it imports every package whose
name begins with `pyspark_`, and takes its `DefaultSource`.  `register` is for a session whose
driver runs from somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .travel import lack_teller

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("keylane")` known to this session; a repeat changes nothing."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source_class())
    except AnalysisException as error:
        # Before 4.1 Spark refuses a format that it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def source_class() -> type[DataSource]:
    """The class that Spark registers.  It travels by value, and makes a KeylaneSource where it
    arrives.
    """
    from pyspark.sql.datasource import DataSource

    lacking = lack_teller()

    class DefaultSource(DataSource):
        """A subject as a DataFrame."""

        @classmethod
        def name(cls) -> str:
            return "keylane"

        def __new__(cls, options: Mapping[str, str]) -> Any:
            try:
                source = import_module("keylane.spark.source")
            except ImportError as error:
                raise lacking(error) from None
            return source.KeylaneSource(options)

    return DefaultSource
