"""The root of all errors: a code that never changes, a fate, advice on retrying, and typed details.
Pure.

`__init__.py` draws the tree; errors are imported from there.
"""

from __future__ import annotations

import enum
import re
from typing import Any, ClassVar, Generic, TypeVar, overload


class Fate(enum.StrEnum):
    """Whether a failed call has had an effect."""

    NOT_DONE = "not_done"
    UNKNOWN = "unknown"


class RetryRule(enum.StrEnum):
    """When the caller may try again."""

    NEVER = "never"
    LATER = "later"
    AFTER_NEW_ROUTE = "after_new_route"


KIND_BY_CODE: dict[int, type[KeylaneError]] = {}
_PACKAGE = __name__.partition(".")[0]
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""A name that a shell takes as it is."""
_OF_A_SUBJECT = re.compile(r"(keylane subject (?:create|describe|operations|queues|grow)) NAME\b")
"""Commands of hints, for the subject that the error is about."""
_PARTS = frozenset({"details", "fate", "hint"})
"""Attributes that `_rebuild` sets; the others are notes, and what a program has set."""


V = TypeVar("V")


class Detail(Generic[V]):
    """
    A typed attribute of an error: the detail of the same name.

    None if the error was raised without the detail, or a peer sent a value of another type.  A text
    detail takes any value, as text.
    """

    def __init__(self, kind: type[V]) -> None:
        self._kind = kind
        self._name = ""

    def __set_name__(self, _owner: type[KeylaneError], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, error: None, owner: type[KeylaneError]) -> Detail[V]: ...
    @overload
    def __get__(self, error: KeylaneError, owner: type[KeylaneError]) -> V | None: ...
    def __get__(
        self, error: KeylaneError | None, owner: type[KeylaneError]
    ) -> Detail[V] | V | None:
        if error is None:
            return self
        value = error.details.get(self._name)
        if isinstance(value, self._kind):
            return value
        return self._kind(value) if self._kind is str and value is not None else None  # type: ignore[call-arg]


class KeylaneError(Exception):
    """
    Root of every error raised on purpose.

    `details` are numbers and names: each class has those that it declares as attributes, None if
    not given.
    """

    code: ClassVar[int] = 1000
    fate: Fate = Fate.NOT_DONE
    retry: ClassVar[RetryRule] = RetryRule.NEVER
    summary: ClassVar[str] = "keylane failed"
    hint: str = ""
    """Of the class; an error may have one of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__ and cls.__module__.partition(".")[0] != _PACKAGE:
            return  # a program's own kind of an error: its code says what its base is
        clash = KIND_BY_CODE.setdefault(cls.code, cls)
        assert clash is cls, f"code {cls.code} is both {clash.__name__} and {cls.__name__}"

    def __init__(self, message: str = "", /, **details: object) -> None:
        self.details: dict[str, Any] = details
        text = message or self.summary
        if details and not message:
            text += " (" + ", ".join(f"{name}={value}" for name, value in details.items()) + ")"
        super().__init__(text)
        hint = hint_of(type(self), details)
        if hint != self.hint:
            self.hint = hint

    @property
    def message(self) -> str:
        """What happened, in one line."""
        return str(self.args[0])

    def copy(self, fate: Fate) -> KeylaneError:
        """An equal error for another caller, with its own fate: each caller gets an error object of
        its own.
        """
        copy = _rebuild(type(self), self.message, self.details, fate, self.hint)
        copy.__cause__ = self.__cause__
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (type(self), self.message, self.details, self.fate, self.hint)
        more = {name: value for name, value in vars(self).items() if name not in _PARTS}
        return (_rebuild, parts, more) if more else (_rebuild, parts)

    def __str__(self) -> str:
        advice = f"\n  {self.hint}" if self.hint else ""
        return f"{self.message} [{type(self).__name__} {self.code}]{advice}"


KIND_BY_CODE[KeylaneError.code] = KeylaneError


def hint_of(kind: type[KeylaneError], details: dict[str, Any]) -> str:
    """The hint that an error of this kind has if it is given none; its commands name the subject of
    `details`.
    """
    subject = details.get("subject")
    if " NAME" in kind.hint and isinstance(subject, str) and _PLAIN.fullmatch(subject):
        return _OF_A_SUBJECT.sub(rf"\1 {subject}", kind.hint)
    return kind.hint


def _rebuild(
    kind: type[KeylaneError], message: str, details: dict[str, Any], fate: Fate, hint: str
) -> KeylaneError:
    error = kind(message, **details)
    if error.fate is not fate:
        error.fate = fate
    if error.hint != hint:
        error.hint = hint
    return error
