"""A cluster whose metaserver loses its database, and has it rebuilt from what the brokers keep."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from support.cluster import Cluster
from support.server_process import run_keylane


async def rebuild_lost_database(cluster: Cluster, folder: Path, *, gone: str = "") -> None:
    """Kill the metaserver, delete its folder, run `keylane meta rebuild`, start it again; `gone` is
    a broker group.
    """
    data = folder / "meta-0"
    cluster.meta_program.kill()
    shutil.rmtree(data)
    done = await asyncio.to_thread(
        run_keylane,
        *("meta", "rebuild"),
        *("--data", str(data)),
        *(
            f"--broker={broker.address}"
            for broker in cluster.brokers
            if broker.process.poll() is None
        ),
        *([f"--gone={gone}"] if gone else []),
    )
    assert done.returncode == 0, done.stderr
    cluster.meta_program.restart()
