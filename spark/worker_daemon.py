"""The daemon that Spark forks its Python workers from, with keylane and pyarrow loaded before the fork.

Set by `spark.python.daemon.module`; PySpark's own daemon otherwise.  A worker is then ready at once: the modules cost
0.3 s of CPU in each, and their memory is shared.
"""

import contextlib
import gc
import importlib

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


def warm() -> None:
    """Load what workers need, and take it out of the collection that Spark runs after each task (30 ms each)."""
    for name in WARM:
        with contextlib.suppress(ImportError):  # the worker that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    warm()
    daemon.manager()
