"""A database that cannot be opened because the process has too many files open."""

from __future__ import annotations

import os
import resource

import pytest
from sqlalchemy.engine import URL

from keylane.broker.storage.files import RealFiles
from keylane.metaserver.sql.transactions import storage_error
from keylane.protocol.errors import DataFolderError, StorageError


@pytest.fixture
def no_file_left(tmp_path):
    """As with a low `ulimit -n`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(2)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


UNABLE = OSError("unable to open database file")
URL_OF_FILE = URL.create("sqlite", database="/data/meta.db")


def test_database_error_names_the_limit_of_open_files_when_it_is_reached(no_file_left):
    """SQLite says only that it is unable to open the file, and the advice was to give another
    folder.
    """
    error = storage_error(UNABLE, URL_OF_FILE)
    assert not isinstance(error, DataFolderError)
    assert "too many open files" in error.message
    assert "LimitNOFILE" in error.hint


def test_database_error_names_the_folder_when_more_files_may_be_open():
    """The folder is missing, or of another user."""
    assert isinstance(storage_error(UNABLE, URL_OF_FILE), DataFolderError)


def test_broker_error_names_the_limit_of_open_files_when_it_is_reached(no_file_left, tmp_path):
    """A broker said that it cannot write in its folder."""
    with pytest.raises(StorageError, match="too many open files") as caught:
        RealFiles(str(tmp_path)).lock()
    assert not isinstance(caught.value, DataFolderError)
    assert "LimitNOFILE" in caught.value.hint
