"""`keylane top`: a live screen of the cluster, until q is pressed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import click

from ...protocol.errors import ConfigError
from ..options import WAIT_S

TERMINATED = 143
"""Exit status after SIGTERM."""


async def show_top(meta: str) -> None:
    """
    Show the screen.

    Raises:
        ConfigError: this is no terminal, or an address, a TLS file or the token cannot be used.
    """
    is_terminal = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    if not is_terminal or os.environ.get("TERM") == "dumb":
        error = ConfigError("keylane top draws on a terminal, and this is none")
        error.hint = (
            "For programs: keylane broker list --output json, keylane subject list --output json, "
            "keylane group list SUBJECT --output json, keylane why SUBJECT --output json."
        )
        raise error
    from ..top.app import TopApp
    from ..top.asker import Asker

    async with Asker.opened(meta, wait_s=WAIT_S.get()) as asker:
        app = TopApp(asker)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, app.exit, None, TERMINATED)
        await app.run_async()
    if app.return_code:
        raise click.exceptions.Exit(app.return_code)
