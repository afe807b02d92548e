"""Every type that a public signature uses has a public name, so programs need no inner module."""

import builtins
import inspect
import pydoc
import re
import types
import typing
from collections.abc import Callable, Iterator

import pytest

import keylane
import keylane.consumer
import keylane.producer
from keylane.protocol import errors

FACES = (keylane, keylane.admin, keylane.consumer, keylane.producer, keylane.errors)
"""Where programs import names from."""
CLASSES = {
    name: value
    for face in (keylane, keylane.admin)
    for name, value in ((name, getattr(face, name)) for name in face.__all__)
    if isinstance(value, type)
}
CLIENTS = ("Admin", "Consumer", "Message", "Producer", "QueueReader", "SendFuture")
ERROR = re.compile(r"(?<![\w.])[A-Z]\w*Error\b")
INTERNAL = {("Message", "delivery"), ("Backoff", "pauses(return)")}
"""Fields and methods that serve the clients themselves."""


def public_members(kind: type) -> Iterator[tuple[str, object]]:
    """What a class of ours defines, and how it is made, opened and iterated."""
    opened = {"__init__", "__aenter__", "__anext__", "__await__"}
    for name, member in vars(kind).items():
        if name in opened or not name.startswith("_"):
            yield name, member


def hints_of(kind: type) -> Iterator[tuple[str, object]]:
    """Each public field, parameter and result of a class, and its type."""
    for name, hint in typing.get_type_hints(kind).items():
        if not name.startswith("_"):
            yield name, hint
    for name, member in public_members(kind):
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, Callable) and inspect.isfunction(function):
            for parameter, hint in typing.get_type_hints(function).items():
                if not parameter.startswith("_"):
                    yield f"{name}({parameter})", hint


def classes_in(hint: object) -> set[type]:
    """The classes of ours that a type is made of."""
    classes = (
        {hint} if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) else set()
    )
    for part in typing.get_args(hint):
        for inner in part if isinstance(part, list) else [part]:
            classes |= classes_in(inner)
    return {kind for kind in classes if kind.__module__.startswith("keylane.")}


def errors_named(text: str) -> set[str]:
    return {name for name in ERROR.findall(text) if not hasattr(builtins, name)}


def getattr_of(face: types.ModuleType, name: str) -> object:
    """None if `face` lacks it; `keylane` says with an ImportError which module has it."""
    try:
        return getattr(face, name, None)
    except ImportError:
        return None


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_types_of_a_public_class_are_exported(name):
    """Fields of what a call returns as well: a program that gets a value can name its type."""
    missing = {
        f"{where}: {kind.__name__}"
        for where, hint in hints_of(CLASSES[name])
        if (name, where) not in INTERNAL
        for kind in classes_in(hint)
        if all(getattr_of(face, kind.__name__) is not kind for face in FACES)
    }
    assert not missing


@pytest.mark.parametrize("name", CLIENTS)
def test_errors_in_the_docstrings_of_a_client_are_exported(name):
    """So `except keylane.errors.BusyError` needs no inner module."""
    kind = CLASSES[name]
    texts = [kind.__doc__ or ""]
    texts += [inspect.getdoc(member) or "" for _, member in public_members(kind)]
    named = set().union(*map(errors_named, texts))
    assert named, "the docstrings say what is raised"
    assert named <= set(errors.__all__)


@pytest.mark.parametrize("name", ["Consumer", "Producer", "Reader", "Admin", "QueueReader"])
def test_help_of_a_client_begins_with_what_it_is_for(name):
    """A signature of 1,137 characters, with arguments of our own, stood before it."""
    shown = pydoc.plain(pydoc.render_doc(getattr(keylane, name))).splitlines()
    call = shown[3].removeprefix(" |  ")
    assert call.startswith(f"{name}(meta, ")
    assert len(call) < 250
    assert " _" not in call
    purpose = shown[5].removeprefix(" |  ")
    assert re.match(r"(Handles|Sends|Reads|Administers) ", purpose), purpose
