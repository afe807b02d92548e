"""A template of --output makes one line of each row, or says which fields there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import click
import msgspec
import pytest
from click.testing import CliRunner

from keylane.cli.fields import Fields
from keylane.cli.groups import Command
from keylane.cli.main import app
from keylane.cli.template import Template
from keylane.errors import ConfigError
from keylane.protocol.errors import Fate

WITHOUT_OUTPUT = {
    ("broker", "run"): "a server: it has a log, and announces in JSON that it is ready",
    ("metaserver", "run"): "a server: it has a log, and announces in JSON that it is ready",
    ("top",): "a screen; without a terminal it names the commands that list the same",
}
"""Commands without --output, and why."""


class Progress(msgspec.Struct):
    partition_id: int
    owner: str | None = None
    groups: tuple[str, ...] = ()


@dataclass
class Description:
    group: str
    partitions: list[Progress]
    resets: list[Progress]


GROUP = Description("billing", [Progress(1, "a"), Progress(2, None, ("x", "y"))], [Progress(9)])


@pytest.mark.parametrize(
    ("text", "value", "lines"),
    [
        ("{subject} {n}", [{"subject": "a", "n": 1}, {"subject": "b"}], ["a 1", "b -"]),
        ("{subject}", {"subject": "a\n"}, [r"a\n"]),
        ("{group}: {partitions.partition_id}", GROUP, ["billing: 1", "billing: 2"]),
        ("{partitions.owner}{{}}", GROUP, ["a{}", "-{}"]),
        ("{resets}", GROUP, ['[{"partition_id":9,"owner":null,"groups":[]}]']),
        ("{a.b} {flag}", {"a": {"b": 1.5}, "flag": True}, ["1.5 true"]),
        ("{a.b.c}", {"a": [{"b": [{"c": 1}, {"c": 2}]}, {"b": [{"c": 3}]}]}, ["1", "2", "3"]),
        ("{key}", [{"key": "k"}, {"key_base64": b"\xff"}], ["k", r"\\xff"[1:]]),
        ("{failure.kind}", [{"failure": None}], ["-"]),
    ],
)
def test_template_makes_a_line_of_each_row(text, value, lines):
    assert Template(text).lines(value) == lines


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{nope}", r"no field {nope}; the fields are {group}, {partitions.groups}, {partitions.ow"),
        ("{partitions.nope}", "no field {partitions.nope}"),
        ("{partitions.owner} {resets.owner}", "partitions and resets are two lists"),
        ("{group!r}", "a field is only a name"),
        ("{group:>9}", "a field is only a name"),
        ("{group", "expected '}'"),
        ("yaml", "give table, json, or a template such as '{subject} {partitions}'"),
        ("", "give table, json, or a template"),
    ],
)
def test_template_says_what_is_wrong(text, problem):
    with pytest.raises(ConfigError, match="--output") as caught:
        Template(text).check(Fields.of(Description))
    assert problem in caught.value.message


class Key(TypedDict, total=False):
    key: str | None
    key_base64: bytes
    properties: dict[str, str]


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        (Description, "group partitions.groups partitions.owner resets.partition_id"),
        (list[Progress] | None, "groups owner partition_id"),
        (Key, "key properties"),
        (Progress | Key, "groups key owner partition_id properties"),
        (dict[str, Progress], ""),
    ],
)
def test_fields_come_from_the_type(kind, paths):
    found = set(Fields.of(kind).paths())
    assert set(paths.split()) <= found
    assert kind is Description or found == set(paths.split())


@pytest.mark.parametrize(
    "text", ["{properties.any name}", "{key_base64}", "{key}{properties}", "{key} {key}"]
)
def test_template_may_name_what_only_some_rows_have(text):
    Template(text).check(Fields.of(list[Key]))


WITHOUT_FIELDS = {
    ("broker", "run"),
    ("metaserver", "run"),
    ("top",),
    ("access", "grant"),
    ("access", "revoke"),
    ("access", "quota", "set"),
    ("access", "quota", "unset"),
}
"""The first three have no --output; the others show an empty object."""


def test_every_command_says_which_fields_it_shows():
    for path, command in commands(app):
        assert isinstance(command, Command)
        fields = command.fields
        assert bool(fields.names or fields.is_open) is (path not in WITHOUT_FIELDS), path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "parked redrive orders billing --all-keys --yes -o {mesages}",
            "did you mean {redriven.mess",
        ),
        ("dead skip orders billing --yes -o {wrong}", "the fields are {partition_ids}, {skipped}"),
        ("subject resize orders --partitions 6 -o {childs.name}", "{children.name}"),
        ("group describe orders billing -o {lagg}", "did you mean {lag}"),
        ("group describe orders billing -o {owner}", "did you mean {partitions.owner}?"),
        ("access grant billing read -o {principal}", "there are no fields"),
        ("profile list -o {}", "the fields are {meta}, {name}, {tls_ca}, {token_file}"),
    ],
)
def test_wrong_field_is_refused_before_the_command_does_anything(words, said):
    """There is no metaserver, and the command does not find out."""
    done = CliRunner().invoke(app, words.split(), env={"KEYLANE_META": "127.0.0.1:1"})
    assert isinstance(done.exception, ConfigError)
    assert said in done.exception.message
    assert done.exception.fate is Fate.NOT_DONE


def test_fields_are_listed_once():
    """A receipt and a scheduled receipt have some of the same."""
    done = CliRunner().invoke(app, ["produce", "orders", "paid", "-o", "{}"])
    assert str(done.exception).count("{durable}") == 1
    assert "{line}" in str(done.exception)


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def test_every_command_but_a_server_has_the_same_output_option():
    """One flag, one meaning: --output table|json|TEMPLATE; --format is the form of an input."""
    names, without = set(), set()
    for path, command in commands(app):
        names.add(path)
        options = {name: each for each in command.params for name in each.opts}
        assert not {"--json", "--template"} & options.keys(), path
        assert "--format" not in options or path == ("produce",), path
        if "--output" not in options:
            without.add(path)
            continue
        output = options["--output"]
        assert options["-o"] is output
        assert (output.metavar, str(output.default)) == ("table|json|TEMPLATE", "table"), path
    assert without == WITHOUT_OUTPUT.keys()
    assert len(names) > 60
    assert {("subject", "list"), ("group", "describe"), ("broker", "index", "verify")} <= names


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("subject list -p prod", "keylane -p NAME"),
        ("consume orders --format json", "--output json"),
        ("produce orders --json", "produce --format"),
        ("consume orders --json", "--output json prints JSON"),
        ("produce orders --bootstrap-server a:1", "--meta HOST:PORT"),
        ("produce orders v --property a=b", "--header NAME=VALUE"),
        ("--meta a:1 subject list", "keylane subject list --meta HOST:PORT"),
        ("group reset orders billing --to-earliest", "it is --to earliest"),
        ("subject create orders --replication-factor 3", "keylane broker copies GROUP"),
    ],
)
def test_option_of_another_place_or_system_gets_a_hint(words, hint):
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert hint in " ".join(done.output.replace("│", " ").split())
