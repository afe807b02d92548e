"""The reader of a program's settings: a TOML file, then flags, and every problem in one error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from keylane.protocol.errors import ConfigError
from keylane.protocol.settings import range_problems
from keylane.rpc.settings import SettingSources


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    data: Path
    meta: tuple[str, ...] = ()
    port: int = 7


def problems_of(values):
    return range_problems(values, {"port": (0, 9)})


SOURCES = SettingSources("program", ProgramSettings, problems_of)


def read(flags, config=None, environment=None):
    return SOURCES.read(flags, config, environment)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    """A flag that is None was not given."""
    config = tmp_path / "program.toml"
    config.write_text('data = "there"\nport = 3\nmeta = ["a:1", "b:2"]\n')
    expected = ProgramSettings(data=Path("here"), port=3, meta=("a:1", "b:2"))
    assert read({"data": Path("here"), "port": None}, config) == expected
    assert read({"data": "here"}) == ProgramSettings(data=Path("here"))


def test_settings_take_lists_as_text_with_commas():
    """As command lines give them."""
    assert read({"data": "d", "meta": "a:1, b:2"}).meta == ("a:1", "b:2")


def test_repeated_flag_of_a_list_adds_to_it():
    """A broker that was given two metaservers so had only the last one, and nothing said so."""
    parser = SOURCES.parser("program", "")
    flags = vars(parser.parse_args(["--data", "d", "--meta", "a:1", "--meta", "b:2,c:3"]))
    flags.pop("config")
    assert read(flags).meta == ("a:1", "b:2", "c:3")


def test_error_tells_every_problem():
    """Unknown names, missing ones and impossible values; the error counts them."""
    with pytest.raises(ConfigError) as raised:
        read({"prot": 1, "port": 10})
    text = (
        "prot: no such setting (flag --prot); data is missing; port must be a whole number from 0 "
        "to 9, not 10"
    )
    assert raised.value.message == text
    assert raised.value.problems == 3


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", None])
def test_file_is_refused_when_it_cannot_be_read(tmp_path, content):
    """The error names the file, in its text and as a detail."""
    config = tmp_path / "program.toml"
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*program\.toml") as raised:
        read({}, config)
    assert raised.value.path == str(config)


def test_environment_wins_over_the_file_and_flags_over_the_environment(tmp_path):
    """Each value tells its origin."""
    config = tmp_path / "host.toml"
    config.write_text('[program]\ndata = "there"\nport = 3\n[other]\nport = 4\n')
    environment = {"KEYLANE_PROGRAM_PORT": "5", "KEYLANE_PROGRAM_META": "a:1,b:2", "HOME": "/"}
    assert read({}, config, environment) == ProgramSettings(
        data=Path("there"), port=5, meta=("a:1", "b:2")
    )
    told = SOURCES.explain({"port": 6}, None, environment | {"KEYLANE_CONFIG": str(config)})
    assert [(setting.name, setting.value, setting.origin) for setting in told] == [
        ("data", Path("there"), f"file {config}"),
        ("meta", ("a:1", "b:2"), "environment KEYLANE_PROGRAM_META"),
        ("port", 6, "flag --port"),
    ]


def test_mistakes_of_all_sources_are_told_at_once(tmp_path):
    """Each problem names its origin."""
    config = tmp_path / "host.toml"
    config.write_text("prot = 3\n")
    with pytest.raises(ConfigError) as raised:
        read(
            {"colour": "red"}, config, {"KEYLANE_PROGRAM_PORT": "many", "KEYLANE_PROGRAM_SIZE": "1"}
        )
    assert raised.value.message == (
        f"prot: no such setting (file {config}); size: no such setting (environment "
        f"KEYLANE_PROGRAM_SIZE); "
        "colour: no such setting (flag --colour); data is missing; "
        "port must be a whole number from 0 to 9, not 'many'"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [("[other]\nport = 1\n", "no table"), ("port = 1\n[program]\n", "beside tables")],
)
def test_file_of_several_programs_is_refused_without_the_table(tmp_path, content, problem):
    """Settings of another program are ignored."""
    config = tmp_path / "host.toml"
    config.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read({}, config)


def test_help_shows_no_default_when_a_list_is_empty_by_default():
    """`--metrics-hosts` had "(())" behind its text."""
    text = SOURCES.parser("program", "").format_help()
    assert "(())" not in text
    assert "(7)" in text


def test_parser_has_a_flag_for_each_setting():
    """Flags that are not given are None."""
    given = vars(SOURCES.parser("program", "").parse_args(["--port", "3", "--meta", "a:1"]))
    assert given == {"data": None, "meta": "a:1", "port": 3, "config": None}
