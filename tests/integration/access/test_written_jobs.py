"""A job of Spark that writes, in a cluster with access control: the rights that it needs."""

from __future__ import annotations

import random
import re

import pyarrow as pa
import pytest

from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import AccessDeniedError
from keylane.protocol.ids import Subject
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing.hidden import HiddenSubject
from keylane.spark.writing.job import WriteOptions
from keylane.spark.writing.task import write_task
from support.access.guarded import GuardedCluster

HIDDEN = "flights.hidden-1"
GRANT = re.compile(r"keylane access grant etl (\w+) --subject '?([^ ';]+)'?")


async def test_job_is_told_every_right_that_it_lacks_before_a_subject_is_made(tmp_path):
    """The commands of the one refusal are enough to write and to publish."""
    with GuardedCluster(tmp_path) as cluster:
        await cluster.made("flights")
        async with cluster.admin() as admin:
            token = (await admin.create_token("etl")).token
            options = WriteOptions(
                meta=(cluster.meta,), subject=Subject("flights"), timeout_ms=10_000
            )
            network = HttpNetwork(token=token)
            try:
                subject = HiddenSubject(network, options, HIDDEN)
                with pytest.raises(AccessDeniedError) as refused:
                    await subject.create()
                wanted = GRANT.findall(refused.value.message)
                assert wanted == [
                    ("administer", "flights"),
                    ("administer", "flights.hidden-*"),
                    ("produce", "flights"),
                ]
                await admin.grant("etl", "administer", subject="flights*")
                with pytest.raises(AccessDeniedError) as refused:
                    await subject.create()
                assert GRANT.findall(refused.value.message) == wanted[2:]
                there = await admin.list_subjects(hidden=True)
                assert [each.subject for each in there] == ["flights"], "nothing is made"
                await admin.grant("etl", "produce", subject="flights")
                await subject.create()
                rows = pa.record_batch({"key": [b"k"], "value": [b"v"]})
                await write_task(
                    network,
                    options,
                    HIDDEN,
                    iter([rows]),
                    identity=("job",),
                    task=0,
                    sent_at_ns=0,
                    clock=SystemClock(),
                    rng=random.Random(0),
                )
                await subject.publish()
            finally:
                await network.close()
            (partition,) = [
                each
                for each in (await admin.describe_subject("flights")).partitions
                if each.next_offset
            ]
            assert partition.next_offset == 1
