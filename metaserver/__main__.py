"""`python -m keylane.metaserver --data DIR` runs a metaserver until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from ..protocol.errors import KeylaneError, MissingExtraError
from ..rpc.operating.reloading import ReloadableSettings
from ..rpc.program import announce_ready, announce_stop, run_program
from .settings import RELOADED, SOURCES, MetaserverSettings, warning_about_flags

if TYPE_CHECKING:
    from .running import RunningMetaserver

log = logging.getLogger("keylane.metaserver")


def main(arguments: list[str] | None = None, *, prog: str = "keylane.metaserver") -> int:
    """Run a metaserver and return the exit status."""
    if not __debug__:
        print("keylane: do not run with -O: its assertions guard the data", file=sys.stderr)
        return 1
    flags = vars(SOURCES.parser(prog, "A metaserver.").parse_args(arguments))
    config = flags.pop("config")
    read_settings = partial(SOURCES.read, flags, config, dict(os.environ))
    try:
        settings = read_settings()
    except KeylaneError as error:
        print(f"keylane: {error}", file=sys.stderr)
        return 1

    running_metaservers: list[RunningMetaserver] = []

    def apply_settings(new_settings: MetaserverSettings) -> None:
        for metaserver in running_metaservers:
            metaserver.apply_settings(new_settings)

    async def serve(stop: asyncio.Event) -> None:
        if warning := warning_about_flags(flags):
            log.warning(warning)
        await _serve(settings, stop, running_metaservers)

    return run_program(
        serve,
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_fields={"program": "metaserver"},
        on_reload=ReloadableSettings(settings, read_settings, RELOADED, apply_settings).reload,
        on_stop=partial(announce_stop, "metaserver"),
    )


async def _serve(
    settings: MetaserverSettings, stop: asyncio.Event, running_metaservers: list[RunningMetaserver]
) -> None:
    """Run a metaserver until `stop` is set, and announce when it is ready."""
    try:
        from .running import running_metaserver
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "a metaserver", "server") from error
    async with running_metaserver(settings, after_step=_die_after) as metaserver:
        running_metaservers.append(metaserver)
        announce_ready("metaserver", metaserver.address)
        await metaserver.serve_until(stop)


def _die_after(step: str) -> None:
    """Kill this process after the step named in KEYLANE_DIE_AFTER; used by crash tests."""
    if step == os.environ.get("KEYLANE_DIE_AFTER"):
        os.kill(os.getpid(), 9)


if __name__ == "__main__":
    sys.exit(main())
