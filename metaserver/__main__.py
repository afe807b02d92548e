"""`python -m keylane.metaserver --data DIR`: runs a metaserver until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from ..protocol.errors import KeylaneError
from ..rpc.program import run_program, say_ready
from .running import running_metaserver
from .settings import MetaserverSettings, metaserver_settings


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    if not __debug__:
        print("keylane: do not run with -O: its assertions guard the data", file=sys.stderr)
        return 1
    given = vars(_parser().parse_args(arguments))
    config = given.pop("config")
    log_level = given.pop("log_level")
    try:
        settings = metaserver_settings(given, config)
    except KeylaneError as error:
        print(f"keylane: {error}", file=sys.stderr)
        return 1

    async def serve(stop: asyncio.Event) -> None:
        await _serve(settings, stop)

    return run_program(serve, log_level=log_level)


async def _serve(settings: MetaserverSettings, stop: asyncio.Event) -> None:
    async with running_metaserver(settings, after_step=_die_after) as metaserver:
        say_ready("metaserver", metaserver.address)
        await metaserver.serve_until(stop)


def _die_after(step: str) -> None:
    """Kill this process after the step that KEYLANE_DIE_AFTER names, as a crash would: for tests."""
    if step == os.environ.get("KEYLANE_DIE_AFTER"):
        os.kill(os.getpid(), 9)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keylane.metaserver", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the embedded database")
    parser.add_argument(
        "--database-url", metavar="URL", help="postgresql+asyncpg://…, instead of the embedded one"
    )
    parser.add_argument("--host", help="loopback address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any free one (7000)")
    parser.add_argument(
        "--auto-create",
        metavar="PATTERN",
        help="which subjects their first message creates, such as 'events.*'; off (the default): none",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings by name")
    parser.add_argument("--log-level", default="WARNING", help="DEBUG, INFO, WARNING, ERROR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
