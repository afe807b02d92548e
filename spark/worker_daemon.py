"""The daemon from which Spark forks its Python workers; it imports keylane and pyarrow before that.

It is set by `spark.python.daemon.module`, and otherwise the same as PySpark's own daemon. A worker
is then ready at once: the modules would cost 1 s of CPU in each, and their memory is shared.

Spark closes the socket of a worker from which it needs no more rows (`limit`, `first`, a canceled
job). PySpark's daemon prints eleven lines of traces for each; this one ends the worker silently.
"""

import contextlib
import gc
import importlib
import sys
from typing import Any

from pyspark import daemon

MODULE = "keylane.spark.worker_daemon"
"""The value of the setting."""
PRELOADED = (
    "pyarrow",
    "pyspark.sql.datasource",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.worker.plan_data_source_read",
    "keylane.arrow.range_reader",
    "keylane.spark.source",
)
_pyspark_worker = daemon.worker


def preload() -> None:
    """Load the modules that workers need, and exclude them from the garbage collection that Spark
    runs after each task, which takes 30 ms.
    """
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # a worker that needs the module raises the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def worker(sock: Any, authenticated: bool) -> int:
    """Run a worker as PySpark does; if Spark has closed its socket, it ends and is not used
    again.
    """
    try:
        return _pyspark_worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        # Errors of a task are sent to Spark, and are not raised here.
        # Python 3.13 would print what a closed stream could not write.
        sys.unraisablehook = _ignore
        return 1


def _ignore(_unraisable: object) -> None:
    """Print nothing about bytes that this worker, which is ending, could not write."""


if __name__ == "__main__":
    preload()
    daemon.worker = worker
    daemon.manager()
