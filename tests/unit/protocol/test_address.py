"""Addresses of metaservers as users give them: to a producer, a consumer, a reader or the command
line.
"""

from typing import Any

import pytest

from keylane import Consumer, Producer
from keylane.consumer import QueueReader
from keylane.protocol.address import parse_address, parse_addresses
from keylane.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("meta", "addresses"),
    [
        ("a:1", ["a:1"]),
        ("a:1,b:2", ["a:1", "b:2"]),
        (" a:1, b:2,", ["a:1", "b:2"]),
        (["a:1", "b:2"], ["a:1", "b:2"]),
        (("a:1,b:2", "c:3"), ["a:1", "b:2", "c:3"]),
        ("[::1]:65535,127.0.0.1:7000", ["[::1]:65535", "127.0.0.1:7000"]),
    ],
)
def test_several_addresses_are_taken_in_a_list_or_with_commas(meta, addresses):
    """A text with commas is what the command line and KEYLANE_META take."""
    assert parse_addresses(meta) == addresses


@pytest.mark.parametrize(
    "meta",
    [
        "",
        ",",
        " , ",
        [],
        [""],
        ["a:1", ""],
        None,
        7,
        ["a:1", 7],
        b"a:1",
        "nohost",
        "a:1,nohost",
        "a:x",
    ],
)
def test_client_refuses_meta_that_is_no_address_before_anything_is_opened(meta):
    for make in (
        lambda: Producer(meta),
        lambda: Consumer(meta, subject="s", group="g"),
        lambda: QueueReader(meta, subject="s"),
    ):
        with pytest.raises(ConfigError, match="an address is host:port"):
            make()


@pytest.mark.parametrize("make", [Producer, Consumer])
def test_client_says_what_to_give_when_meta_is_a_dictionary_of_settings(make: Any):
    with pytest.raises(
        ConfigError, match=r"give the addresses of metaservers, .* not a dictionary"
    ):
        make({"bootstrap.servers": "127.0.0.1:7000"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a:1", ("a", 1)), ("127.0.0.1:7000", ("127.0.0.1", 7000)), ("[::1]:65535", ("::1", 65535))],
)
def test_parse_address_gives_host_and_port(text, parts):
    assert parse_address(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "host",
            "host:",
            ":7000",
            "host:0",
            "host:65536",
            "host:7000000000",
            "host:x",
            "host:-1",
        ),
        *("http://h:1", "h/a:1", "u@h:1", "h h:1", "::1:7000", "[h]:1", "host:1\n", "host:\u0661"),
    ],
)
def test_parse_address_raises_when_text_is_not_host_and_port(text):
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "h:0"])
def test_port_out_of_range_is_refused_with_the_range(address: str):
    with pytest.raises(ConfigError, match=f"not '{address}': a port is 1 to 65535"):
        parse_address(address)
