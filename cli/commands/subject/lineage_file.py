"""`keylane subject lineage`: the picture of a subject's lineage, written to a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TypedDict

from ....console.lineage import draw_lineage, fetch_lineage
from ....protocol.errors import ConfigError
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import show_data, show_line
from ...status import showing

STANDARD_OUTPUT = Path("-")


class WrittenPicture(TypedDict):
    """A picture in a file, as JSON."""

    subject: str
    file: str
    size_bytes: int


async def write_lineage(
    meta: str, output: OutputFormat, *, subject: str, file: Path, groups: Collection[str]
) -> None:
    """Draw a subject's lineage and write it. Raises ConfigError if the file cannot be written."""
    async with open_admin(meta) as admin:
        with showing(f"asking the brokers of {subject}"):
            facts = await fetch_lineage(admin, subject, groups)
    picture = draw_lineage(facts).encode()
    if file == STANDARD_OUTPUT:
        sys.stdout.buffer.write(picture)
        sys.stdout.flush()
        return
    try:
        await asyncio.to_thread(file.write_bytes, picture)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    if output is not OutputFormat.TABLE:
        written = WrittenPicture(subject=subject, file=str(file), size_bytes=len(picture))
        show_data(output, written)
        return
    show_line(f"{file} shows the lineage of {subject}; open it in a browser")
