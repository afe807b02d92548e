"""`python -m keylane.broker`: a broker as a program of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from ..rpc.program import run_program, say_ready
from .app import run_broker
from .settings import broker_settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keylane.broker", description=__doc__)
    parser.add_argument("--group", help="broker group that it serves")
    parser.add_argument("--data", help="data folder, used by this broker only; made if missing")
    parser.add_argument("--meta", help="metaservers, host:port[,host:port…]")
    parser.add_argument("--host", help="loopback address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any free port")
    parser.add_argument("--segment-bytes", type=int, help="size of a segment of the commit log")
    parser.add_argument("--index", help="kind of index of the log: file, rocksdb")
    parser.add_argument("--config", type=Path, help="TOML file with these settings and more")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    flags = vars(_parser().parse_args(arguments))
    config = flags.pop("config")

    async def serve(stop: asyncio.Event) -> None:
        settings = broker_settings(flags, config)
        await run_broker(settings, stop, ready=partial(say_ready, "broker"))

    return run_program(serve)


if __name__ == "__main__":
    if not __debug__:
        print(
            "keylane: refuses to run with python -O: its asserts guard your data", file=sys.stderr
        )
        sys.exit(1)
    sys.exit(main())
