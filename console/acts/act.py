"""
The form of an act, its call, and the command that does the same.

    form ─▶ Act.command: the words of the command line, beside the button
         ╰▶ Act.plan: what would be done, where that can be known
         ╰▶ Act.do: the call of `Admin`
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...admin import Admin
from ...protocol.errors import InvalidRequestError
from ...protocol.text import parse_number
from ..page import href

Values = Mapping[str, str]
"""The fields of a form by name; a box that is not ticked is missing."""

PLAN_LINES_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a form."""

    name: str
    label: str
    kind: str = "text"
    """ "text", "number", "area", "check", "select", or "fixed": given by the page before."""
    help: str = ""
    options: tuple[str, ...] = ()
    default: str = ""
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class ActResult:
    """What an act has done."""

    lines: tuple[str, ...]
    href: str = ""
    """Where to look at it."""
    secret: str = ""
    """A text that is shown once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something that can be done."""

    title: str
    button: str
    lead: str
    fields: tuple[Field, ...]
    command: Callable[[Values], list[str]]
    do: Callable[[Admin, Values], Awaitable[ActResult]]
    plan: Callable[[Admin, Values], Awaitable[tuple[str, ...]]] | None = None
    typed: str = ""
    """The field whose value is typed again before the act, because it destroys something."""
    prefill: Callable[[Admin, Values], Awaitable[dict[str, str]]] | None = None
    """Returns what the fields have at first, where a server knows it."""
    back: Callable[[Values], str] = lambda _values: href()
    """Returns the page that the act was begun on."""


def command_text(words: Sequence[str]) -> str:
    """Return a command as it is typed in a shell."""
    return shlex.join(["keylane", *words])


def number_of(values: Values, name: str, default: int | None = None) -> int:
    """Return a whole number. Raises InvalidRequestError."""
    text = values.get(name, "").strip()
    if not text and default is not None:
        return default
    number = parse_number(text)
    if number is None:
        raise InvalidRequestError(f"{name.replace('_', ' ')} is a whole number, not {text!r:.40}")
    return number


def numbers_of(values: Values, name: str) -> list[int]:
    """Return whole numbers that are separated by spaces or commas. Raises InvalidRequestError."""
    found = [parse_number(text) for text in values.get(name, "").replace(",", " ").split()]
    if not found or None in found:
        raise InvalidRequestError(f"{name} are numbers, such as 3 4 7")
    return [each for each in found if each is not None]


def option(flag: str, value: str | int | None, default: object = "") -> list[str]:
    """Return an option of a command, or nothing if it has its default."""
    text = "" if value is None else str(value)
    if not text or text == str(default):
        return []
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def flag(values: Values, name: str, text: str) -> list[str]:
    """Return a flag of a command if its box is ticked."""
    return [text] if values.get(name) else []


def subject_page(values: Values) -> str:
    """Return the page of the subject that an act is about."""
    return href("subjects", values.get("subject", ""))


def group_page(values: Values) -> str:
    """Return the page of the group that an act is about."""
    return href("subjects", values.get("subject", ""), "groups", values.get("group", ""))


def broker_page(values: Values) -> str:
    """Return the page of the broker that an act is about."""
    return href("brokers", values.get("broker", ""))


SUBJECT = Field(name="subject", label="Subject", kind="fixed", is_required=True)

GROUP = Field(name="group", label="Consumer group", kind="fixed", is_required=True)

BROKER = Field(name="broker", label="Broker group", kind="fixed", is_required=True)
