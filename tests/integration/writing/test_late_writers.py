"""Writers of Spark and the hidden subject that their options name: one of another id is another
job's.
"""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import keylane.arrow
from keylane import Producer
from keylane.errors import Reason
from keylane.protocol import endpoints
from keylane.protocol.control import DeleteSubject
from keylane.protocol.ids import Subject
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing.batch_writer import KeylaneBatchWriter
from keylane.spark.writing.hidden import HiddenSubject
from keylane.spark.writing.job import WriteOptions
from support.cluster import Cluster, delete_subject
from support.raising import raises

SCHEMA = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])


def writer(cluster: Cluster, subject: str) -> KeylaneBatchWriter:
    given = {"meta": cluster.meta, "subject": subject, "timeoutMs": "5000"}
    given |= {"hidden": f"{subject}.new", "publish": "false"}
    return KeylaneBatchWriter.begin(given, SCHEMA, overwrite=False)


def rows(text: bytes, count: int = 100):
    keys = [b"k%d" % (number % 7) for number in range(count)]
    values = [text + b"%d" % number for number in range(count)]
    return iter([pa.record_batch({"key": keys, "value": values})])


def values_of(cluster: Cluster, subject: str) -> list[bytes]:
    table = keylane.arrow.read(cluster.meta, subject, columns=("value",)).read_all()
    return sorted(table["value"].to_pylist())


def test_late_writer_leaves_the_rows_of_a_later_job_alone(file_cluster: Cluster):
    """Its driver stood still while its hidden subject was deleted, and made anew by the job that
    was started instead.
    """
    asyncio.run(file_cluster.create("late", partitions=2))
    late = writer(file_cluster, "late")
    asyncio.run(delete_subject(file_cluster.meta, "late.new"))
    later = writer(file_cluster, "late")
    later.commit([later.write(rows(b"new"))])
    complete = values_of(file_cluster, "late.new")
    assert len(complete) == 100
    with pytest.raises(Exception, match="1114"):
        late.write(rows(b"old"))
    assert values_of(file_cluster, "late.new") == complete
    with pytest.raises(Exception, match="1114"):
        late.commit([])
    late.abort([])
    assert values_of(file_cluster, "late.new") == complete


def test_second_writer_of_a_hidden_subject_is_refused_and_the_first_publishes_its_rows_alone(
    file_cluster: Cluster,
):
    """Both drivers begin before a row is stored; the second would count the rows of both, and
    delete them when it fails.
    """
    asyncio.run(file_cluster.create("twice", partitions=2))
    first = writer(file_cluster, "twice")
    with raises(Reason.HIDDEN_TAKEN, match="is filled by a write of Spark"):
        writer(file_cluster, "twice")
    first.commit([first.write(rows(b"first"))])
    complete = values_of(file_cluster, "twice.new")
    assert len(complete) == 100
    with raises(Reason.HIDDEN_TAKEN):
        writer(file_cluster, "twice")
    assert values_of(file_cluster, "twice.new") == complete
    asyncio.run(delete_subject(file_cluster.meta, "twice.new"))
    later = writer(file_cluster, "twice")
    later.commit([later.write(rows(b"later"))])
    assert len(values_of(file_cluster, "twice.new")) == 100


async def test_cut_deletes_no_subject_that_another_job_has_made_under_its_name(
    file_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """The empty one that it found is deleted by hand, and another job fills a new one, before it
    deletes.
    """
    await file_cluster.create("cut", partitions=2)
    options = WriteOptions(meta=(file_cluster.meta,), subject=Subject("cut"), timeout_ms=5_000)
    call_now, made = MetaClient.call, []

    async def delete_late(client: MetaClient, endpoint, body=None, **more):
        if endpoint is endpoints.DELETE_SUBJECT and not made:
            made.append(more["subject"])
            await call_now(client, endpoint, DeleteSubject(force=True), **more)
            await HiddenSubject(network, options, "cut.new", filled_by="another").create()
            async with Producer(file_cluster.meta) as producer:
                await producer.send("cut.new", b"row", key=b"k")
        return await call_now(client, endpoint, body, **more)

    monkeypatch.setattr(MetaClient, "call", delete_late)
    network = HttpNetwork()
    try:
        subject = HiddenSubject(network, options, "cut.new", filled_by="this")
        await subject.create()
        await file_cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject="cut", partitions=3))
        with raises(Reason.HIDDEN_TAKEN, match="another"):
            await subject.cut()
    finally:
        await network.close()
    assert made == ["cut.new"]
    assert await asyncio.to_thread(values_of, file_cluster, "cut.new") == [b"row"]
