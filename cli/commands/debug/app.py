"""`keylane debug`: the options and help of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...answer import CommonOptions, expand_options
from ...groups import CommandGroup
from ...parameters import Argument, Option

debug_app = CommandGroup()


@debug_app.add("bundle", shows=".commands.debug.contents:WrittenBundle")
@expand_options
def debug_bundle(
    *,
    file: Annotated[
        Path | None,
        Argument(metavar="[FILE]", help="The bundle, a .tar.gz; by default named by the time."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        Option(metavar="FILE.toml", help="Settings file of a server; may be repeated."),
    ] = None,
    logs: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Folder with logs of servers (*.log, in JSON); the end of each is taken.",
        ),
    ] = None,
    broker: Annotated[
        list[str] | None,
        Option(metavar="HOST:PORT", help="Ask this broker even if no metaserver names it."),
    ] = None,
    timeout: Annotated[
        float, Option(min=0.1, max=600, metavar="SECONDS", help="Time limit for each server.")
    ] = 10,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    common: CommonOptions,
) -> None:
    """Write what others need to help you into one file: versions, settings, state, metrics and
    clocks of every server. No message values, keys, tokens or passwords.
    """
    from .bundle import write_bundle

    common.run(
        write_bundle,
        file=file,
        configs=config or (),
        logs=logs,
        brokers=broker or (),
        timeout_s=timeout,
        overwrite=overwrite,
    )
