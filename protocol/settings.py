"""Checks settings, and reports all problems at once. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

from .errors import ConfigError, InvalidRequestError
from .ids import check_name

F = TypeVar("F", bound=Callable[..., None])
T = TypeVar("T")
CALL_TIMEOUT_MS = (10, 600_000)
"""The minimum and maximum timeout of one call, in milliseconds."""


def field_values(settings: Any) -> dict[str, object]:
    """Return the field values of a dataclass by name."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def whole(value: object) -> int | None:
    """Convert an integer of any type, such as numpy's integers or an IntEnum, to int. Return None
    for a bool or any other value.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # also raised by arrays, which have this method
        return None


def is_within(value: object, low: int, high: int) -> bool:
    """Return True for an int in `[low, high]`. Return False for anything else, including a bool."""
    return type(value) is int and low <= value <= high


def range_problems(
    values: Mapping[str, object], ranges: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Return a sentence for each value that is not an int within its range. `ranges` maps names to
    the minimum and the maximum.
    """
    return [
        range_problem(name, values[name], low, high)
        for name, (low, high) in ranges.items()
        if name in values and not is_within(values[name], low, high)
    ]


def range_problem(name: str, value: object, low: int, high: int) -> str:
    """Return a sentence about `value`, which lies outside `[low, high]` or is not an int."""
    number = whole(value)
    advice = f": use int({number})" if number is not None and low <= number <= high else ""
    return f"{name} must be a whole number from {low} to {high}, not {value!r:.40}{advice}"


def flag_problems(**flags: object) -> list[str]:
    """Return a sentence for each flag that is not a bool. Without this check, "no" would count as
    True and None as False.
    """
    return [
        f"{name} must be True or False, not {value!r:.40}"
        for name, value in flags.items()
        if value is not True and value is not False
    ]


def type_problems(values: Mapping[str, object], kinds: Mapping[str, type]) -> list[str]:
    """Return a sentence for each value that is not an instance of its class. `kinds` maps names to
    classes.
    """
    return [
        f"{name} must be {'text' if kind is str else f'a {kind.__name__}'}, not "
        f"{values[name]!r:.40}"
        for name, kind in kinds.items()
        if name in values and not isinstance(values[name], kind)
    ]


def cluster_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problem with the setting `cluster`, as a list of at most one sentence."""
    cluster = values.get("cluster", "")
    if cluster == "":
        return []
    try:
        check_name("cluster", cluster)
    except InvalidRequestError as error:
        return [f"cluster: {error.message}"]
    return []


def check_no_problems(problems: Sequence[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError("; ".join(problems), problems=len(problems))


def check_no_call_problems(problems: Sequence[str]) -> None:
    """Raise InvalidRequestError with all problems of a call on an open client, if there are any."""
    if problems:
        raise InvalidRequestError("; ".join(problems))


def refuse_unknown_arguments(
    client_kind: str, other_clients: Iterable[str], settings: type, words: Mapping[str, str]
) -> None:
    """
    Refuse unknown keyword arguments of a client, with advice.

    Args:
        client_kind: the name of the client.
        other_clients: the names of the unknown keyword arguments.
        settings: the class of the client's settings. The advice names a matching field.
        words: maps names that other systems use to advice.

    Raises:
        TypeError: there is at least one unknown argument.
    """
    for name in other_clients:
        known_names = [field.name for field in fields(settings)]
        similar = [field for field in known_names if field.startswith(f"{name}_")]
        similar = similar or get_close_matches(name, known_names, n=1, cutoff=0.8)
        advice = words.get(name) or (f"did you mean {similar[0]}?" if similar else "")
        if name in known_names:
            advice = f"it is a setting: settings={settings.__name__}({name}=...)"
        raise TypeError(
            f"{client_kind}() got an unexpected keyword argument {name!r}"
            + (advice and f": {advice}")
        )


def advises_on_unknown_settings(
    client_kind: str, words: Mapping[str, str]
) -> Callable[[type[T]], type[T]]:
    """
    Decorate a dataclass of settings, so that an unknown name raises an error with advice, as in
    `refuse_unknown_arguments`.

    Args:
        client_kind: the name of the client that takes the settings.
        words: maps names that other systems use to advice about that client.
    """

    def decorate(settings: type[T]) -> type[T]:
        initialize: Any = settings.__init__
        known_names = frozenset(field.name for field in fields(cast(Any, settings)))
        advice = {name: f"in {client_kind}(...), {word}" for name, word in words.items()}

        @wraps(initialize)
        def checked(self: object, *args: Any, **named: Any) -> None:
            if not known_names.issuperset(named):
                unknown_names = [name for name in named if name not in known_names]
                refuse_unknown_arguments(settings.__name__, unknown_names, settings, advice)
            initialize(self, *args, **named)

        settings.__init__ = checked  # type: ignore[method-assign]  # the class is the caller's
        return settings

    return decorate


def names_missing_address(what: str, settings: type, words: Mapping[str, str]) -> Callable[[F], F]:
    """Decorate the `__init__` of a client whose first argument is `meta`, so that a call without
    it, or with too many arguments by position, raises an error with advice.
    `refuse_unknown_arguments` gives such advice for all other arguments.
    """

    def decorate(initialize: F) -> F:
        code = cast(Any, initialize).__code__
        by_position = code.co_varnames[1 : code.co_argcount]
        by_name = [f"{name}=" for name in code.co_varnames[code.co_argcount :]]

        @wraps(initialize)
        def checked(self: object, *args: Any, **named: Any) -> None:
            if len(args) > len(by_position):
                raise TypeError(
                    f"{what}() takes only {' and '.join(by_position)} by position: pass the others "
                    f"by name, as in {', '.join(by_name[:3])}"
                )
            if not args and "meta" not in named:
                refuse_unknown_arguments(
                    what, [name for name in named if name in words], settings, words
                )
                raise TypeError(
                    f"{what}() needs the address of a metaserver as its first argument: "
                    f'{what}("127.0.0.1:7000")'
                )
            initialize(self, *args, **named)

        return cast(F, checked)

    return decorate
