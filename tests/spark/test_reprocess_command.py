"""`keylane spark reprocess` as an operator types it: plans, runs, does nothing again, compares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import keylane.arrow
from keylane import Producer
from keylane.cli.main import app
from support.cluster import Cluster

COUNT = 300
SOURCE = """
import pyarrow as pa
import pyarrow.compute as pc


def keep(rows: pa.Table) -> pa.Table:
    return rows


def drop(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["value"], pa.scalar(b"7", pa.binary())))
"""


async def fill(cluster: Cluster) -> None:
    await cluster.create("orders", partitions=2)
    async with Producer(cluster.meta) as producer:
        for number in range(COUNT):
            await producer.send("orders", b"%d" % number, key=b"k%d" % (number % 5))


def test_command_plans_runs_once_and_compares(
    spark, file_cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The running session is used, as by a program that has one."""
    asyncio.run(fill(file_cluster))
    (tmp_path / "job_of_the_command.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    runner = CliRunner()

    def command(function: str, folder: str, *more: str, status: int = 0):
        arguments = ["spark", "reprocess", "--source", "orders", "--meta", file_cluster.meta]
        arguments += ["--job", f"job_of_the_command:{function}"]
        if "--target" not in more:
            arguments += ["--target", f"parquet:{tmp_path / folder}"]
        done = runner.invoke(app, [*arguments, *more], catch_exceptions=False)
        assert done.exit_code == status, done.output
        return done.stdout

    planned = command("keep", "one", "--plan")
    assert f"to do: {COUNT} rows" in planned
    assert "not protected yet: retention may remove some of them from" in planned
    assert not (tmp_path / "one").exists()
    shown = command("keep", "one")
    assert f"{COUNT} messages of orders made {COUNT} rows in 2 pieces" in shown
    assert "--start manifest:" in shown
    again = json.loads(command("keep", "one", "--output", "json"))
    assert sum(piece["rows"] for piece in again["pieces"]) == COUNT
    assert json.loads(command("keep", "one", "--plan", "--output", "json"))["rows"] == 0
    command("drop", "one", status=1)
    old = str(tmp_path / "one")
    text = command("drop", "two", "--compare", old, status=2)
    assert "1 key with other rows" in text
    assert "k2" in text
    with pytest.raises(AssertionError, match="needs --folder"):
        command("keep", "x", "--target", "orders")
    with pytest.raises(AssertionError, match="--replace --groups-from"):
        command("keep", "x", "--target", "orders", "--folder", str(tmp_path / "x"))
    goal = ("--target", "cleaned", "--partitions", "2", "--folder", str(tmp_path / "three"))
    assert f"to do: {COUNT} rows" in command("drop", "three", *goal, "--plan")
    for _ in range(2):
        assert "the rows are published in cleaned" in command("drop", "three", *goal)
    assert keylane.arrow.read(file_cluster.meta, "cleaned").read_all().num_rows == COUNT - 1
    text = command("drop", "three", *goal, "--compare", "subject:orders", status=2)
    assert "1 key with other rows" in text
    assert "k2" in text
    same = (*goal[:-1], str(tmp_path / "four"), "--hidden", "cleaned.again", "--compare")
    assert "the output equals that of" in command("drop", "four", *same, str(tmp_path / "three"))
    with pytest.raises(AssertionError, match="is not complete"):
        command("drop", "five", "--compare", str(tmp_path / "nothing"))
    assert not (tmp_path / "five").exists()
