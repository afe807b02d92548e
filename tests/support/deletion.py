"""Subjects and groups deleted to the end, for tests of what is at work meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from keylane import Admin


async def delete_subject(meta: str | Iterable[str], subject: str, *, force: bool = False) -> None:
    """Delete a subject; every broker has dropped it at the end."""
    async with asyncio.timeout(60), Admin(meta) as admin:
        view = await admin.delete_subject(subject, force=force)
        while view.left:
            await asyncio.sleep(0.05)
            view = await admin.delete_subject(subject, subject_id=view.subject_id)


async def delete_group(
    meta: str | Iterable[str], subject: str, group: str, *, force: bool = False
) -> None:
    """Delete a group; every broker has forgotten it at the end."""
    async with asyncio.timeout(60), Admin(meta) as admin:
        view = await admin.delete_group(subject, group, force=force)
        while view.left:
            await asyncio.sleep(0.05)
            view = await admin.delete_group(subject, group, group_id=view.group_id)
