"""The metaserver's settings: their sources, and the errors of impossible ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.metaserver.settings import (
    MetaserverSettings,
    metaserver_settings,
    prepare_folder,
    warning_about_flags,
)
from keylane.protocol.errors import ConfigError, DataFolderError


def test_settings_prefer_a_flag_to_the_file_to_the_default(tmp_path: Path) -> None:
    """A flag wins over the file, the file over the default."""
    file = tmp_path / "meta.toml"
    file.write_text('data = "/somewhere"\nport = 7100\npoll_ms = 250\n')
    settings = metaserver_settings({"port": 7200, "host": None}, file)
    assert settings == MetaserverSettings(data=Path("/somewhere"), port=7200, poll_ms=250)


def test_error_names_every_impossible_setting() -> None:
    """One error names every setting that cannot work."""
    bad = {
        "data": Path("x"),
        "port": 70_000,
        "poll_ms": "soon",
        "sessions_max": True,
        "database_url": "mysql://x",
        "host": "",
        "auto_create": "orders, events",
        "auto_create_partitions": 0,
    }
    with pytest.raises(ConfigError) as raised:
        metaserver_settings(bad)
    for name in bad.keys() - {"data"}:
        assert name in raised.value.message
    assert raised.value.problems == 7


def test_error_names_unknown_and_missing_settings() -> None:
    """A misspelt setting and a missing folder are both named."""
    with pytest.raises(
        ConfigError, match=r"prot: no such setting \(flag --prot\); data is missing"
    ):
        metaserver_settings({"prot": 1})
    with pytest.raises(ConfigError, match="data must be"):
        metaserver_settings({"data": 5})


@pytest.mark.parametrize(
    ("pattern", "subject", "creates"),
    [
        ("off", "off", False),
        ("off", "orders", False),
        ("*", "orders", True),
        ("events.*", "events.paid", True),
        ("events.*", "events", False),
        ("events.*", "Events.paid", False),
        ("day-?", "day-1", True),
        ("day-?", "day-12", False),
    ],
)
def test_pattern_decides_which_subjects_are_created(
    pattern: str, subject: str, creates: bool
) -> None:
    """`*` stands for any letters, `?` for one, and case counts."""
    settings = MetaserverSettings(data=Path("x"), auto_create=pattern)
    assert settings.creates(subject) is creates


def test_broker_ttl_is_refused_when_it_is_below_two_heartbeats() -> None:
    """A broker that reports less often than its ttl could never be available."""
    with pytest.raises(ConfigError, match="twice"):
        MetaserverSettings(data=Path("x"), broker_heartbeat_ms=1_000, broker_ttl_ms=1_500)


@pytest.mark.parametrize("text", [b"data = ", b"\xff\xfe"])
def test_settings_file_is_refused_when_it_is_no_toml(tmp_path: Path, text: bytes) -> None:
    """The error names the file."""
    file = tmp_path / "meta.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"meta\.toml"):
        metaserver_settings({}, file)
    with pytest.raises(ConfigError, match="missing"):
        metaserver_settings({}, tmp_path / "missing.toml")


def test_data_folder_is_refused_when_it_cannot_be_created(tmp_path: Path) -> None:
    """A data folder below a file is refused with the reason."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataFolderError, match="data folder"):
        prepare_folder(file / "data")
    assert prepare_folder(tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("rest", ["//", "///", "///:memory:"])
def test_database_url_is_refused_when_it_names_no_file(rest: str) -> None:
    """A database in memory would be another one for each connection."""
    with pytest.raises(ConfigError, match="must name a file"):
        MetaserverSettings(data=Path("x"), database_url=f"sqlite+aiosqlite:{rest}")


def test_settings_show_no_password_of_the_database() -> None:
    """As in a traceback, or in a log at DEBUG."""
    url = "postgresql+asyncpg://kl:secret@db/meta"
    settings = metaserver_settings({"data": Path("data"), "database_url": url})
    assert settings.database_url == url
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("postgresql+asyncpg://kl:secret@db/meta", True),
        ("postgresql+asyncpg://kl@db/meta?password=secret", True),
        ("postgresql+asyncpg://kl@db/meta", False),
        (None, False),
    ],
)
def test_warning_is_given_when_a_flag_has_a_password(url, warned):
    warning = warning_about_flags({"database_url": url, "data": "d"})
    assert bool(warning) is warned
    assert "secret" not in warning


def test_data_folder_that_is_a_file_is_refused_in_words(tmp_path: Path) -> None:
    """It said `[Errno 17] File exists`."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DataFolderError, match="as data folder: it is not a folder"):
        prepare_folder(file)


@pytest.mark.parametrize("text", ["7_000", "٧٠٠٠", "+7000", "7000\n", " 7000", "7e3"])
def test_number_of_the_environment_is_refused_when_it_is_more_than_digits(text: str) -> None:
    with pytest.raises(ConfigError, match="port"):
        metaserver_settings({"data": Path("m")}, environment={"KEYLANE_METASERVER_PORT": text})


@pytest.mark.parametrize("hosts", ["10.0.0.0/8,pod-1", "*", "fd00::/8", ""])
def test_hosts_of_scrapers_are_names_addresses_and_networks(hosts: str) -> None:
    environment = {"KEYLANE_METASERVER_METRICS_HOSTS": hosts} if hosts else {}
    settings = metaserver_settings({"data": Path("m")}, environment=environment)
    assert settings.metrics_hosts == tuple(hosts.split(",") if hosts else ())
    with pytest.raises(ConfigError, match="metrics_hosts"):
        metaserver_settings({"data": Path("m"), "metrics_hosts": ("10.0.0.1/8",)})
