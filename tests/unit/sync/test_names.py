"""What `keylane.sync` has not: it says where that is."""

from __future__ import annotations

import pytest

import keylane
import keylane.sync


@pytest.mark.parametrize("name", ["Admin", "QueueReader", "Reader"])
def test_import_of_a_client_without_a_sync_one_says_what_to_do(name: str):
    assert hasattr(keylane, name)
    with pytest.raises(ImportError, match=rf"keylane\.{name} in an async def.*asyncio\.run"):
        exec(f"from keylane.sync import {name}")


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(keylane.sync, "Foo")
