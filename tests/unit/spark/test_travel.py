"""What travels to processes of Spark: an object where keylane is installed, one sentence where it
is not.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys

import pytest
from pyspark import cloudpickle
from pyspark.serializers import write_with_length

from keylane.protocol.errors import SparkProcessError
from keylane.spark.failure import parse_error
from keylane.spark.registration import source_class
from keylane.spark.source import KeylaneReader
from keylane.spark.travel import missing_package_reporter

ELSEWHERE = """
import pickle, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
try:
    made = pickle.loads(sys.stdin.buffer.read())
    if isinstance(made, type):
        made(options={{}})
except Exception as error:
    print(f"{{type(error).__module__}}.{{type(error).__name__}}: {{error}}")
"""


ANOTHER_PYTHON = """
import importlib, sys
importlib.import_module(sys.argv[1]).main(sys.stdin.buffer, sys.stdout.buffer)
"""


def message_elsewhere(travelling: object, missing: str) -> str:
    """What a process without a module says when it gets the object."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE.format(missing=missing)],
        input=cloudpickle.dumps(travelling),
        capture_output=True,
        check=True,
    )
    return done.stdout.decode()


def test_reader_arrives_where_keylane_is():
    there = pickle.loads(cloudpickle.dumps(KeylaneReader("options", ["task"])))
    assert isinstance(there, KeylaneReader)
    assert (there._options, there._tasks) == ("options", [])


def test_process_says_what_it_lacks_in_one_sentence():
    """The source of a planner, the reader of a task; without keylane, and without a package that it
    needs.
    """
    reader = KeylaneReader("options", [])
    for travelling, missing in [
        (source_class(), "keylane"),
        (reader, "keylane"),
        (reader, "pyarrow"),
    ]:
        message = message_elsewhere(travelling, missing)
        assert f"cannot import {missing}: install keylane with pyarrow and numpy there" in message
        assert message.count("\n") == 1
        error = parse_error(message)
        assert isinstance(error, SparkProcessError)
        assert error.missing == missing
        assert (error.python or "").startswith(sys.executable)


def test_process_with_another_version_of_a_package_says_what_is_wrong():
    """A name that a module lacks: the module itself is there."""
    told = missing_package_reporter()(
        ImportError("cannot import name 'x' from 'a.b' (/a/b.py)", name="a.b")
    )
    assert "cannot use a package: cannot import name 'x' from 'a.b'" in str(told)
    assert isinstance(parse_error(str(told)), SparkProcessError)


@pytest.mark.parametrize("step", ["plan_data_source_read", "write_into_data_source"])
def test_process_of_another_python_says_so_before_it_unpickles(step: str):
    """PySpark's own check comes first: code that travels by value is of the driver's Python."""
    given = io.BytesIO()
    write_with_length(b"2.7", given)
    given.write(bytes(64))
    worker = f"pyspark.sql.worker.{step}"
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_PYTHON, worker],
        input=given.getvalue(),
        stdout=subprocess.PIPE,
        check=False,  # it ends with status 255
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    sentence = f"Python in worker has different version: {here} than that in driver: 2.7"
    assert f"[PYTHON_VERSION_MISMATCH] {sentence}".encode() in done.stdout
