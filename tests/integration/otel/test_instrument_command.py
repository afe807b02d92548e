"""`opentelemetry-instrument` finds keylane, and a program that knows nothing of it is traced."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from support.cluster import Cluster

PROGRAM = """
import asyncio, sys
from keylane import Consumer, Producer

async def main(meta):
    handled = asyncio.Event()

    async def handle(message):
        handled.set()

    async with Producer(meta) as producer:
        await producer.send("instrumented", b"paid", key="customer-7")
        async with Consumer(meta, subject="instrumented", group="billing", handler=handle):
            await handled.wait()

asyncio.run(main(sys.argv[1]))
"""


def run(shared_cluster: Cluster, program: Path, **environment: str) -> list[dict]:
    """Run the program under `opentelemetry-instrument`. Return the spans that it prints."""
    done = subprocess.run(
        [
            Path(sys.executable).with_name("opentelemetry-instrument"),
            sys.executable,
            program,
            shared_cluster.meta,
        ],
        env={**os.environ, "OTEL_TRACES_EXPORTER": "console", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder, text, spans = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        span, end = decoder.raw_decode(text)
        spans.append(span)
        text = text[end:].lstrip()
    return spans


def test_instrument_command_traces_a_program_as_it_is(shared_cluster: Cluster, tmp_path: Path):
    asyncio.run(shared_cluster.create("instrumented", partitions=1))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    spans = {
        span["name"]: span
        for span in run(
            shared_cluster,
            program,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
            OTEL_SERVICE_NAME="shop",
        )
    }
    assert {"send instrumented", "process instrumented", "ack instrumented"} <= set(spans)
    sent, processed = spans["send instrumented"], spans["process instrumented"]
    assert processed["context"]["trace_id"] == sent["context"]["trace_id"]
    assert processed["parent_id"] == sent["context"]["span_id"]
    assert spans["ack instrumented"]["parent_id"] == processed["context"]["span_id"]
    assert sent["resource"]["attributes"]["service.name"] == "shop"


def test_instrument_command_leaves_keylane_out_when_told_so(
    shared_cluster: Cluster, tmp_path: Path
):
    asyncio.run(shared_cluster.create("instrumented-not", partitions=1))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('"instrumented"', '"instrumented-not"'))
    spans = run(shared_cluster, program, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="keylane")
    assert not any("instrumented" in span["name"] for span in spans)
