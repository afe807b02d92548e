"""Starts a local Spark session on the loopback interface that logs little and uses the running
Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.errors import ConfigError, KeylaneError, Reason, SparkProcessError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
JAVA_MIN = 17
PROBE_S = 60
"""The timeout in seconds for `java -version`, which takes 0.1 s, but much longer under load."""
REASON_LINES, REASON_CHARS = 3, 500
_HEAP = re.compile(r"(?<!\S)-Xmx(\d+)([kKmMgGtT]?)(?!\S)")
_NO_REASON = re.compile(
    r"\s+at |WARNING: |NOTE: |Picked up |Error: (Could not create|A fatal "
    r"exc)|.*/spark-class: line "
)
"""Matches lines in Java's error output that do not explain a failure."""
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
    Return the active session, or start one in local mode, and register the format `keylane`.

    This sets PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON in the environment of this process, so that
    workers use the same Python, which has pyarrow and keylane.

    Args:
        cores: the number of task slots.
        app_name: the name of the application.
        java_home: the folder of Java 17 or newer; None uses JAVA_HOME, or `java` on PATH.
        java_options: additional JVM options, such as "-XX:+UseG1GC". "-Xmx4g" becomes the setting
            `spark.driver.memory` with the value "4g", because Spark accepts no heap size in the
            options.
        settings: Spark settings that override those of `local_settings`.

    Raises:
        SparkProcessError: Java does not start, or is too old.
        ConfigError: Java started but exited; the message contains its output.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    from .registration import register

    session = SparkSession.getActiveSession()
    if session is None:
        set_environment(java_home)
        builder = SparkSession.builder.master(f"local[{cores}]").appName(app_name)
        config = {**local_settings(cores, java_options), **(settings or {})}
        for key, value in config.items():
            builder = builder.config(key, value)
        try:
            session = builder.getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            raise _java_error(config) or error from error
    register(session)
    return session


def _java_error(settings: Mapping[str, str]) -> KeylaneError | None:
    """Return why Java did not start with these settings, or None if it starts now."""
    home = os.environ.get("JAVA_HOME")
    if not _is_new_enough(Path(home, "bin/java") if home else Path("java")):
        java = f"JAVA_HOME={home}" if home else "`java` on PATH (JAVA_HOME is not set)"
        error = SparkProcessError(
            Reason.JAVA_MISSING, f"Spark needs Java 17 or newer, and {java} has not started it"
        )
        error.hint = "Install a JDK of version 17 or newer, or set JAVA_HOME to its folder."
        return error
    output = _java_output(settings)
    return None if output is None else ConfigError(f"Spark's Java does not start: {output}")


def _is_new_enough(java: Path) -> bool:
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r'version "(\d+)', result.stderr)
    return version is not None and int(version[1]) >= JAVA_MIN


def _java_output(settings: Mapping[str, str]) -> str | None:
    """Start Java again, and return its error output, or None if it starts."""
    from pyspark import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with tempfile.TemporaryFile() as errors:
        try:
            gateway = launch_gateway(conf, {"stderr": errors})  # type: ignore[no-untyped-call]
        except PySparkRuntimeError:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
        else:
            gateway.shutdown()
            gateway.proc.stdin.close()
            return None
    reasons = [line.strip() for line in lines if line.strip() and not _NO_REASON.match(line)]
    return "; ".join(reasons[:REASON_LINES])[:REASON_CHARS] or "it gives no reason"


def set_environment(java_home: Path | None = None) -> None:
    """Make Spark use the running Python instead of the one on PATH, and the given Java."""
    if java_home is not None:
        os.environ["JAVA_HOME"] = str(java_home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = LOOPBACK


def local_settings(cores: int, java_options: str = "") -> dict[str, str]:
    """Return the Spark settings of a local session."""
    sizes = _HEAP.findall(java_options)
    java_options = " ".join(_HEAP.sub(" ", java_options).split())
    # Spark does not allow a heap size in the options. A size without a unit means bytes to Java,
    # but mebibytes to Spark.
    size, unit = sizes[-1] if sizes else ("", "")
    heap = {"spark.driver.memory": size + unit if unit else f"{int(size) >> 10}k"} if size else {}
    return heap | {
        # Nothing listens outside this machine, and the web UI uses no port.
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {java_options}".strip()
        ),
        "spark.sql.shuffle.partitions": str(cores),
        # Workers pass about a third more rows per second over a Unix socket than over TCP.
        "spark.python.unix.domain.socket.enabled": "true",
        # Workers are forked from a process that has already loaded keylane and pyarrow.
        "spark.python.daemon.module": "keylane.spark.worker_daemon",
        # Times look the same on every machine.
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
