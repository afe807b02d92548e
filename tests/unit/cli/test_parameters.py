"""Options and arguments that click gets from annotated parameters."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner, Result

from keylane.cli.groups import CommandGroup
from keylane.cli.main import app as keylane_app
from keylane.cli.parameters import Argument, Option


class Colour(enum.StrEnum):
    RED = "red"
    DEEP_BLUE = "deep-blue"


seen: dict[str, Any] = {}
said: list[str] = []


def _say_version() -> None:
    said.append("1.0")


def _app() -> CommandGroup:
    app = CommandGroup("app")
    app.add("other")(lambda: None)

    @app.add("paint")
    def paint(
        name: Annotated[str, Argument(metavar="NAME", help="Name of the wall.")],
        rest: Annotated[list[int] | None, Argument(min=1)] = None,
        *,
        layers: Annotated[int, Option(min=1, max=9, help="Layers of paint.")] = 2,
        pause: Annotated[float | None, Option("--pause-s", min=0.5)] = None,
        colour: Annotated[Colour, Option(help="Its colour.")] = Colour.RED,
        second: Annotated[Colour | None, Option()] = None,
        tag: Annotated[list[str] | None, Option("--tag", "-t")] = None,
        file: Annotated[Path, Option(envvar="APP_FILE")] = Path("here"),
        dry: Annotated[bool, Option("--dry/--wet")] = True,
    ) -> None:
        """
        Paint a wall,
        once.

        More of it.
        """
        seen.clear()
        seen.update(locals())

    return app


def ran(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(_app(), words, env=environment)


def test_command_gets_defaults_when_nothing_is_given():
    assert ran("paint", "wall").exit_code == 0
    expected: dict[str, Any] = {
        "name": "wall",
        "rest": None,
        "layers": 2,
        "pause": None,
        "colour": Colour.RED,
        "second": None,
        "tag": None,
        "file": Path("here"),
        "dry": True,
    }
    assert seen == expected
    assert isinstance(seen["colour"], Colour)
    assert isinstance(seen["file"], Path)


def test_command_gets_values_of_their_types():
    words = ["wall", "3", "4", "--layers", "9", "--pause-s", "0.5", "--colour", "deep-blue"]
    more = ["--second", "red", "-t", "a", "--tag", "b", "--wet"]
    assert ran("paint", *words, *more, APP_FILE="there").exit_code == 0
    expected: dict[str, Any] = {
        "name": "wall",
        "rest": [3, 4],
        "layers": 9,
        "pause": 0.5,
        "colour": Colour.DEEP_BLUE,
        "second": Colour.RED,
        "tag": ["a", "b"],
        "file": Path("there"),
        "dry": False,
    }
    assert seen == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing argument 'NAME'."),
        (("w", "0"), "0 is not in the range 1.."),
        (("w", "--layers", "10"), "10 is not in the range 1..9"),
        (("w", "--layers", "1_0"), "'1_0' is not a number"),
        (("w", "--layers", "٣"), "'٣' is not a number"),
        (("w", "--pause-s", "nan"), "'nan' is not a number"),
        (("w", "--pause-s", "0.4"), "0.4 is not in the range 0.5.."),
        (("w", "--colour", "RED"), "'RED' is not one of 'red', 'deep-blue'"),
        (("w", "--colours", "red"), "No such option"),
    ],
)
def test_command_is_refused_when_a_value_is_wrong(words, message):
    done = ran("paint", *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    "words",
    [
        ("paint", "w", "--layers", "1", "--layers", "2"),
        ("paint", "w", "--layers=2", "--layers=2"),
        ("paint", "--layers", "1", "w", "--layers", "2", "--layers", "3"),
    ],
)
def test_option_is_refused_when_it_is_given_twice_and_takes_one_value(words: tuple[str, ...]):
    """The first one was left out without a word."""
    done = ran(*words)
    assert done.exit_code == 2
    assert "Error: --layers is given twice: it takes one value." in done.output


def test_option_of_two_names_is_one_option_when_both_are_given():
    with pytest.raises(click.UsageError, match="--profile is given twice: it takes one value"):
        keylane_app.main(["-p", "a", "--profile", "b", "subject", "list"], standalone_mode=False)


def test_option_is_accepted_when_it_is_a_repeated_flag_or_comes_after_the_last_option():
    assert ran("paint", "w", "--dry", "--dry").exit_code == 0
    assert ran("paint", "w", "--layers", "2", "--", "3").exit_code == 0
    assert (seen["layers"], seen["rest"]) == (2, [3])


def test_help_shows_arguments_ranges_defaults_and_variables():
    text = " ".join(ran("paint", "--help").output.split())
    for part in (
        "Usage: app paint [OPTIONS] NAME [REST]...",
        "Paint a wall, once. More of it.",
        "NAME Name of the wall.",
        "--layers 1..9 Layers of paint. [default: 2]",
        "--colour [red|deep-blue] Its colour. [default: red]",
        "[env var: APP_FILE; default: here]",
    ):
        assert part in text
    assert text.count("Name of the wall.") == 1


def test_help_of_a_group_shows_the_first_paragraph_of_each_command():
    text = ran("--help").output
    assert "  other\n  paint  Paint a wall, once.\n" in text.replace("  other  \n", "  other\n")


def test_unknown_command_names_similar_ones():
    assert "No such command 'pain'. Did you mean 'paint'?" in ran("pain").output
    assert "No such command 'xyz'.\n" in ran("xyz").output


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("topic list", "subject"),
        ("send orders v", "produce"),
        ("subject show orders", "subject describe"),
        ("profile use prod", "-p NAME …"),
    ],
)
def test_unknown_command_of_another_system_names_ours(words: str, ours: str):
    done = CliRunner().invoke(keylane_app, words.split(), prog_name="keylane")
    assert done.exit_code == 2
    assert f"': in keylane it is `keylane {ours}`." in done.output


def test_flag_that_acts_at_once_leaves_out_the_rest():
    app = CommandGroup("app")

    @app.add("work")
    def work(
        name: Annotated[str, Argument()],
        *,
        version: Annotated[bool, Option("--version", at_once=_say_version)] = False,
    ) -> None:
        said.append(name)

    assert CliRunner().invoke(app, ["work", "--version"]).exit_code == 0
    assert said == ["1.0"]


def test_command_gets_the_context_when_it_asks_for_it():
    app = CommandGroup("app")

    @app.add("work", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def work(context: click.Context) -> None:
        print(context.args)

    assert CliRunner().invoke(app, ["work", "--further", "1"]).output == "['--further', '1']\n"
