"""Processes of Spark that cannot do their part, in a real local session: one sentence in the
driver's message says why.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from keylane.protocol.errors import SparkProcessError
from keylane.spark import register
from keylane.spark.failure import parse_error
from support.shelves import Sent, Shelves

PYTHON = """#!/bin/sh
PYTHONPATH={folder}:$PYTHONPATH exec {python} "$@"
"""
OTHER = """
import collections, sys
fields = "major minor micro releaselevel serial"
sys.version_info = collections.namedtuple("version_info", fields)({major}, {minor}, 0, "final", 0)
"""
LACKS = "raise ModuleNotFoundError(\"No module named 'keylane'\", name='keylane')\n"


@pytest.fixture
def python_of(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Has this session start its processes in a Python that finds these modules first."""

    def python_of(**modules: str) -> str:
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(code)
        python = tmp_path / "python"
        python.write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        register(spark)
        return str(python)

    yield python_of
    monkeypatch.undo()
    register(spark)


def told_by(work: Callable[[], object]) -> str:
    with pytest.raises(AnalysisException) as caught:
        work()
    return str(caught.value)


def test_twenty_cut_off_workers_leave_no_page_of_traces(
    spark: SparkSession, shelves: Shelves, capfd: pytest.CaptureFixture[str]
):
    """`limit` closes the sockets of the other tasks; their rows are right, and only a planner may
    say a word.
    """
    for partition_id in range(1, 21):
        for _ in range(30):
            shelves.shelf(partition_id).put(*[Sent(b"k", bytes(1_000))] * 300)
    reader = spark.read.format("keylane").options(meta=shelves.address, subject="flights")
    frame = reader.options(batchRows="100", minPartitions="20").load()
    assert frame.rdd.getNumPartitions() >= 20
    capfd.readouterr()
    for _ in range(3):
        assert len(frame.limit(2_000).collect()) == 2_000
        assert frame.repartition(2).limit(3).count() == 3
    told = capfd.readouterr()
    assert (told.out + told.err).count("Traceback") <= 2


def test_process_without_keylane_is_told_in_one_sentence_when_a_subject_is_loaded(
    spark: SparkSession, python_of, shelves: Shelves
):
    """With its Python, its machine, and what to do; a session with the right Python goes on."""
    python_of(keylane=LACKS)
    reader = spark.read.format("keylane").options(meta=shelves.address, subject="flights")
    text = told_by(reader.load)
    error = parse_error(text)
    assert isinstance(error, SparkProcessError)
    assert error.missing == "keylane"
    assert str(error.python).endswith(f"on {os.uname().nodename}")
    (line,) = [each for each in text.splitlines() if "KEYLANE_1296" in each]
    assert "cannot import keylane: install keylane with pyarrow and numpy there" in line


def test_process_of_another_python_is_told_in_one_sentence_when_a_subject_is_loaded(
    spark: SparkSession, python_of, shelves: Shelves
):
    """PySpark compares the minor versions before it unpickles anything of ours."""
    major, minor = sys.version_info[:2]
    python_of(sitecustomize=OTHER.format(major=major, minor=minor - 1))
    reader = spark.read.format("keylane").options(meta=shelves.address, subject="flights")
    text = told_by(reader.load)
    (line,) = [each for each in text.splitlines() if "PYTHON_VERSION_MISMATCH" in each]
    assert f"Python in worker has different version: {major}.{minor - 1} than that in" in line
