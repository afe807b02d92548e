"""What a call of an object that a program gives runs."""

from __future__ import annotations

from functools import partial


def callables_of(given: object) -> tuple[object, object]:
    """Return the function inside an object's partials, and that function's `__call__`; a call runs
    one of the two.
    """
    while isinstance(given, partial):
        given = given.func
    return given, getattr(given, "__call__", None)  # noqa: B004 - an object may define it
