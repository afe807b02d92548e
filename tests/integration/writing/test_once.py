"""Batch jobs of Spark with a name: published once, whatever became of their drivers."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import keylane.arrow
from keylane import Admin
from keylane.errors import PublishError, Reason
from keylane.protocol.operations import OperationKind, Publication, Reshape
from keylane.spark.writing import batch_writer as once
from keylane.spark.writing.batch_writer import KeylaneBatchWriter
from keylane.spark.writing.hidden import HiddenSubject
from support.cluster import Cluster

SCHEMA = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])


def writer(cluster: Cluster, subject: str, batch: int, **options: str) -> KeylaneBatchWriter:
    given = {"meta": cluster.meta, "subject": subject, "once": f"landing/{batch}"}
    given |= {"timeoutMs": "10000"} | options
    return KeylaneBatchWriter.begin(given, SCHEMA, overwrite=False)


def rows(batch: int, count: int = 50):
    values = [b"%d" % (batch * count + number) for number in range(count)]
    return iter([pa.record_batch({"key": [b"k"] * count, "value": values})])


def run(cluster: Cluster, subject: str, batch: int, **options: str) -> None:
    made = writer(cluster, subject, batch, **options)
    made.commit([made.write(rows(batch))])


def numbers(cluster: Cluster, subject: str) -> list[int]:
    read = keylane.arrow.read(cluster.meta, subject, columns=("epoch", "offset", "value"))
    table = read.read_all().sort_by([("epoch", "ascending"), ("offset", "ascending")])
    return [int(value) for value in table["value"].to_pylist()]


def left_hidden(cluster: Cluster, subject: str) -> list[str]:
    async def listed() -> list[str]:
        async with Admin(cluster.meta) as admin:
            return [each.subject for each in await admin.list_subjects(hidden=True)]

    return [name for name in asyncio.run(listed()) if name.startswith(f"{subject}.hidden")]


def test_job_with_a_name_is_published_once_when_it_is_run_again(file_cluster: Cluster):
    """Also one that made the subject, and one whose driver fails after the publication; other
    batches are written.
    """
    run(file_cluster, "again", 0, partitions="1")
    run(file_cluster, "again", 0, partitions="1")
    run(file_cluster, "again", 1)
    repeated = writer(file_cluster, "again", 1)
    repeated.write(rows(1))
    repeated.abort([])
    asyncio.run(
        file_cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject="again", partitions=2))
    )
    run(file_cluster, "again", 1)
    assert numbers(file_cluster, "again") == list(range(100))
    assert left_hidden(file_cluster, "again") == []


def test_job_with_a_name_is_written_anew_when_its_driver_was_killed(file_cluster: Cluster):
    """The one that was thought dead stores, publishes and deletes nothing from then on."""
    asyncio.run(file_cluster.create("killed", partitions=1))
    late = writer(file_cluster, "killed", 7)
    done = late.write(rows(7))
    later = writer(file_cluster, "killed", 7)
    with pytest.raises(Exception, match="1114"):
        late.write(rows(7))
    with pytest.raises(Exception, match="1114"):
        late.commit([done])
    late.abort([])
    later.commit([later.write(rows(7))])
    assert numbers(file_cluster, "killed") == list(range(350, 400))
    with pytest.raises(Exception, match="1110"):
        late.commit([done])
    assert numbers(file_cluster, "killed") == list(range(350, 400))
    assert left_hidden(file_cluster, "killed") == []


def test_job_with_a_name_is_written_when_its_publication_was_canceled(
    file_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Its hidden subject cannot be published any more: the next one has another name, in each
    run.
    """
    asyncio.run(file_cluster.create("canceled", partitions=1))
    run(file_cluster, "canceled", 3)
    publish, canceled = HiddenSubject.publish, "canceled.hidden-landing-3"

    async def outdated(subject: HiddenSubject, *, replace: bool = False) -> Publication:
        if subject.name == canceled:
            raise PublishError(Reason.PUBLISH_OUTDATED, subject=canceled)
        return await publish(subject, replace=replace)

    monkeypatch.setattr(once.HiddenSubject, "publish", outdated)
    run(file_cluster, "canceled", 3)
    run(file_cluster, "canceled", 3)
    assert numbers(file_cluster, "canceled") == 2 * list(range(150, 200))
