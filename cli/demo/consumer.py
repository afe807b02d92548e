"""A demo consumer that runs in its own process and records each message before acking it.

A record is handed to the kernel before the handler returns, and the ack is sent only after that. So
SIGKILL may lose an ack, but never the record of an acked message.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...consumer import Consumer, ConsumerSettings
from ...protocol.clock import SystemClock
from ...protocol.message import Message
from ...rpc.program import announce_ready, run_program
from ...rpc.stop_signals import StopSignals
from .history import Record
from .records import encode_record
from .source import ROW_PROPERTY

CONCURRENCY = 16


async def consume(options: argparse.Namespace) -> None:
    """Handle messages until a signal arrives. Raises the error if the consumer fails."""
    boot_ms = SystemClock.boot_ms
    with options.file.open("ab", buffering=0) as file:
        write = file.write

        def handle(message: Message) -> None:
            record = Record(
                message.key,
                int(message.properties[ROW_PROPERTY]),
                message.partition_id,
                message.offset,
                message.fencing_token,
                boot_ms(),
            )
            write(encode_record(record))

        consumer = Consumer(
            options.meta,
            subject=options.subject,
            group=options.group,
            handler=handle,
            settings=ConsumerSettings(
                concurrency=CONCURRENCY, ttl_ms=options.ttl_ms, name=options.name
            ),
        )
        with StopSignals():  # a signal while opening is handled by `run`
            async with consumer:
                announce_ready("demo consumer", options.name)
                await consumer.run()


def main() -> int:
    """Run one consumer with the options on the command line."""
    parser = argparse.ArgumentParser(prog="python -m keylane.cli.demo.consumer")
    parser.add_argument("--meta", required=True)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--file", required=True, type=Path)
    parser.add_argument("--ttl-ms", required=True, type=int)
    options = parser.parse_args()
    return run_program(lambda _stop: consume(options))


if __name__ == "__main__":
    raise SystemExit(main())
