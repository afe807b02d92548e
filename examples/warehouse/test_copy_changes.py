"""The copy, with a cluster in memory and virtual time."""

import asyncio
from pathlib import Path

import pyarrow.parquet

from copy_changes import copy
from keylane.testing import VirtualCluster
from send_changes import changes_of, send


async def test_every_change_is_in_a_file_when_the_copy_is_killed_and_partitions_are_added(
    keylane_cluster: VirtualCluster, tmp_path: Path
) -> None:
    await keylane_cluster.create_subject("orders", partitions=2)
    first = keylane_cluster.start(copy, keylane_cluster.address, tmp_path)
    sent = await send(keylane_cluster.address, changes_of(range(1, 301)))
    await keylane_cluster.until(lambda: list(tmp_path.glob("*.parquet")))
    first.kill()
    keylane_cluster.start(copy, keylane_cluster.address, tmp_path)
    sent += await send(keylane_cluster.address, changes_of(range(301, 601)))
    await asyncio.sleep(120)

    rows = pyarrow.parquet.read_table(tmp_path).select(["order", "version"]).to_pylist()
    assert len({(row["order"], row["version"]) for row in rows}) == sent
    assert await keylane_cluster.lag("orders", "warehouse") == 0
