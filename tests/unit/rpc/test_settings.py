"""The reader of a program's settings: a TOML file, then flags, and every problem in one error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from keylane.protocol.errors import ConfigError
from keylane.protocol.settings import range_problems
from keylane.rpc.settings import read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    data: Path
    meta: tuple[str, ...] = ()
    port: int = 7


def problems_of(values):
    return range_problems(values, {"port": (0, 9)})


def read(flags, config=None):
    return read_settings(ProgramSettings, flags, config, problems_of=problems_of)


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


def test_error_tells_every_problem():
    """Unknown names, missing ones and impossible values; the error counts them."""
    with pytest.raises(ConfigError) as raised:
        read({"prot": 1, "port": 10})
    text = "prot: no such setting; data is missing; port must be a whole number from 0 to 9, not 10"
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
