"""The daemon that Spark forks its Python workers from, with keylane and pyarrow loaded before the
fork.

Set by `spark.python.daemon.module`; PySpark's own daemon otherwise.  A worker is then ready at
once: the modules cost 1 s of CPU in each, and their memory is shared.

Spark closes the socket of a worker from which it wants no more rows (`limit`, `first`, a canceled
job).  PySpark's daemon prints eleven lines of traces for each; this one ends the worker without a
word.
"""

import contextlib
import gc
import importlib
import sys
from typing import Any

from pyspark import daemon

MODULE = "keylane.spark.worker_daemon"
"""The value of the setting."""
WARM = (
    "pyarrow",
    "pyspark.sql.datasource",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.worker.plan_data_source_read",
    "keylane.arrow.range_reader",
    "keylane.spark.source",
)
_worker = daemon.worker


def warm() -> None:
    """Load what workers need, and take it out of the collection that Spark runs after each task (30
    ms each).
    """
    for name in WARM:
        with contextlib.suppress(ImportError):  # the worker that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def worker(sock: Any, authenticated: bool) -> int:
    """As PySpark's; a worker whose socket Spark has closed ends, and is not used again."""
    try:
        return _worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        # Errors of a task are answers, and are not raised here.
        # Python 3.13 tells of what a dropped stream could not write.
        sys.unraisablehook = _say_nothing
        return 1


def _say_nothing(_unraisable: object) -> None:
    """In place of a line about what this worker, which ends now, could not write."""


if __name__ == "__main__":
    warm()
    daemon.worker = worker
    daemon.manager()
