"""The URL of the outbox's database, where it cannot be read."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import ConfigError
from keylane.user_database.transactions import UserDatabase


def test_url_without_a_port_is_refused_and_tells_no_part_of_its_password():
    """A password with an unescaped @ and : looks like a host with a port."""
    with pytest.raises(ConfigError) as refused:
        UserDatabase("sqlite://kl:a@b:secret@db/shop", lambda _error: None)
    assert "%40" in refused.value.message
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__
