"""A real Kafka of one node on loopback, for the ratios of `spark.py` beside Spark's Kafka
connector.

mvn -B -f benchmarks/spark_side/kafka_server.xml dependency:copy-dependencies
-DoutputDirectory=HOME/server -DincludeScope=runtime mvn -B -f
benchmarks/spark_side/kafka_connector.xml dependency:copy-dependencies
-DoutputDirectory=HOME/connector -DincludeScope=runtime make bench-spark ARGS="--kafka HOME"
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

CLUSTER = "a2V5bGFuZS1iZW5jaC0xMQ"
CONFIG = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""
OF_CONNECTOR = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
TUNED = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.fetch.min.bytes": str(1 << 20),
}
START_S = 60


def connector_jars(home: Path) -> list[str]:
    """Return the jars that Spark lacks."""
    return [str(jar) for jar in home.glob("connector/*.jar") if jar.name.startswith(OF_CONNECTOR)]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def start_kafka(home: Path, folder: Path, stack: ExitStack) -> tuple[str, int]:
    """Start Kafka until the stack closes; return its address and process id."""
    port, controller = _free_port(), _free_port()
    config, jars = folder / "server.properties", f"{home}/server/*"
    config.write_text(CONFIG.format(port=port, controller=controller, data=folder / "log"))
    tool = ["java", "-cp", jars, "kafka.tools.StorageTool", "format", "-t", CLUSTER]
    subprocess.run([*tool, "-c", str(config)], check=True, capture_output=True)
    log = stack.enter_context((folder / "kafka.log").open("wb"))
    java = ["java", "-Xmx1G", "-Xms1G", "-server", "-XX:+UseG1GC", "-cp", jars, "kafka.Kafka"]
    process = subprocess.Popen([*java, str(config)], stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in range(START_S * 10):
        if process.poll() is not None:
            raise SystemExit(f"Kafka ended with status {process.returncode}; see its log")
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return f"127.0.0.1:{port}", process.pid
        time.sleep(0.1)
    raise SystemExit(f"Kafka did not start in {START_S} s")
