"""Registers the format `keylane` in a Spark session. Requires pyspark.

If keylane's wheel is installed, Spark finds the format by itself: it imports every package whose
name begins with `pyspark_`, and uses its `DefaultSource`. Call `register` if the driver runs from a
checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .travel import missing_package_reporter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def register(spark: SparkSession) -> None:
    """Register the format `keylane` in this session. A second call has no effect."""
    from pyspark.errors import AnalysisException

    try:
        spark.dataSource.register(source_class())
    except AnalysisException as error:
        # Spark before 4.1 refuses to register a format that it has already found.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def source_class() -> type[DataSource]:
    """
    Return the data source class that Spark registers.

    Spark pickles the class by value. In the process that unpickles it, it creates a KeylaneSource.
    """
    from pyspark.sql.datasource import DataSource

    report_missing = missing_package_reporter()

    class DefaultSource(DataSource):
        """Reads or writes subjects as DataFrames."""

        @classmethod
        def name(cls) -> str:
            return "keylane"

        def __new__(cls, options: Mapping[str, str]) -> Any:
            try:
                source = import_module("keylane.spark.source")
            except ImportError as error:
                raise report_missing(error) from None
            return source.KeylaneSource(options)

    return DefaultSource
