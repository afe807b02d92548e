"""SIGHUP: a running program applies what may change, and nothing from an invalid file."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest

from keylane.protocol.errors import ConfigError
from keylane.rpc.operating.reloading import ReloadableSettings


@dataclass(frozen=True)
class ReloadedSettings:
    port: int = 1
    retention_ms: int = 10
    log_level: str = "WARNING"


@pytest.fixture
def adopted():
    level = logging.getLogger("keylane").level
    yield []
    logging.getLogger("keylane").setLevel(level)


def test_reload_takes_over_what_is_allowed_and_names_the_rest(adopted, caplog):
    """Other settings need a restart."""
    read = lambda: ReloadedSettings(port=2, retention_ms=20, log_level="INFO")  # noqa: E731
    reloading = ReloadableSettings(
        ReloadedSettings(), read, {"retention_ms", "log_level"}, adopted.append
    )
    reloading.reload()
    assert adopted == [ReloadedSettings(port=1, retention_ms=20, log_level="INFO")]
    assert logging.getLogger("keylane").level == logging.INFO
    assert "settings reloaded: log_level, retention_ms" in caplog.text
    assert "these settings need a restart: port" in caplog.text


def test_reload_warns_of_nothing_when_no_setting_has_changed(adopted, caplog):
    """SIGHUP also announces replaced certificates."""
    reloading = ReloadableSettings(ReloadedSettings(), ReloadedSettings, {"port"}, adopted.append)
    with caplog.at_level(logging.INFO, logger="keylane"):
        reloading.reload()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert adopted == [ReloadedSettings()]


def test_reload_changes_nothing_when_a_setting_is_impossible(adopted, caplog):
    """The error is logged."""

    def read():
        raise ConfigError("retention_ms must be a whole number")

    before = ReloadedSettings()
    reloading = ReloadableSettings(before, read, {"retention_ms"}, adopted.append)
    reloading.reload()
    assert adopted == []
    assert reloading.settings == replace(before)
    assert "retention_ms must be" in caplog.text
