"""What a broker keeps of a static subject and of a reset, byte for byte, and that it is read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from keylane.testing.machines.disk import SimDisk
from sim.machines.store import open_store

HERE = Path(__file__).parent
GOLDEN: dict[str, bytes] = {
    path: bytes.fromhex("".join(lines))
    for path, lines in json.loads((HERE / "queue_store_v1.json").read_text()).items()
}


def of_today() -> dict[str, bytes]:
    spec = importlib.util.spec_from_file_location("queue_goldens", HERE / "make_queue_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.queue_files()


def test_files_have_their_golden_bytes():
    """PARTITION with `static`, FENCE and CURSOR of a reset, and the image of the partition, have
    these bytes.
    """
    files = of_today()
    assert sorted(files) == sorted(GOLDEN)
    for path, data in GOLDEN.items():
        assert files[path].hex(" ", 8) == data.hex(" ", 8), path


async def test_golden_files_are_read():
    """With its snapshot or from the log alone: static, and the cursor where the operator set it."""
    for snapshot in (True, False):
        disk = SimDisk()
        for path, data in GOLDEN.items():
            if snapshot or not path.startswith("snapshot/"):
                disk.make_folder(path.rpartition("/")[0])
                file = disk.open_append(path)
                file.append([data])
                file.fdatasync()
        partition = open_store(disk).state.partition(1)
        group = partition.groups["audit"]
        assert partition.facts.static
        assert partition.facts.partition.queue == 3
        assert (group.acked.cursor, group.acked.ranges) == (2, [])
        assert (group.lock.fence, group.lock.session) == (6, "=reset")
