"""The base class of all errors: with a code that never changes, a fate, a retry rule and typed
details. Pure.

`__init__.py` shows the tree of errors, which are imported from there.
"""

from __future__ import annotations

import re
from typing import Any, Generic, Self, TypeVar, overload

from .reasons import Fate, Reason, RetryRule

KINDS: dict[str, type[KeylaneError]] = {}
"""Maps names to keylane's error classes."""
KIND_BY_CODE: dict[int, type[KeylaneError]] = {}
"""Maps codes to the error classes that have a code of their own."""
_PACKAGE = __name__.partition(".")[0]
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Matches a name that does not need quotes in a shell."""
_OF_A_SUBJECT = re.compile(r"(keylane subject (?:create|describe|operations|queues|grow)) NAME\b")
"""Matches the commands in hints in which NAME stands for the error's subject."""
_OF_A_GROUP = " SUBJECT GROUP"
"""Stands in commands in hints for the error's subject and consumer group."""
_PARTS = frozenset({"reason", "code", "retry", "details", "fate", "hint"})
"""The attributes that are set by `_rebuild`. All others are notes, or were set by the program."""


V = TypeVar("V")
K = TypeVar("K", bound="KeylaneError")


class Detail(Generic[V]):
    """
    A typed attribute of an error, which returns the detail with the same name.

    The value is None if the error has no such detail, or if a peer sent a value of another type.
    Text details convert any value to text.
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
        if self._kind is str and value is not None:
            return self._kind(value)  # type: ignore[call-arg]
        return None


class KeylaneError(Exception):
    """
    The base class of every error that keylane raises deliberately.

    `details` are numbers and names. Each class declares its details as attributes, which are None
    if absent.
    """

    reason: Reason | None = None
    """The reason for the error; None if the class alone is specific enough."""
    code: int = 1000
    """The code of the reason, or of the class. A class without a code is always raised with a
    reason.
    """
    fate: Fate = Fate.NOT_DONE
    retry: RetryRule = RetryRule.NEVER
    summary: str = "keylane failed"
    hint: str = ""
    """The hint of the reason, or of the class, unless the error has a hint of its own."""
    request_id = Detail(str)
    """The id under which the log of a server has lines about the request; None if unknown."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == _PACKAGE:
            KINDS[cls.__name__] = cls
        if "code" in cls.__dict__:  # a program's own subclass has the code of its base class
            clash = KIND_BY_CODE.setdefault(cls.code, cls)
            assert clash is cls, f"code {cls.code} is both {clash.__name__} and {cls.__name__}"

    def __init__(self, reason: Reason | str = "", message: str = "", /, **details: object) -> None:
        """Create an error: `ConfigError("text")`, or `ConfigError(Reason.BACKUP_FILE, "text")` with
        a reason.
        """
        if isinstance(reason, Reason):
            self.reason = reason
            self.code = reason.code
            self.fate = reason.fate
            self.retry = reason.retry
            self.summary = reason.summary
        else:
            message = reason
        self.details: dict[str, Any] = details
        text = message or self.summary
        if details and not message:
            text += " (" + ", ".join(f"{name}={value}" for name, value in details.items()) + ")"
        super().__init__(text)
        hint = format_hint(self.reason or type(self), details)
        if hint != self.hint:
            self.hint = hint

    @property
    def message(self) -> str:
        """A one-line description of the error."""
        return str(self.args[0])

    def copy(self, fate: Fate | None = None, *, message: str = "") -> Self:
        """Return a copy of the error for another caller, optionally with another fate or text."""
        text = message or self.message
        copy = _rebuild(type(self), self.reason, text, self.details, fate or self.fate, self.hint)
        copy.__cause__ = self.__cause__
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (type(self), self.reason, self.message, self.details, self.fate, self.hint)
        extra = {name: value for name, value in vars(self).items() if name not in _PARTS}
        return (_rebuild, parts, extra) if extra else (_rebuild, parts)

    def __str__(self) -> str:
        advice = f"\n  {self.hint}" if self.hint else ""
        reason = f" {self.reason.name}" if self.reason else ""
        return f"{self.message} [{type(self).__name__} {self.code}{reason}]{advice}"


KINDS[KeylaneError.__name__] = KeylaneError
KIND_BY_CODE[KeylaneError.code] = KeylaneError


def format_hint(kind: type[KeylaneError] | Reason, details: dict[str, Any]) -> str:
    """Return the hint of a class or a reason, with the subject and the group in `details` filled
    into its commands.
    """
    hint = kind.hint
    if " NAME" in hint and _is_plain(subject := details.get("subject")):
        hint = _OF_A_SUBJECT.sub(rf"\1 {subject}", hint)
    if _OF_A_GROUP in hint:
        names = details.get("subject"), details.get("group")
        if all(map(_is_plain, names)):
            hint = hint.replace(_OF_A_GROUP, " {} {}".format(*names))
    return hint


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def create_error(kind: type[K], reason: Reason | None, message: str, details: dict[str, Any]) -> K:
    """Create an error of a class, with a reason if there is one."""
    return kind(message, **details) if reason is None else kind(reason, message, **details)


def _rebuild(
    kind: type[K],
    reason: Reason | None,
    message: str,
    details: dict[str, Any],
    fate: Fate,
    hint: str,
) -> K:
    """Recreate an error with its own fate and hint. Used by copies and pickles."""
    error = create_error(kind, reason, message, details)
    if error.fate is not fate:
        error.fate = fate
    if error.hint != hint:
        error.hint = hint
    return error
