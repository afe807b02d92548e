"""Runs a broker as a separate program: `python -m keylane.broker`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial

from ..protocol.errors import KeylaneError
from ..rpc.operating.reloading import ReloadableSettings
from ..rpc.operating.service_manager import notify
from ..rpc.program import announce_ready, announce_stop, run_program
from .app import follows, run_broker, run_follower
from .settings import RELOADED, SOURCES, BrokerSettings


def main(arguments: list[str] | None = None, *, prog: str = "keylane.broker") -> int:
    """Run the broker until it is stopped, and return the exit status."""
    if not __debug__:
        print(
            "keylane: refuses to run with python -O: its asserts guard your data", file=sys.stderr
        )
        return 1
    flags = vars(SOURCES.parser(prog, "A broker.").parse_args(arguments))
    config = flags.pop("config")
    read_settings = partial(SOURCES.read, flags, config, dict(os.environ))
    try:
        settings = read_settings()
    except KeylaneError as error:
        print(f"keylane: {error}", file=sys.stderr)
        return 1
    adopting: list[Callable[[BrokerSettings], None]] = []
    """Of the broker or follower that runs."""

    def adopt(new_settings: BrokerSettings) -> None:
        for adopt_settings in adopting:
            adopt_settings(new_settings)

    async def serve(stop: asyncio.Event) -> None:
        ready = partial(announce_ready, "broker")
        is_follower = await asyncio.to_thread(follows, settings)
        while not stop.is_set():
            adopting.clear()
            promoted = None
            if is_follower:
                notify(f"READY=1\nSTATUS=follows broker group {settings.group}")
                promoted = await run_follower(settings, stop, on_running=adopting.append)
                if promoted is None:
                    return
                adopting.clear()
            is_follower = await run_broker(
                settings,
                stop,
                ready=ready,
                on_running=lambda broker: adopting.append(broker.adopt),
                promoted=promoted,
            )

    return run_program(
        serve,
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_fields={"program": "broker", "broker_group": settings.group},
        on_reload=ReloadableSettings(settings, read_settings, RELOADED, adopt).reload,
        on_stop=partial(announce_stop, "broker"),
    )


if __name__ == "__main__":
    sys.exit(main())
