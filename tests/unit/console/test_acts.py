"""The command beside a button is one that the command line understands, and quotes what it must."""

import shlex

import click
import pytest

from keylane.cli.main import app
from keylane.console.acts.act import command_text, number_of, numbers_of, option
from keylane.console.acts.table import ACTS
from keylane.protocol.errors import InvalidRequestError

VALUES = {
    "subject": "orders",
    "group": "billing",
    "broker": "g1",
    "partitions": "6",
    "queues": "6",
    "partition": "3",
    "to": "g2",
    "order_strategy": "best_tried",
    "retention": "time",
    "static": "",
    "force": "on",
    "id": "7",
    "start": "-1h",
    "strategy": "shared",
    "client": "it's a; $(client)",
    "live": "on",
    "on_failure": "park",
    "on_full": "dead",
    "tries_max": "3",
    "forget": "on",
    "key_hex": "00ff",
    "error": "--no price",
    "first": "2",
    "offset": "5",
    "value": "-{}\n'\"",
    "without_source": "on",
    "accept_loss": "on",
    "principal": "shop",
    "label": "what uses it",
    "ends": "2030-01-01",
    "right": "produce",
    "consumer_group": "bill*",
    "name": "shop",
    "bytes_per_s": "5",
    "requests_per_s": "6",
    "connections": "7",
    "sessions": "8",
    "for_subjects": "",
}
FULL = {"redrive": {"all": ""}, "group-reset": {"to": "-1h"}}


def parsed(words: list[str]) -> dict[str, object]:
    """The arguments of a command, as the command line understands them; nothing is run."""
    command: click.Command = app
    context = command.make_context("keylane", list(words), resilient_parsing=False)
    while isinstance(command, click.Group):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context.params


@pytest.mark.parametrize("name", ACTS)
def test_command_of_an_act_is_understood_by_the_command_line(name):
    given = {each.name: VALUES.get(each.name, "") for each in ACTS[name].fields}
    given |= FULL.get(name, {})
    words = ACTS[name].command(given)
    params = parsed(words)
    assert shlex.split(command_text(words)) == ["keylane", *words]
    texts = str(params)
    for field in ACTS[name].fields:
        value = given[field.name]
        if field.kind in {"text", "area"} and value and value != "*":
            assert repr(value)[1:-1] in texts or value in texts, field.name


@pytest.mark.parametrize("name", ACTS)
def test_command_of_an_empty_form_is_text(name):
    act = ACTS[name]
    empty = {each.name: "" for each in act.fields}
    assert command_text(act.command(empty)).startswith("keylane ")
    assert act.back(empty).startswith("/console")


def test_acts_that_destroy_ask_for_a_name_of_their_form():
    for name, act in ACTS.items():
        if act.typed:
            assert act.typed in {each.name for each in act.fields}, name
    assert {name for name, act in ACTS.items() if act.typed} >= {
        *("subject-delete", "group-delete", "group-reset", "skip", "evacuate", "token-revoke")
    }


def test_value_that_looks_like_an_option_is_none():
    assert option("--to", "-1h") == ["--to=-1h"]
    assert option("--to", "") == []
    assert option("--first", "1", 1) == []


@pytest.mark.parametrize("text", ["", "x", "1_0", "-1", "1.5", "٣"])
def test_number_of_a_form_is_a_whole_number(text):
    with pytest.raises(InvalidRequestError):
        number_of({"partitions": text}, "partitions")
    with pytest.raises(InvalidRequestError):
        numbers_of({"partitions": text and f"1 {text}"}, "partitions")
