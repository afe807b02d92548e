"""Which tokens a broker takes itself is kept for its next start."""

from __future__ import annotations

from keylane.broker.storage.data_folder import OPERATORS_PATH as PATH
from keylane.broker.storage.data_folder import read_operators, save_operators
from keylane.testing.machines.disk import SimDisk


def test_operators_are_kept_as_they_are_written() -> None:
    disk = SimDisk()
    assert read_operators(disk) == {}
    save_operators(disk, {"3b4e": "admin"})
    assert disk.pread(PATH, 0, 1_000) == b'{"format":1,"operators":{"3b4e":"admin"}}\n'
    save_operators(disk, {"9c01": "cluster"})
    assert read_operators(disk) == {"9c01": "cluster"}


def test_operators_are_none_when_their_file_is_damaged() -> None:
    disk = SimDisk()
    disk.open_append(PATH).append([b'{"format":1,"oper'])
    assert read_operators(disk) == {}
