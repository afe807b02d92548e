"""A follower of broker group g1 as a process: a spare that is killed and read."""

from __future__ import annotations

import signal
from pathlib import Path

from support.cluster import Cluster
from support.server_process import ServerProcess


class Spare:
    """A follower of broker group g1, in a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path, *more: str) -> None:
        self.folder = folder
        self._arguments = (
            *("--group", "g1", "--data", str(folder), "--meta", cluster.meta, "--follow", "true"),
            *more,
        )
        self._process: ServerProcess | None = None

    def start(self) -> None:
        self._process = ServerProcess("keylane.broker", self._arguments)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.stdout.close()
            process.wait(60)

    def segments(self) -> dict[str, bytes]:
        return segments_of(self.folder)


def segments_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "log").glob("*.log"))}
