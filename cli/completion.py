"""Completes the names of subjects and consumer groups in a shell, by asking the cluster."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..admin import Admin

LIMIT_S = 0.5
"""Seconds for which a shell waits for the names; then it completes nothing."""


def complete_subject(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the subjects whose names begin with `incomplete`; none if no metaserver answers."""

    async def subjects(admin: Admin) -> list[str]:
        return [view.subject for view in await admin.list_subjects()]

    return _names(ctx, incomplete, subjects)


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups of the subject on the command line, as `complete_subject` does."""

    async def groups(admin: Admin) -> list[str]:
        subject = str(ctx.params.get("subject") or "")
        return [view.group for view in await admin.list_groups(subject)]

    return _names(ctx, incomplete, groups)


def _names(
    ctx: typer.Context, incomplete: str, ask: Callable[[Admin], Awaitable[list[str]]]
) -> list[str]:
    import asyncio

    from ..admin import Admin
    from .profiles import use_profile

    async def answered() -> list[str]:
        profile = ctx.find_root().params.get("profile") or os.environ.get("KEYLANE_PROFILE")
        if profile:
            use_profile(profile)
        source = ctx.get_parameter_source("meta")
        meta = ctx.params["meta"]
        if source is None or source.name != "COMMANDLINE":
            meta = os.environ.get("KEYLANE_META") or meta
        async with asyncio.timeout(LIMIT_S), Admin(meta) as admin:
            return await ask(admin)

    try:
        names = asyncio.run(answered())
    except Exception:  # noqa: BLE001 - a shell shows no error while a word is typed
        return []
    return sorted(name for name in names if name.startswith(incomplete))
