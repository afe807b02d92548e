"""What the writer of a stream refuses before it asks the metaserver."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StringType, StructType

from keylane.protocol.errors import ConfigError
from keylane.spark.writing.stream_writer import KeylaneStreamWriter

SCHEMA = StructType().add("value", StringType())


@pytest.mark.parametrize(
    ("name", "value"), [("partitions", "3"), ("hidden", "flights.new"), ("publish", "true")]
)
def test_option_of_a_batch_is_refused_with_what_a_stream_needs(name: str, value: str):
    """A stream makes no subject and publishes nothing: its subject exists."""
    given = {"meta": "127.0.0.1:1", "subject": "flights", name: value}
    with pytest.raises(
        ConfigError,
        match=f"only batch writes have {name}; a stream writes to a subject that exists",
    ):
        KeylaneStreamWriter.begin(given, SCHEMA, overwrite=False)


def test_output_mode_that_replaces_rows_is_refused_with_a_way_that_spark_has():
    """Spark itself refuses `update` for a Python data source."""
    given = {"meta": "127.0.0.1:1", "subject": "flights"}
    with pytest.raises(ConfigError, match=r'outputMode\("append"\); .* with foreachBatch'):
        KeylaneStreamWriter.begin(given, SCHEMA, overwrite=True)
