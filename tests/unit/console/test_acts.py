"""The command beside a button is one that the command line understands, and quotes what it must."""

import shlex
from types import SimpleNamespace

import click
import pytest

from keylane.cli.main import app
from keylane.console.acts import parked
from keylane.console.acts.act import Form, command_of, command_text, option
from keylane.console.acts.table import ACTS, act_form
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
    "key": "ada",
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
    words = command_of(ACTS[name], given)
    params = parsed(words)
    assert shlex.split(command_text(ACTS[name], given)) == ["keylane", *words]
    texts = str(params)
    for field in ACTS[name].fields:
        value = given[field.name]
        if field.kind in {"text", "area"} and value and value != "*":
            assert repr(value)[1:-1] in texts or value in texts, field.name


@pytest.mark.parametrize("name", ACTS)
def test_command_of_an_empty_form_is_text(name):
    act = ACTS[name]
    empty = {each.name: "" for each in act.fields}
    assert command_text(act, empty).startswith("keylane ")
    assert act.back(empty).startswith("/console")
    assert act.after is None or act.after(empty).startswith("/console")


def test_acts_that_destroy_ask_for_a_name_of_their_form():
    for name, act in ACTS.items():
        assert set(act.typed) <= {each.name for each in act.fields}, name
    assert {name for name, act in ACTS.items() if act.typed} >= {
        *("subject-delete", "group-delete", "group-reset", "skip", "evacuate", "token-revoke")
    }


def test_value_that_looks_like_an_option_is_none():
    assert option("--to", "-1h") == ["--to=-1h"]
    assert option("--to", "") == []
    assert option("--first", "1", "1") == []


@pytest.mark.parametrize("text", ["", "x", "1_0", "-1", "1.5", "٣"])
def test_number_of_a_form_is_a_whole_number(text):
    with pytest.raises(InvalidRequestError):
        Form({"partitions": text}).number("partitions")
    with pytest.raises(InvalidRequestError):
        Form({"partitions": text and f"1 {text}"}).numbers("partitions")


async def present(value: bytes) -> dict[str, str]:
    """What the form that edits a parked message of this value begins with."""

    async def parked_message(*_place: object) -> SimpleNamespace:
        return SimpleNamespace(message=SimpleNamespace(value=value))

    form = Form({"subject": "orders", "group": "billing", "partition": "1", "offset": "7"})
    admin = SimpleNamespace(parked_message=parked_message)
    return await parked.present_value(admin, form)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [b"\xff", b"two\r\nlines", b"a\rb", b"nothing\x00more"])
async def test_value_that_a_form_would_change_is_left_to_the_command(value):
    with pytest.raises(InvalidRequestError, match="keylane parked edit"):
        await present(value)


async def test_value_that_a_form_keeps_is_edited():
    assert await present(b"\ntwo\n\tlines") == {"value": "\ntwo\n\tlines"}


@pytest.mark.parametrize(
    ("key", "typed", "shown"),
    [
        (b"customer-3", "customer-3", ("customer-3", "hex 637573746f6d65722d33")),
        (b"\xff\x00", "ff00", ("ff00",)),
        ("\u202eevil".encode(), "e280ae6576696c", ("e280ae6576696c",)),
        (b" padded", "20706164646564", ("20706164646564",)),
        (b"", "billing", ()),
    ],
)
def test_key_that_is_skipped_is_named_as_it_can_be_typed(key, typed, shown):
    form = act_form("skip", {"subject": "orders", "group": "billing", "key_hex": key.hex()})
    assert form.typed == typed
    (field,) = (each for each in form.act.fields if each.name == "key_hex")
    assert not key or field.texts(key.hex()) == shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": "ada's"}, ["--key", "ada's"]),
        ({"key": "-1"}, ["--key=-1"]),
        ({"key": "00ff", "hex": "on"}, ["--key-hex", "00ff"]),
        ({"key": "a\u202eb"}, ["--key-hex", "61e280ae62"]),
        ({"key": ""}, []),
    ],
)
def test_question_names_its_key_as_the_command_does(given, words):
    asked = {"subject": "orders", "group": "billing", **given}
    assert command_of(ACTS["why"], asked) == ["why", "orders", "--group", "billing", *words]
