"""The daemon from which Spark forks Python workers. It imports keylane and pyarrow before it forks.

The setting `spark.python.daemon.module` selects it. Apart from the imports, it behaves like
PySpark's daemon. Its workers do not have to import the modules, which takes 1 s of CPU time, and
they share the memory of the modules.

Spark closes a worker's socket when it needs no more rows from it (`limit`, `first`, or a canceled
job). PySpark's daemon then prints an eleven-line traceback; this one ends the worker silently.
"""

import contextlib
import gc
import importlib
import sys
from typing import Any

from pyspark import daemon

MODULE = "keylane.spark.worker_daemon"
"""The value for `spark.python.daemon.module`."""
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
    """
    Import the modules that workers need, and exclude them from garbage collection.

    Spark collects garbage after each task, which would otherwise take 30 ms.
    """
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # a worker that needs it raises the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def worker(sock: Any, authenticated: bool) -> int:
    """Run PySpark's worker. If Spark has closed the socket, return 1, so that the socket is not
    reused.
    """
    try:
        return _pyspark_worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        # Errors in a task are sent to Spark, and are not raised here. Python 3.13 would print an
        # error for a stream that cannot be flushed when it is closed.
        sys.unraisablehook = _ignore
        return 1


def _ignore(_unraisable: object) -> None:
    """Suppress the report about bytes that the ending worker could not write."""


if __name__ == "__main__":
    preload()
    daemon.worker = worker
    daemon.manager()
