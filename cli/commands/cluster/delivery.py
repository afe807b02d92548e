"""Brings changed files to their hosts with the operator's own command, checks that they are used,
and shows what is left to do.

    files of the folder ─▶ COMMAND HOST FOLDER for each host that differs ─▶ asked again
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterable

import click
import msgspec

from ....protocol.errors import ConfigError
from ....rpc.reasons import reason
from ...options import OutputFormat
from ...screen import show_data, show_line
from ...status import showing
from .check import show_findings
from .findings import Finding
from .folder import Host

POLL_S = 0.2
NEWS_S = 20.0
"""How long a server may take to use files that it has to reload, in seconds."""


class ClusterStep(msgspec.Struct, frozen=True):
    """What a command has done to a cluster, and what is left to do before it holds."""

    done: list[str]
    left: list[Finding]


Ask = Callable[[], Awaitable[list[Finding]]]
"""Asks servers in what they differ from what is wanted."""


async def bring(ask: Ask, hosts: Iterable[Host], deliver: str | None) -> list[Finding]:
    """
    Bring the files of the hosts whose servers differ there, and return what still differs.

    Args:
        deliver: a command that copies a host's folder to the host and reloads its programs; None
            only asks the servers.

    Raises:
        ConfigError: the command cannot be run, or has failed for a host.
    """
    with showing("asking the servers what they use"):
        left = await ask()
        if deliver is None or not left:
            return left
        differing = {finding.address for finding in left}
        for host in hosts:
            if host.may_be_silent or differing & {address for _, address in host.servers}:
                await _deliver(deliver, host)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + NEWS_S
        while True:
            left = await ask()
            if not left or loop.time() > deadline_s:
                return left
            await asyncio.sleep(POLL_S)


async def _deliver(command: str, host: Host) -> None:
    try:
        words = [*shlex.split(command), host.machine, str(host.delivered)]
        # what it prints must not mix with JSON
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot run the command of --deliver: {reason(error)}") from error
    status = await process.wait()
    if status:
        raise ConfigError(
            f"the command of --deliver ended with status {status} for {host.machine}; see what is "
            f"left with: keylane cluster check --folder {host.delivered.parent}"
        )


def show_step(output: OutputFormat, step: ClusterStep) -> None:
    """Show what was done and what is left. Raises click.exceptions.Exit with status 1 if something
    is left.
    """
    if output is not OutputFormat.TABLE:
        show_data(output, step)
    else:
        for line in step.done:
            show_line(line)
        show_findings(step.left)
        if not step.left:
            show_line("every server that was asked uses the files of the folder")
    if step.left:
        raise click.exceptions.Exit(1)
