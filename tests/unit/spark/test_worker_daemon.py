"""The daemon of workers as Spark uses it: a process that is told over sockets to fork."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.serializers import read_int, write_with_length

from keylane.spark.worker_daemon import MODULE

SECRET = "secret"
FLOOD = """
import sys
def main(infile, outfile):
    try:
        while True:
            outfile.write(bytes(1 << 10))
    except OSError:
        sys.exit(-1)  # as PySpark's workers end
"""


@pytest.mark.parametrize(("module", "traces"), [(MODULE, False), ("pyspark.daemon", True)])
def test_worker_ends_without_traces_when_spark_wants_no_more_rows(
    tmp_path: Path, module: str, traces: bool
):
    """As `limit` does with each task; PySpark's own daemon shows that there would be some."""
    (tmp_path / "pyspark_flood.py").write_text(FLOOD)
    environment = {
        "PYTHON_WORKER_FACTORY_SECRET": SECRET,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }
    with subprocess.Popen(
        [sys.executable, "-m", module, "pyspark_flood"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        process_group=0,
    ) as daemon:
        assert daemon.stdout is not None
        port = read_int(daemon.stdout)
        for _ in range(3):
            take_and_leave(port)
        _, told = daemon.communicate()
    assert (b"BrokenPipeError" in told or b"ConnectionResetError" in told) is traces
    assert traces or told == b""


def take_and_leave(port: int) -> None:
    """Have a worker forked, take some bytes, and close the socket; returns when the worker has
    ended.
    """
    with socket.create_connection(("127.0.0.1", port)) as connection:
        stream = connection.makefile("rwb")
        worker = read_int(stream)
        write_with_length(SECRET.encode(), stream)
        stream.flush()
        assert len(stream.read(1 << 16)) == 1 << 16
        stream.close()
    while Path(f"/proc/{worker}").exists():
        os.sched_yield()
