"""Files of servers are for their own user: no other user of the machine can read a message, a
cursor or a route.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.broker.storage.files import restrict_permissions
from support.cluster import Cluster, eventually


def open_to_others(folder: Path) -> list[str]:
    """Files and folders that other users have any right on."""
    open_paths = []
    for place, _folders, files in os.walk(folder):
        for path in (place, *(f"{place}/{name}" for name in files)):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & 0o077:
                open_paths.append(f"{path} {mode:o}")
    return open_paths


def open_up(folder: Path) -> None:
    """The rights that an older version gave."""
    for place, _folders, files in os.walk(folder):
        os.chmod(place, 0o755)
        for name in files:
            os.chmod(f"{place}/{name}", 0o644)


async def handled_messages(cluster: Cluster, count: int) -> None:
    """Send, and handle all there is."""
    handled: list[Message] = []
    async with Consumer(cluster.meta, subject="s", group="g", handler=handled.append):
        async with Producer(cluster.meta) as producer:
            for number in range(200):
                await producer.send("s", b"x" * 200, key=b"%d" % number)
        await eventually(lambda: len(handled) >= count)


@pytest.mark.parametrize("index", ["file", "rocksdb"])
async def test_data_folder_is_closed_to_other_users_after_a_run(tmp_path: Path, index: str) -> None:
    """Log, index, snapshots, identity, reserve, SQLite's files: also those made before by a version
    that was careless.
    """
    umask = os.umask(0o022)
    settings = f'index = "{index}"\nsegment_bytes = 20000\nsnapshot_bytes = 10000\n'
    cluster = Cluster(tmp_path, 1, broker_settings=settings)
    folders = [tmp_path / "broker-1", tmp_path / "meta-0"]
    try:
        await cluster.create("s", partitions=2)
        await handled_messages(cluster, 200)
        for folder in folders:
            assert (folder / "identity.json").exists() or (folder / "meta.db-wal").exists()
            assert open_to_others(folder) == []
        for program in (*cluster.brokers, cluster.meta_program):
            program.kill()
        for folder in folders:
            open_up(folder)
        cluster.meta_program.restart()
        cluster.brokers[0].restart()
        await handled_messages(cluster, 200)
        for folder in folders:
            assert open_to_others(folder) == []
    finally:
        cluster.stop()
        os.umask(umask)
    for folder in folders:
        assert open_to_others(folder) == []


def test_narrowing_leaves_the_target_of_a_link(tmp_path: Path) -> None:
    """A folder's own files are narrowed; a file outside the folder that a link leads to is left as
    it is.
    """
    folder, other = tmp_path / "data", tmp_path / "other"
    folder.mkdir(mode=0o755)
    other.write_text("not ours")
    other.chmod(0o644)
    (folder / "link").symlink_to(other)
    (folder / "file").write_text("ours")
    restrict_permissions(str(folder))
    assert stat.S_IMODE(other.stat().st_mode) == 0o644
    assert stat.S_IMODE((folder / "file").stat().st_mode) & 0o077 == 0
