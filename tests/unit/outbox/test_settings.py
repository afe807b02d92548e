"""Arguments of an outbox that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from keylane import ProducerSettings
from keylane.outbox import Outbox
from keylane.protocol.errors import ConfigError, InvalidRequestError


@pytest.mark.parametrize("settings", [{}, ProducerSettings(), "fast", False])
def test_outbox_refuses_settings_of_another_type(settings: Any):
    with pytest.raises(ConfigError, match="settings must be a OutboxSettings, not"):
        Outbox("127.0.0.1:1", "sqlite+aiosqlite://", settings=settings)


async def test_outbox_names_the_call_that_makes_bytes_of_a_text():
    outbox: Outbox[Any] = Outbox("127.0.0.1:1", "sqlite+aiosqlite://")
    with pytest.raises(
        InvalidRequestError, match=r"value must be bytes, not str: use value\.encode"
    ):
        outbox._build_row("orders", "text", b"", None)
    assert outbox._build_row("orders", b"v", "Zoë", None)["order_key"] == "Zoë".encode()
