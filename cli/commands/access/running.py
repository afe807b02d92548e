"""Runs a command about access: asks, and shows the answer as a table or as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ...options import OutputFormat
from ...screen import run, show_json

if TYPE_CHECKING:
    from ....admin import Admin


def ask_and_show(
    meta: str,
    output: OutputFormat,
    ask: Callable[[Admin], Awaitable[Any]],
    show: Callable[[Any], None],
) -> None:
    """Ask the metaserver, and show its answer."""
    from ...connection import open_admin

    async def work() -> None:
        async with open_admin(meta) as admin:
            answer = await ask(admin)
        if output is OutputFormat.JSON:
            show_json({} if answer is None else answer)
        else:
            show(answer)

    run(output, work())
