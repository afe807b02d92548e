"""
What an act is: its form, its call, and the command that does the same.

    form ─▶ command_of: the words of the command line, beside the button
         ╰▶ Act.call ─┬─ with Form.dry_run: the plan, where there is one
                      ╰─ the call of `Admin`
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from ...admin import Admin
from ...protocol.errors import InvalidRequestError
from ...protocol.text import parse_number
from ..page import Sentence, href

Values = Mapping[str, str]
"""The fields of a form by name; a box that is not ticked is missing or empty."""
PLAN_LINES_MAX = 60


@dataclass(frozen=True, slots=True)
class Form:
    """A form that was sent."""

    values: Values
    now_ms: int = 0
    """The time at which it was sent, in milliseconds since 1970."""
    dry_run: bool = False
    """True to return what would be done."""

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")

    def optional(self, name: str) -> str | None:
        """Return a text, or None if it is empty."""
        return self[name] or None

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number, or `default` if there is none. Raises InvalidRequestError."""
        text = self[name].strip()
        if not text and default is not None:
            return default
        number = parse_number(text)
        if number is None:
            problem = f"{name.replace('_', ' ')} is a whole number, not {text!r:.40}"
            raise InvalidRequestError(problem)
        return number

    def numbers(self, name: str) -> list[int]:
        """Return numbers with spaces or commas between them. Raises InvalidRequestError."""
        found = [parse_number(text) for text in _words(self[name])]
        if not found or None in found:
            raise InvalidRequestError(f"{name} are numbers, such as 3 4 7")
        return [each for each in found if each is not None]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form, and what it is on the command line."""

    name: str
    label: str
    kind: str = "text"
    """
    "text", "number", "list" (words), "area", "check" or "select"; given by the page before:
    "fixed", or "mark", which is on.
    """
    word: str | None = ""
    """The option of the command, or its flag; "" for an argument; None if `Act.words` has it."""
    _: KW_ONLY
    usual: str = ""
    """The value with which the option is left out."""
    help: str = ""
    options: tuple[str, ...] = ()
    default: str = ""
    is_required: bool = False
    texts: Callable[[str], tuple[str, ...]] = lambda value: (value,)
    """Returns what is shown of a fixed value; the first text is the one that is typed again."""

    def command_words(self, value: str) -> list[str]:
        """Return the words of the command line."""
        if self.word is None:
            return []
        if self.kind in {"check", "mark"}:
            return [self.word] if value else []
        if self.kind == "list":
            return _words(value)
        if not self.word:
            return [value]
        return option(self.word, value, None if self.kind == "area" else self.usual)


@dataclass(frozen=True, slots=True)
class ActResult:
    """What an act has done, or what a question has found."""

    lines: tuple[str, ...]
    secret: str = ""
    """A text that is shown once."""
    wrong: tuple[Sentence, ...] = ()
    unknown: tuple[Sentence, ...] = ()


Told = str | tuple[str, ...] | ActResult


def about(values: Values) -> str:
    """Return the page of the group, the subject or the broker that an act is about."""
    if values.get("broker"):
        return href("brokers", values["broker"])
    return group_page(values) if values.get("group") else subject_page(values)


def subject_page(values: Values) -> str:
    """Return the page of the subject that an act is about; of all, if it names none."""
    return href("subjects", *filter(None, [values.get("subject")]))


def group_page(values: Values) -> str:
    """Return the page of the group that an act is about."""
    return href("subjects", values.get("subject", ""), "groups", values.get("group", ""))


@dataclass(frozen=True, slots=True)
class Act:
    """Something that can be done."""

    title: str
    command: str
    call: Callable[[Admin, Form], Awaitable[Told]]
    fields: tuple[Field, ...]
    lead: str
    _: KW_ONLY
    button: str = ""
    """What its button says, if that is not the title."""
    end: str = ""
    """The words at the end of the command."""
    words: Callable[[Values], list[str]] = lambda _values: []
    """Returns the words for the fields that have none of their own."""
    has_plan: bool = False
    """True if `call` with `dry_run` returns what would be done."""
    typed: tuple[str, ...] = ()
    """The fields of which the first one with a value is typed again before the act, because it
    destroys something.
    """
    is_question: bool = False
    """True if it changes nothing: the form stays, and has the answer above it."""
    prefill: Callable[[Admin, Form], Awaitable[dict[str, str]]] | None = None
    """Returns what the fields have at first, where a server knows it."""
    back: Callable[[Values], str] = about
    """Returns the page that the act was begun on."""
    after: Callable[[Values], str] | None = None
    """Returns the page that shows what was done, if it is another one."""

    def defaults(self) -> dict[str, str]:
        """Return the values of a form that is not filled in."""
        return {each.name: each.default for each in self.fields}

    def only_own(self, values: Values, prefix: str = "") -> dict[str, str]:
        """Return the values of its own fields, and of no other."""
        return {each.name: values.get(f"{prefix}{each.name}", "") for each in self.fields}

    def to_type(self, values: Values) -> str:
        """Return what is typed again before the act; "" if nothing is."""
        fields = {each.name: each for each in self.fields}
        given = (fields[name].texts(values[name])[0] for name in self.typed if values.get(name))
        return next(given, "")


async def run(act: Act, admin: Admin, form: Form) -> ActResult:
    """Do an act, or plan it."""
    told = await act.call(admin, form)
    if isinstance(told, ActResult):
        return told
    return ActResult((told,) if isinstance(told, str) else told)


def command_of(act: Act, values: Values) -> list[str]:
    """Return the words of the command that does the same, without the program's name."""
    words = act.command.split()
    for each in act.fields:
        words += each.command_words(values.get(each.name, ""))
    return words + act.words(values) + act.end.split()


def command_text(act: Act, values: Values) -> str:
    """Return the command as it is typed in a shell."""
    return shlex.join(["keylane", *command_of(act, values)])


def option(word: str, value: str, usual: str | None = "") -> list[str]:
    """Return an option of a command, or nothing if it has its usual value."""
    if value == usual or (not value and usual is not None):
        return []
    return [f"{word}={value}"] if value.startswith("-") else [word, value]


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()
