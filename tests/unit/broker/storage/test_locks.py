"""Locks of data folders in file systems that are mounted read only: who only reads takes one all
the same.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keylane.broker.storage.files import RealFiles
from keylane.protocol.errors import DataFolderError


@pytest.fixture
def mounted_read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on no file is opened for writing, as in a mounted snapshot."""
    opened = os.open

    def refuse_writes(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, mode)

    return lambda: monkeypatch.setattr(os, "open", refuse_writes)


@pytest.fixture
def read_only(tmp_path: Path, mounted_read_only: Callable[[], None]) -> Path:
    """A folder that a broker has left."""
    files = RealFiles(tmp_path)
    files.lock()
    files.close()
    mounted_read_only()
    return tmp_path


def test_read_only_folder_is_locked_by_one_who_only_reads(read_only: Path):
    """Two of them may read it at once; a broker is refused there."""
    first, second, broker = RealFiles(read_only), RealFiles(read_only), RealFiles(read_only)
    first.lock_to_read()
    second.lock_to_read()
    with pytest.raises(DataFolderError, match="Read-only file system"):
        broker.lock()
    first.close()
    second.close()


def test_read_only_folder_without_a_lock_file_is_read(read_only: Path):
    """A backup may leave that file out."""
    (read_only / "lock").unlink()
    files = RealFiles(read_only)
    files.lock_to_read()
    files.close()
    assert os.listdir(read_only) == []


def test_read_only_folder_is_refused_while_a_broker_has_it_elsewhere(
    tmp_path: Path, mounted_read_only: Callable[[], None]
):
    """The folder may be mounted for writing at another place."""
    broker = RealFiles(tmp_path)
    broker.lock()
    mounted_read_only()
    with pytest.raises(DataFolderError, match="another broker is using"):
        RealFiles(tmp_path).lock_to_read()
    broker.close()


def test_folder_that_may_be_written_is_locked_as_by_a_broker(tmp_path: Path):
    reader, broker = RealFiles(tmp_path), RealFiles(tmp_path)
    reader.lock_to_read()
    with pytest.raises(DataFolderError, match="another broker is using"):
        broker.lock()
    reader.close()
    broker.lock()
    broker.close()
