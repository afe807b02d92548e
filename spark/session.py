"""A Spark session on this machine alone: loopback, quiet, quick to start."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .java import JavaHome, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
_LOGGING = Path(__file__).with_name("log4j2.properties").absolute()


def local_session(cores: int = 2, app_name: str = "keylane") -> "SparkSession":
    """Return a session in local mode with `cores` task slots; the running one, if there is one.

    Sets JAVA_HOME, PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON of this process, because PySpark reads them
    from the environment: workers then run in this very Python, which has pyarrow and keylane.
    Raises JavaMissingError if no Java can run Spark.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    set_environment(find_java())
    builder = SparkSession.builder.master(f"local[{cores}]").appName(app_name)
    for key, value in settings(cores).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def set_environment(java: JavaHome) -> None:
    """Point Spark at `java` and at the Python that runs now, never at what PATH happens to find."""
    os.environ["JAVA_HOME"] = str(java.path)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = LOOPBACK


def settings(cores: int) -> dict[str, str]:
    """Return the Spark settings of a local session; each with the reason it differs from the default."""
    return {
        # Nothing listens outside this machine, and no port is taken for a web page.
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        # A short job ends before the second compiler or a parallel collector pays off.
        "spark.driver.extraJavaOptions": (
            f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        ),
        "spark.sql.shuffle.partitions": str(cores),
        # Batches from our workers cross a Unix socket: about a third more rows a second than TCP.
        "spark.python.unix.domain.socket.enabled": "true",
        # Workers are forked from a process that has loaded keylane and pyarrow.
        "spark.python.daemon.module": "keylane.spark.worker_daemon",
        # A time is the same everywhere.
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
