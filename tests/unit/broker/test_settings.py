"""Settings: every problem is told at once, and the later source wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.broker.settings import BrokerSettings, broker_settings
from keylane.protocol.errors import ConfigError

GOOD = {"group": "g1", "data": "d", "meta": "127.0.0.1:7000"}


def test_settings_report_every_problem_at_once():
    """Wrong types, unknown names and impossible values are listed in one error."""
    with pytest.raises(ConfigError) as caught:
        broker_settings(
            {
                "group": "../x",
                "port": 70000,
                "colour": "red",
                "host": 3,
                "meta": "nowhere",
                "machine": "a b",
                "zone": "-",
            }
        )

    text = caught.value.message
    for part in (
        "group:",
        "kind=machine, name='a b'",
        "kind=zone, name='-'",
        "port must",
        "colour: no such",
        "host must",
        "nowhere",
        "data is missing",
    ):
        assert part in text
    assert caught.value.problems == 8


def test_flags_win_over_the_file(tmp_path):
    """A flag given replaces the file's value; one not given leaves it."""
    config = tmp_path / "broker.toml"
    config.write_text('group = "g2"\nport = 7100\nsegment_bytes = 65536\nmeta = ["127.0.0.1:1"]\n')

    settings = broker_settings({"group": "g1", "data": "d", "port": None, "meta": None}, config)

    assert settings == BrokerSettings(
        group="g1", data=Path("d"), meta=("127.0.0.1:1",), port=7100, segment_bytes=65536
    )


def test_metaserver_addresses_are_separated_by_commas():
    """Addresses are separated by commas."""
    settings = broker_settings(GOOD | {"meta": "127.0.0.1:7000, 127.0.0.1:7001"})
    assert settings.meta == ("127.0.0.1:7000", "127.0.0.1:7001")


@pytest.mark.parametrize("text", ["group = ", "\ufffd\x00", 'group = "g1"\nport = true\n'])
def test_unreadable_file_is_a_config_error(tmp_path, text):
    """A file that is no TOML, or has wrong types, is told by name."""
    config = tmp_path / "broker.toml"
    config.write_text(text)
    with pytest.raises(ConfigError):
        broker_settings({"data": "d", "meta": "127.0.0.1:7000"}, config)
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        broker_settings(GOOD, tmp_path / "missing.toml")


@pytest.mark.parametrize("change", [{"segment_bytes": 10}, {"queued_bytes_max": 1}, {"meta": ()}])
def test_values_out_of_range_are_refused(change):
    """A setting outside its range is refused when the settings are made, from the command line or
    in code.
    """
    values = {"group": "g1", "data": Path("d"), "meta": ("127.0.0.1:7000",)} | change
    with pytest.raises(ConfigError):
        BrokerSettings(**values)


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ({}, False),
        ({"access": "on", "token_file": "token"}, True),
        ({"access": "off", "host": "10.0.0.1", "insecure_network": True}, False),
    ],
)
def test_copy_serves_reads_only_where_nobody_needs_a_right(more, is_refused):
    given = {**GOOD, "follow": True, "serve_reads": True, **more}
    if not is_refused:
        assert broker_settings(given).serve_reads
        return
    with pytest.raises(ConfigError, match="serve_reads needs access = off"):
        broker_settings(given)
