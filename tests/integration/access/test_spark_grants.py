"""What docs/SPARK.md grants a job is exactly what the job needs: with it the job runs, without one
of it the job is refused.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from keylane import Admin, Producer
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.errors import AccessDeniedError
from keylane.spark.schema import spark_schema
from keylane.spark.source import KeylaneSource
from support.access.secured_cluster import SecuredCluster
from support.spark.query import Query

GUIDE = Path(__file__).parents[3] / "docs" / "SPARK.md"
COUNT = 30
ROWS = pa.record_batch({"key": [b"k"] * 3, "value": [b"%d" % n for n in range(COUNT, COUNT + 3)]})
COLUMNS = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
Grants = list[tuple[str, str, str]]


def grants_of(row: str) -> Grants:
    """(right, subject, group) of each command in a row of the guide's table."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    grants = []
    for command in re.findall(r"`keylane access grant etl ([^`]*)`", line):
        right, *options = shlex.split(command)
        given = dict(zip(options[::2], options[1::2], strict=True))
        grants.append((right, given["--subject"], given.get("--group", "*")))
    return grants


READ = grants_of("a batch or a stream that reads")
WRITE = grants_of("a batch that writes")
FOLLOW = READ + grants_of("a stream with `commitGroup`")


class Jobs:
    """Jobs of a principal with given grants, on the subject `orders` of a cluster."""

    def __init__(self, secured: SecuredCluster, folder: Path) -> None:
        self.secured = secured
        self.token = folder / "etl.token"

    def grant(self, grants: Grants) -> None:
        async def grant() -> None:
            async with self.secured.admin() as admin:
                for old in (await admin.list_grants()).grants:
                    if old.principal == "etl":
                        given = old.grant
                        await admin.revoke_grant(
                            "etl", given.right, subject=given.subject, group=given.group
                        )
                for right, subject, group in grants:
                    await admin.grant("etl", right, subject=subject, group=group)

        asyncio.run(grant())

    def source(self, **options: str) -> KeylaneSource:
        files = {"tlsCa": self.secured.tls.ca, "tokenFile": str(self.token)}
        return KeylaneSource({"meta": self.secured.meta, "subject": "orders"} | files | options)

    def read(self) -> int:
        reader = self.source().reader(spark_schema())
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    def write(self) -> None:
        writer = self.source().writer(COLUMNS, overwrite=False)
        try:
            done = writer.write(iter([ROWS]))
        except BaseException:
            writer.abort([])
            raise
        writer.commit([done])

    def follow(self) -> None:
        reader = self.source(commitGroup="NAME").streamReader(spark_schema())
        try:
            query = Query(reader)
            query.all()
        finally:
            reader.stop()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    secured = SecuredCluster(tmp_path_factory.mktemp("granted"))
    made = Jobs(secured, tmp_path_factory.mktemp("token"))

    async def fill() -> None:
        access = {"tls": secured.tls, "token": secured.admin_token}
        async with Admin(secured.meta, **access, wait_s=30) as admin:
            await wait_for_brokers(admin, 1)
            await admin.create_subject("orders", partitions=2)
            await admin.create_group("orders", "NAME")
            made.token.write_text((await admin.create_token("etl")).token)
        async with Producer(secured.meta, **access) as producer:
            for number in range(COUNT):
                producer.send("orders", b"%d" % number, key=b"k%d" % (number % 7))

    try:
        asyncio.run(fill())
        yield made
    finally:
        secured.stop()


def until(is_allowed: bool, work: Callable[[], object]) -> None:
    """Run a job until it is allowed, or refused: brokers hear of a change with their next
    heartbeat.
    """
    deadline_s = time.monotonic() + 60
    while True:
        try:
            work()
            allowed = True
        except AccessDeniedError:
            allowed = False
        if allowed is is_allowed:
            return
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("grants", "job"),
    [(READ, Jobs.read), (FOLLOW, Jobs.follow), (WRITE, Jobs.write)],
    ids=["read", "follow", "write"],
)
def test_job_runs_with_the_grants_of_the_guide_and_with_no_fewer(jobs, grants, job):
    assert grants
    for missing in range(len(grants)):
        jobs.grant(grants[:missing] + grants[missing + 1 :])
        until(False, partial(job, jobs))
    jobs.grant(grants)
    until(True, partial(job, jobs))
