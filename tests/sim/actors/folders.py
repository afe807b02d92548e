"""Copies of simulated disks, as a program that reads their files makes them."""

from __future__ import annotations

from keylane.testing.machines.disk import SimDisk, disk_of


def copy_of(disk: SimDisk) -> SimDisk:
    """The files as a program sees them now."""
    copy = disk_of({path: bytes(content.data) for path, content in disk.contents.items()})
    for folder in disk.folders:
        copy.make_folder(folder)
    copy.block_bytes, copy.reserves = disk.block_bytes, disk.reserves
    copy.protected = set(disk.protected)
    return copy
