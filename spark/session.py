"""A Spark session on this machine alone: loopback, quiet, with the Python that runs now."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.errors import JavaMissingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
_LOGGING = Path(__file__).with_name("log4j2.properties").absolute()


def local_session(
    cores: int = 2,
    app_name: str = "keylane",
    *,
    java_home: Path | None = None,
    java_options: str = "",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """
    Return a session in local mode, which knows the format `keylane`; the running session, if there is one.

    Sets PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON of this process, because PySpark reads them from the environment:
    workers then run in this very Python, which has pyarrow and keylane.

    Args:
        cores: task slots.
        java_home: of a Java of 17 or newer; None: what JAVA_HOME or PATH says.
        java_options: further options of the JVM, such as "-Xmx4g".
        settings: Spark's own, over those of `local_settings`.

    Raises:
        JavaMissingError: Java does not start, or is too old.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    from .registration import register

    session = SparkSession.getActiveSession()
    if session is None:
        set_environment(java_home)
        builder = SparkSession.builder.master(f"local[{cores}]").appName(app_name)
        for key, value in {**local_settings(cores, java_options), **(settings or {})}.items():
            builder = builder.config(key, value)
        try:
            session = builder.getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            raise _java_error() from error
    register(session)
    return session


def _java_error() -> JavaMissingError:
    home = os.environ.get("JAVA_HOME")
    java = f"JAVA_HOME={home}" if home else "`java` on PATH, as JAVA_HOME is not set,"
    error = JavaMissingError(f"Spark needs Java 17 or newer, and {java} has not started it")
    error.hint = "Install a JDK of 17 or newer, or set JAVA_HOME to the folder of one."
    return error


def set_environment(java_home: Path | None = None) -> None:
    """Point Spark at the Python that runs now, never at what PATH happens to find, and at a Java."""
    if java_home is not None:
        os.environ["JAVA_HOME"] = str(java_home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = LOOPBACK


def local_settings(cores: int, java_options: str = "") -> dict[str, str]:
    """Return the Spark settings of a local session; each with the reason it differs from the default."""
    return {
        # Nothing listens outside this machine, and no port is taken for a web page.
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {java_options}".strip()
        ),
        "spark.sql.shuffle.partitions": str(cores),
        # Batches from our workers cross a Unix socket: about a third more rows a second than TCP.
        "spark.python.unix.domain.socket.enabled": "true",
        # A time is the same everywhere.
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
