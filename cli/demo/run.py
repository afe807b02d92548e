"""Runs `keylane demo`: prepares the folder, runs the scenario, and removes or keeps the data."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from ...protocol.errors import DataFolderError, KeylaneError, MissingExtraError
from ..connection import open_admin
from ..java import find_java
from ..options import OutputFormat
from ..screen import show_error
from .cluster import GROUP, SUBJECT, DemoCluster
from .processes import free_port
from .report import Verdict, open_screen, show_verdict
from .source import flights_file
from .story import Scenario

PACKAGES = ("aiosqlite", "alembic", "sqlalchemy", "uvloop", "numpy", "pandas", "pyarrow", "pyspark")
"""The packages that only the processes of the demo import."""


def check_packages() -> None:
    """Raise MissingExtraError if a package that the demo needs is not installed."""
    for package in PACKAGES:
        try:
            if find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "the demo", "demo") from error
    flights_file()


def open_folder(data: Path | None) -> Path:
    """
    Prepare the folder for this run, which is `data`, if given, or a temporary one. `data` must be
    new or empty.

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


def next_commands(cluster: DemoCluster) -> str:
    """Return a text with commands for inspecting and stopping the cluster that was left running."""
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


async def _run(output: OutputFormat, rows: int, folder: Path, *, keep: bool) -> Verdict:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    screen = open_screen(output, rows)
    meta = f"127.0.0.1:{free_port()}"
    async with open_admin(meta) as admin:
        cluster = DemoCluster(folder, meta, admin)
        is_kept = False
        try:
            verdict = await Scenario(rows, cluster, screen).run()
            is_kept = keep
        finally:
            screen.close()
            await cluster.stop(keep_servers=is_kept)
    if is_kept and output is OutputFormat.TABLE:
        print(next_commands(cluster))
    return verdict


def run_demo(output: OutputFormat, *, rows: int, keep: bool, data: Path | None) -> int:
    """
    Run the demo and show its verdict.

    Returns:
        The exit status: 0 if there are no problems.
    """
    folder: Path | None = None
    is_shown = False
    try:
        check_packages()
        find_java()  # fail early, although Spark is needed only at the end
        folder = open_folder(data)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            verdict = runner.run(_run(output, rows, folder, keep=keep))
        is_shown = True
        keep_folder = keep or data is not None or bool(verdict.problems)
        show_verdict(output, verdict, note=_folder_note(folder) if keep_folder and not keep else "")
        if not keep_folder:
            shutil.rmtree(folder, ignore_errors=True)
        return 1 if verdict.problems else 0
    except KeylaneError as error:
        show_error(error, output)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    finally:
        if folder is not None and not is_shown and output is OutputFormat.TABLE:
            print(_folder_note(folder), file=sys.stderr)


def _folder_note(folder: Path) -> str:
    return f"everything stored, and the logs, are in {folder}"
