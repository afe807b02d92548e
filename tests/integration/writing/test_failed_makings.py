"""Writes of Spark whose hidden subject cannot be made."""

from __future__ import annotations

import asyncio

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from keylane import Admin
from keylane.errors import KeylaneError
from keylane.spark.writing.batch_writer import KeylaneBatchWriter
from support.cluster import Cluster

SCHEMA = StructType([StructField("value", BinaryType())])


def begin(cluster: Cluster, subject: str, **options: str) -> None:
    given = {"meta": cluster.meta, "subject": subject, "timeoutMs": "1000", **options}
    KeylaneBatchWriter.begin(given, SCHEMA, overwrite=False)


async def made(cluster: Cluster, subject: str) -> set[str]:
    """Every subject that is not being deleted, once this one is made; subjects in creation are not
    listed.
    """
    async with Admin(cluster.meta) as admin, asyncio.timeout(60):
        while True:
            listed = {each.subject: each.problem for each in await admin.list_subjects(hidden=True)}
            if not listed.get(subject, "it is not there"):
                return {name for name, problem in listed.items() if "deleted" not in problem}
            await asyncio.sleep(0.05)


def test_write_leaves_no_hidden_subject_when_a_broker_is_away(cluster: Cluster):
    """The metaserver would go on making it; one that the options name may be another job's, and
    stays.
    """
    asyncio.run(cluster.create("flights", partitions=2))
    cluster.brokers[1].kill()
    for options in ({}, {"hidden": "flights.new", "publish": "false"}):
        with pytest.raises(KeylaneError, match="broker group 'g2'"):
            begin(cluster, "flights", **options)
    cluster.brokers[1].restart()
    listed = asyncio.run(made(cluster, "flights.new"))
    assert not [each for each in listed if each.startswith("flights.hidden-")]
