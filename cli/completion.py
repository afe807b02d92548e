"""Completes names in a shell: those of subjects and consumer groups by asking the cluster, and
those of profiles.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from ..protocol.address import META_DEFAULT

if TYPE_CHECKING:
    from ..admin import Admin

PROCESS_S = 0.45
"""Processor time, in seconds, that the command and its wait for a metaserver may take together. The
user is waiting in a shell: including the end of the process, this amounts to half a second.
"""
WAIT_S_MIN = 0.1
"""Minimum wait for a metaserver, in seconds, so that completion works on a slow machine too."""


def complete_subject(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the subjects whose names begin with `incomplete`, or none if no metaserver
    responds.
    """

    async def list_subjects(admin: Admin) -> list[str]:
        return [view.subject for view in await admin.list_subjects()]

    return _complete(ctx, incomplete, list_subjects)


def complete_group(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the matching consumer groups of the subject on the command line; see
    `complete_subject`.
    """

    async def list_groups(admin: Admin) -> list[str]:
        return [view.group for view in await admin.list_groups(_subject(ctx))]

    return _complete(ctx, incomplete, list_groups)


def _subject(ctx: click.Context) -> str:
    """Return the subject on the command line, or "". If the value of an option is being completed,
    click has not yet assigned the arguments before it to their parameters.
    """
    names = [each.name for each in ctx.command.params if isinstance(each, click.Argument)]
    unassigned = dict(zip(names, ctx.args, strict=False))
    return str(ctx.params.get("subject") or unassigned.get("subject", ""))


def complete_profile(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the profiles whose names begin with `incomplete`, or none if they cannot be read."""
    from .profiles import profiles_file, read_profiles

    try:
        names = read_profiles(profiles_file())
    except Exception:  # noqa: BLE001 - completion must not print errors
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def remaining_wait_s(spent_s: float) -> float:
    """Return how long, in seconds, completion may wait for a metaserver after the command's start
    has taken `spent_s` of processor time.
    """
    return max(PROCESS_S - spent_s, WAIT_S_MIN)


def _complete(
    ctx: click.Context, incomplete: str, list_names: Callable[[Admin], Awaitable[list[str]]]
) -> list[str]:
    import asyncio

    from ..admin import Admin
    from .profiles import use_profile

    async def fetch_names() -> list[str]:
        profile = ctx.find_root().params.get("profile") or os.environ.get("KEYLANE_PROFILE")
        if profile:
            use_profile(profile)
        source = ctx.get_parameter_source("meta")
        meta = ctx.params.get("meta") or META_DEFAULT  # some commands have no --meta
        if source is None or source.name != "COMMANDLINE":
            meta = os.environ.get("KEYLANE_META") or meta
        wait_s = remaining_wait_s(time.process_time())
        async with asyncio.timeout(wait_s), Admin(meta) as admin:
            return await list_names(admin)

    try:
        names = asyncio.run(fetch_names())
    except Exception:  # noqa: BLE001 - completion must not print errors
        return []
    return sorted(name for name in names if name.startswith(incomplete))
