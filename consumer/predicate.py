"""
A program's predicate of messages: the function given as a consumer's `filter` or a reader's
`where`.

Any result is taken as true or false, as `re.match` returns a match or None. So a function that
never returns a value would reject every message in silence. It is refused beforehand, and so is one
that does not take one message, or whose call does not run its body.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from itertools import pairwise
from types import CodeType
from typing import Any

from ..protocol.errors import ConfigError, FilterError
from ..protocol.message import Message
from .callables import callables_of

_DEFERRED_KINDS = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
"""The kinds of functions that return a truthy object when called, without running their body."""


def check_predicate(predicate: object, expected: str) -> None:
    """
    Check that a predicate can be called with one message, and may accept one.

    Args:
        predicate: the object that the program passed.
        expected: what the argument may be, as in "where is a plain function of a message".

    Raises:
        ConfigError: the predicate is not callable, is asynchronous or a generator function, does
            not take one positional argument, or returns None wherever it returns. A builtin whose
            signature is unknown is accepted.
    """
    functions = callables_of(predicate)
    if not callable(predicate) or any(
        is_kind(function) for is_kind in _DEFERRED_KINDS for function in functions
    ):
        raise ConfigError(f"{expected}, not {predicate!r:.60}")
    if any(_returns_only_none(function) for function in functions):
        error = ConfigError(f"{expected}: {predicate!r:.60} never returns a value")
        error.hint = "Return True for a message that is wanted; None counts as False."
        raise error
    try:
        # A decorated function is called with the wrapper's own parameters.
        inspect.signature(predicate, follow_wrapped=False).bind(object())
    except TypeError as why:
        raise ConfigError(f"{expected}: {predicate!r:.60} does not take one: {why}") from None
    except ValueError:
        return  # a builtin does not declare its arguments


def call_predicate(
    predicate: Callable[[Message[Any]], object],
    message: Message[Any],
    make_error: Callable[[Message[Any], str], FilterError],
) -> bool:
    """Return what a user's predicate says of a message. If it fails or is async, raises what
    `make_error` makes of the message and the reason.
    """
    try:
        result = predicate(message)
    except Exception as error:
        raise make_error(message, f"{type(error).__name__}: {error}") from error
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise make_error(message, "it is async")
    return bool(result)


def _returns_only_none(function: object) -> bool:
    """
    Return True for a Python function that returns, and from each place the constant None.

    A function that always raises does not return. A return that several branches jump to counts as
    one of a value, as in `return message.key or None`.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, CodeType):
        return False
    is_none = [
        after.argval is None
        if after.opname == "RETURN_CONST"  # Python 3.12 and 3.13
        else before.opname == "LOAD_CONST" and before.argval is None and not after.is_jump_target
        for before, after in pairwise(dis.get_instructions(code))
        if after.opname in {"RETURN_VALUE", "RETURN_CONST"}
    ]
    return bool(is_none) and all(is_none)
