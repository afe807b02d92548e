"""What an outbox is given: refused before a row is added, with the advice of a producer."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane import JsonCodec, Producer
from keylane.outbox import Outbox
from keylane.protocol.errors import InvalidRequestError, Reason
from support.raising import raises

META = "127.0.0.1:1"


@pytest.fixture
def engine():
    engine = sa.create_engine("sqlite://")
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"value": "v"}, "value must be bytes, not str: use value.encode()"),
        ({"value": bytearray(b"v")}, "value must be bytes, not bytearray: use bytes(value)"),
        ({"value": memoryview(b"v")}, "value must be bytes, not memoryview: use bytes(value)"),
        ({"value": {"a": 1}}, "codec=JsonCodec()"),
        ({"key": "\udcff"}, "key is not a text that UTF-8 has: "),
        ({"key": None}, "leave it out for a message without a key"),
    ],
)
def test_row_of_other_values_than_bytes_is_refused_with_advice(engine, given: Any, advice: str):
    outbox: Outbox[Any] = Outbox(META, engine)
    with engine.connect() as connection:
        with pytest.raises(InvalidRequestError) as refused:
            outbox.add_sync(connection, **{"subject": "orders", "value": b"v", **given})
    assert advice in refused.value.message


@pytest.mark.parametrize("subject", [5, None, b"orders", "a b", ""])
def test_codec_of_what_is_no_subject_is_refused(engine, subject: Any):
    """It was never used, and values went without it."""
    codec: Any = {subject: JsonCodec()}
    for make in (lambda: Outbox(META, engine, codec=codec), lambda: Producer(META, codec=codec)):
        with raises(Reason.NAME_INVALID, match="illegal name"):
            make()


def test_outbox_shows_where_it_is_and_no_secret():
    url, token = "sqlite:////tmp/secret/o.db", "kl_" + "s" * 43
    shown = repr(Outbox(META, url, token=token))
    assert shown == f"<Outbox at {META}, closed>"
