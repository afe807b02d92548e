"""Profiles of clusters, and what a shell completes."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from keylane.cli.completion import (
    WAIT_S_MIN,
    complete_profile,
    complete_subject,
    remaining_wait_s,
)
from keylane.cli.main import app
from keylane.cli.profiles import VARIABLES, Profile, profiles_file, read_profiles, use_profile
from keylane.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in (*VARIABLES.values(), "KEYLANE_PROFILE"):
        monkeypatch.setenv(variable, "before")
        monkeypatch.delenv(variable)
    return tmp_path


def ran(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words, catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_profile_is_kept_until_it_is_removed(home: Path):
    token = home / "token"
    token.write_text("kl_1")
    added = ran("profile", "add", 'my "prod"', "--meta", "a:1,b:2", "--token-file", str(token))
    assert added[0] == 0
    assert ran("profile", "add", "dev", "--meta", "127.0.0.1:7000")[0] == 0
    assert read_profiles(profiles_file()) == {
        'my "prod"': Profile("a:1,b:2", str(token)),
        "dev": Profile("127.0.0.1:7000"),
    }
    assert profiles_file().stat().st_mode & 0o077 == 0
    listed = ran("profile", "list")[1]
    assert listed.startswith("2 profiles\n")
    assert "127.0.0.1:7000" in listed
    assert ran("profile", "remove", "dev")[0] == 0
    assert list(read_profiles(profiles_file())) == ['my "prod"']
    assert ran("profile", "add", "\N{ROCKET}", "--meta", "a:1")[0] == 0
    assert "\N{ROCKET}" in read_profiles(profiles_file())


def test_list_says_how_to_add_the_first_profile():
    assert ran("profile", "list") == (
        0,
        "no profiles; add one with: keylane profile add NAME --meta HOST:PORT\n",
    )
    assert ran("profile", "list", "-o", "json") == (0, "[]\n")


def test_profile_is_completed(home: Path):
    for name in ("prod", "preview", "dev"):
        ran("profile", "add", name, "--meta", "a:1")
    assert complete_profile(click.Context(app), app.params[0], "pr") == ["preview", "prod"]
    (home / "keylane" / "profiles.toml").write_text("no toml")
    assert complete_profile(click.Context(app), app.params[0], "") == []


def test_profile_replaces_the_environment_when_it_is_used(monkeypatch: pytest.MonkeyPatch):
    """A token of another cluster does not go to this one."""
    monkeypatch.setenv("KEYLANE_META", "other:1")
    monkeypatch.setenv("KEYLANE_TOKEN_FILE", "/other/token")
    monkeypatch.setenv("KEYLANE_TOKEN", "kl_other")
    ran("profile", "add", "dev", "--meta", "here:7000")
    use_profile("dev")
    assert os.environ["KEYLANE_META"] == "here:7000"
    assert not {"KEYLANE_TOKEN_FILE", "KEYLANE_TOKEN"} & os.environ.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-p", "prod", "subject", "list"), "there is no profile 'prod'"),
        (("profile", "remove", "prod"), "there is no profile 'prod'"),
        (("profile", "add", "x", "--meta", "nowhere"), "host:port"),
        (("profile", "add", "a\x7fb", "--meta", "a:1"), "printable"),
        (("profile", "add", "x", "--meta", "a:1", "--tls-ca", "/none"), "/none cannot be read"),
    ],
)
def test_profile_is_refused_when_it_leads_nowhere(words: tuple[str, ...], message: str):
    status, text = ran(*words)
    assert status == 1
    assert message in text
    assert not profiles_file().exists()


@pytest.mark.parametrize("text", ["[dev", '[dev]\nport = "1"\n', "[dev]\n"])
def test_profiles_are_refused_when_their_file_is_damaged(text: str):
    file = profiles_file()
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profiles(file)


def test_completion_gives_up_soon_when_no_metaserver_answers(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KEYLANE_META", f"127.0.0.1:{silent.getsockname()[1]}")
        context = click.Context(app)
        context.params["meta"] = "127.0.0.1:1"
        began = time.monotonic()
        assert complete_subject(context, context.command.params[0], "o") == []
        assert time.monotonic() - began < 5


def test_completion_waits_less_when_the_command_started_slowly():
    assert remaining_wait_s(0.2) == pytest.approx(0.25)
    assert remaining_wait_s(0.3) == pytest.approx(0.15)
    assert remaining_wait_s(0.4) == remaining_wait_s(2.0) == WAIT_S_MIN


def test_command_of_another_system_names_ours():
    status, text = ran("topic", "create", "orders")
    assert status == 2
    assert "keylane subject" in text
