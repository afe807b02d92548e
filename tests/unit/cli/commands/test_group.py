"""`keylane group` create, set, suspend and describe, as lines for people."""

from __future__ import annotations

import pytest

from keylane.cli.commands.group_description import settings_lines
from keylane.cli.main import app
from keylane.errors import ConfigError
from keylane.protocol.groups import (
    FailurePolicy,
    FullPolicy,
    GroupPolicy,
    GroupSettings,
    GroupStart,
    StartAt,
)


def test_settings_of_a_plain_group_are_two_lines():
    """Nothing is stored, nothing is suspended."""
    assert settings_lines(GroupSettings(subject="s", group="g")) == [
        "g on s: exclusive, began at earliest",
        "stored policy: none; each consumer uses its own settings",
    ]


def test_settings_name_what_is_stored_and_suspended():
    """Each in a line, and the partitions whose brokers lack the group or its start."""
    settings = GroupSettings(
        subject="s",
        group="g",
        policy=GroupPolicy(
            on_failure=FailurePolicy.PARK, tries_max=5, backoff_first_ms=1, backoff_max_ms=9
        ),
        start=GroupStart(at=StartAt.LATEST),
        unstarted=(3, 4),
        suspended=True,
        suspended_clients=("a", "b"),
    )
    assert settings_lines(settings) == [
        "g on s: exclusive, began at latest",
        "stored policy: on failure park, tries max 5, back-off 1 to 9 ms",
        "not every broker knows it and has stored its start yet (partition ids: 3, 4)",
        "suspended by an operator",
        "clients suspended by an operator: a, b",
    ]


@pytest.mark.parametrize(
    ("policy", "note"),
    [
        (GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=5, on_full=FullPolicy.DEAD), None),
        (GroupPolicy(backoff_first_ms=1, backoff_max_ms=9), None),
        (
            GroupPolicy(on_failure=FailurePolicy.BLOCK, tries_max=5),
            "tries max has no effect: block retries a failing message for ever",
        ),
        (GroupPolicy(tries_max=5), "tries max has no effect on consumers that block, the default"),
        (
            GroupPolicy(tries_max=5, on_full=FullPolicy.DEAD),
            "tries max and when full have no effect on consumers that block",
        ),
    ],
)
def test_setting_without_a_policy_that_uses_it_is_named(policy, note):
    lines = settings_lines(GroupSettings(subject="s", group="g", policy=policy))[2:]
    assert [line[: len(note or "")] for line in lines] == ([] if note is None else [note])


def test_group_is_not_created_at_an_offset():
    """An offset is another message in each partition; refused before anything is asked."""
    words = ["group", "create", "s", "g", "--start", "17", "--meta", "127.0.0.1:1"]
    with pytest.raises(ConfigError, match="earliest, latest or a time"):
        app(words, prog_name="keylane", standalone_mode=False)


@pytest.mark.parametrize(
    "words", [("create", "s", "g", "--start"), ("reset", "s", "g", "--live", "--yes", "--to")]
)
def test_group_is_neither_made_nor_reset_when_its_time_is_ahead(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
):
    """It is refused before anything is asked; a mistyped year skipped all messages."""
    line = ["group", *words, "2099-01-01T00:00:00", "--meta", "127.0.0.1:1"]
    assert app(line, prog_name="keylane", standalone_mode=False) == 1
    told = capfd.readouterr().err
    assert "2099-01-01T00:00:00.000+00:00 is in the future" in told
    assert "Give 'latest'" in told


def test_set_without_an_option_is_refused():
    """It would change nothing."""
    words = ["group", "set", "s", "g", "--meta", "127.0.0.1:1"]
    with pytest.raises(ConfigError, match="pass what to set"):
        app(words, prog_name="keylane", standalone_mode=False)
