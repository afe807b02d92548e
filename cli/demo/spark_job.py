"""The demo's Spark job, which runs in its own process: the JVM starts early, and the job starts on
"go".

standard input:  one line "go"
standard output: the ready line, then the result as one JSON object
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from ...rpc.program import announce_ready

# A single pass over the log gives both results: the rows by physical partition, and the table of
# carriers.
_QUERY = """
    WITH flights AS (
        SELECT `partition` AS partition_id,
               from_json(CAST(value AS STRING), 'carrier STRING, dep_delay INT') AS flight
        FROM messages
    )
    SELECT partition_id,
           flight.carrier AS carrier,
           count(*) AS flights,
           avg(flight.dep_delay) AS mean_delay
    FROM flights
    GROUP BY GROUPING SETS ((partition_id), (flight.carrier))
"""

_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The JVM options. The job ends before the C2 compiler or a parallel collector would pay off."""


class SparkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What Spark found in the subject."""

    rows: int
    partitions: dict[int, int]
    """Number of rows by physical partition."""
    carriers: dict[str, tuple[int, float | None]]
    """Number of flights and mean departure delay in minutes, by carrier."""


def _run_query(spark: Any, options: argparse.Namespace, *, end: str) -> list[Any]:
    """Run _QUERY. The types are Any, because only `spark/` may import pyspark."""
    reader = spark.read.format("keylane").option("meta", options.meta).option("end", end)
    reader = reader.option("subject", options.subject).option("columns", "partition,value")
    reader.load().createOrReplaceTempView("messages")
    return list(spark.sql(_QUERY).collect())


def main() -> int:
    """Start Spark, wait for "go", read the subject and print the result."""
    parser = argparse.ArgumentParser(prog="python -m keylane.cli.demo.spark_job")
    parser.add_argument("--meta", required=True)
    parser.add_argument("--subject", required=True)
    options = parser.parse_args()

    from ...protocol.errors import KeylaneError
    from ...spark.session import local_session
    from ..java import find_java

    try:
        spark = local_session(java_home=find_java().path, java_options=_JAVA_OPTIONS)
    except KeylaneError as error:
        print(f"keylane: {error}", file=sys.stderr)
        return 1
    # Warm up by running the query on no rows, so that Spark is compiled before the demo has to wait
    # for it.
    _run_query(spark, options, end="earliest")
    announce_ready("demo spark", spark.version)
    if sys.stdin.readline().strip() != "go":
        return 0
    rows = _run_query(spark, options, end="latest")
    result = SparkResult(
        rows=sum(row.flights for row in rows if row.carrier is None),
        partitions={row.partition_id: row.flights for row in rows if row.carrier is None},
        carriers={
            row.carrier: (row.flights, row.mean_delay) for row in rows if row.carrier is not None
        },
    )
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
