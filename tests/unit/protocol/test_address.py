"""Addresses of metaservers as users give them: to a producer, a consumer, a reader or the command line."""

import pytest

from keylane import Consumer, Producer
from keylane.consumer import QueueReader
from keylane.protocol.address import addresses_of
from keylane.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("meta", "addresses"),
    [
        ("a:1", ["a:1"]),
        ("a:1,b:2", ["a:1", "b:2"]),
        (" a:1, b:2,", ["a:1", "b:2"]),
        (["a:1", "b:2"], ["a:1", "b:2"]),
        (("a:1,b:2", "c:3"), ["a:1", "b:2", "c:3"]),
    ],
)
def test_several_addresses_are_taken_in_a_list_or_with_commas(meta, addresses):
    """A text with commas is what the command line and KEYLANE_META take."""
    assert addresses_of(meta) == addresses


@pytest.mark.parametrize(
    "meta", ["", ",", " , ", [], [""], ["a:1", ""], None, 7, ["a:1", 7], b"a:1"]
)
def test_no_address_is_refused_when_a_client_is_made(meta):
    """Before anything is opened, and for every client."""
    for make in (
        lambda: Producer(meta),
        lambda: Consumer(meta, subject="s", group="g"),
        lambda: QueueReader(meta, subject="s"),
    ):
        with pytest.raises(ConfigError, match="meta is host:port"):
            make()
