"""The driver of a test: reads and reprocesses a subject on a standalone cluster, given as its arguments."""

from __future__ import annotations

import json
import sys
import time

from pyspark.sql import SparkSession

from keylane.arrow.selection import ReadOptions
from keylane.protocol.ids import Subject
from keylane.spark.registration import register
from keylane.spark.reprocess.folder import OutputFolder
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.run import run_job


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def slow_rows():
    def slow(rows):
        time.sleep(0.4)
        return rows

    return slow


def main() -> None:
    master, meta, subject, folder = sys.argv[1:]
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    frame = spark.read.format("keylane").option("meta", meta).option("subject", subject).load()
    say(rows=frame.count(), executors=spark.sparkContext.defaultParallelism)
    options = ReadOptions(
        meta=(meta,),
        subjects=(Subject(subject),),
        columns=("partition", "offset", "key", "value", "timestamp", "properties"),
    )
    manifest = run_job(
        spark,
        Job("slow", slow_rows(), "standalone_job:slow@1"),
        options,
        OutputFolder(folder),
        planned=lambda plan: say(missing=plan.rows),
    )
    say(rows_out=manifest.rows_out, pieces=len(manifest.pieces))
    spark.stop()


if __name__ == "__main__":
    main()
