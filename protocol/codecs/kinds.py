"""Resolves a type annotation (class, union, generic alias or NewType) to the runtime classes of its
values. Pure.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict


def classes_of(kind: Any) -> tuple[type, ...] | None:
    """
    Return the classes that a value of `kind` can have; None if they are unknown, as for Any.

    An int is a value of float, as type checkers see it; the caller must distinguish bool, which is
    a subclass of int.
    """
    if kind is Any:
        return None
    if is_typeddict(kind):
        return (dict,)
    if kind is None:
        return (type(None),)
    origin = get_origin(kind)
    if origin is Annotated:
        return classes_of(get_args(kind)[0])
    if origin is Literal:
        return tuple({type(each) for each in get_args(kind)})
    if origin is Union or origin is types.UnionType:
        return _of_all(get_args(kind))
    if origin is not None:
        return classes_of(origin)
    if isinstance(kind, type):
        if getattr(kind, "_is_protocol", False):
            return None
        return (float, int) if kind is float else (kind,)
    stands_for = getattr(kind, "__supertype__", None) or getattr(kind, "__value__", None)
    return None if stands_for is None else classes_of(stands_for)


def _of_all(kinds: tuple[Any, ...]) -> tuple[type, ...] | None:
    classes: list[type] = []
    for kind in kinds:
        some = classes_of(kind)
        if some is None:
            return None
        classes += some
    return tuple(classes)
