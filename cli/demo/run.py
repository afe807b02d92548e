"""Runs `keylane demo`: it opens the folder, runs the story, and removes or keeps the data."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import uvloop

from ...protocol.errors import DataFolderError, KeylaneError
from ..connection import open_admin
from ..java import find_java
from ..options import OutputFormat
from ..screen import show_error
from .cluster import GROUP, SUBJECT, DemoCluster
from .processes import free_port
from .report import Verdict, open_screen, show_verdict
from .story import Story


def open_folder(data: Path | None) -> Path:
    """
    Return the folder of this run: `data`, which must be new or empty, or a temporary one.

    Raises:
        DataFolderError: the folder is not writable, or not empty.
    """
    try:
        if data is None:
            return Path(tempfile.mkdtemp(prefix="keylane-demo-"))
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(data.iterdir()):
            raise DataFolderError(
                f"{data} is not empty: the demo counts all stored messages, so it needs an empty "
                "folder",
                path=str(data),
            )
        (data / "logs").mkdir()
        (data / "logs").rmdir()
    except OSError as error:
        raise DataFolderError(f"{data}: {error.strerror or error}", path=str(data)) from error
    return data.resolve()


def look_around(cluster: DemoCluster) -> str:
    """Return commands that inspect the cluster that was left running, and stop it."""
    meta = cluster.meta_address
    pids = " ".join(str(process.pid) for process in (*cluster.brokers, cluster.metaserver))
    return "\n".join(
        (
            f"the cluster is left running; its folder is {cluster.folder}",
            f"  export KEYLANE_META={meta}",
            f"  keylane subject describe {SUBJECT}",
            f"  keylane group describe {SUBJECT} {GROUP}",
            f"  keylane consume {SUBJECT} --group mine --count 10",
            f"  kill {pids}      # stops it",
        )
    )


async def _run(form: OutputFormat, rows: int, folder: Path, *, keep: bool) -> Verdict:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    screen = open_screen(form, rows)
    meta = f"127.0.0.1:{free_port()}"
    async with open_admin(meta) as admin:
        cluster = DemoCluster(folder, meta, admin)
        kept = False
        try:
            verdict = await Story(rows, cluster, screen).run()
            kept = keep
        finally:
            screen.close()
            await cluster.stop(keep_servers=kept)
    if kept and form is OutputFormat.TABLE:
        print(look_around(cluster))
    return verdict


def run_demo(form: OutputFormat, *, rows: int, keep: bool, data: Path | None) -> int:
    """
    Run the demo and show its verdict.

    Returns:
        The exit status; it is 0 if there are no problems.
    """
    folder: Path | None = None
    shown = False
    try:
        find_java()  # first, because Spark is needed only at the end
        folder = open_folder(data)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            verdict = runner.run(_run(form, rows, folder, keep=keep))
        shown = True
        stays = keep or data is not None or bool(verdict.problems)
        show_verdict(form, verdict, left=_left(folder) if stays and not keep else "")
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)
        return 1 if verdict.problems else 0
    except KeylaneError as error:
        show_error(error, form)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    finally:
        if folder is not None and not shown and form is OutputFormat.TABLE:
            print(_left(folder), file=sys.stderr)


def _left(folder: Path) -> str:
    return f"everything stored, and the logs, are in {folder}"
