"""Shows what the programs of a story are waiting for: the innermost await in user code of each
task.
"""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

PACKAGE = __name__.partition(".")[0]
LINES_MAX = 20


def waiting_lines(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Return a line for each task that is in user code, with its name, the file and line, and the
    source line.
    """
    lines = []
    for task in tasks:
        frames = list(_frames(task.get_coro()))
        user_frames = [frame for frame in frames if not _is_library_code(frame)]
        if task.done() or not user_frames:
            continue
        frame = user_frames[-1]
        path, number = frame.f_code.co_filename, frame.f_lineno
        code = linecache.getline(path, number).strip()
        where = f"{path.rpartition('/')[2]}:{number} in {frame.f_code.co_name}"
        line = f"{task.get_name()} waits at {where}: {code}"
        if frames[-1] is not frame:
            line += f"   (in {frames[-1].f_code.co_qualname})"
        lines.append(line)
    lines.sort()
    omitted_count = len(lines) - LINES_MAX
    return lines if omitted_count <= 0 else [*lines[:LINES_MAX], f"and {omitted_count} more tasks"]


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the coroutines that it awaits, outermost first."""
    while awaited is not None:
        for kind in ("cr", "ag", "gi"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                inner = "gi_yieldfrom" if kind == "gi" else f"{kind}_await"
                awaited = getattr(awaited, inner)
                break
        else:
            return


def _is_library_code(frame: FrameType) -> bool:
    """Return True if the code belongs to keylane or asyncio."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module in {PACKAGE, "asyncio", "contextlib"}
