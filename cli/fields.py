"""The fields of what a command shows, read from its type. Pure.

So a template with a wrong field is refused before the command does anything, whatever rows there
are at the moment.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

DEPTH_MAX = 8
SEQUENCES = (list, tuple, set, frozenset)
BYTES_SUFFIX = "_base64"
"""The end of a field's name if its bytes are not text; a template names it without."""


@dataclass(frozen=True, slots=True)
class Fields:
    """What a value of some type contains."""

    names: Mapping[str, Fields] = field(default_factory=dict)
    is_list: bool = False
    """True for a list of values with these names."""
    is_open: bool = False
    """True if the value, or its elements, may have any name."""

    @classmethod
    def of(cls, kind: Any, depth: int = DEPTH_MAX) -> Fields:
        """Return the fields of a type: a struct, a dataclass, a TypedDict, a list of one, or a
        union of these.
        """
        origin, arguments = get_origin(kind), get_args(kind)
        if kind in (Any, object) or depth == 0:
            return cls(is_open=True)
        if origin in (Union, types.UnionType):
            return cls.merge(cls.of(each, depth) for each in arguments)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return cls(is_open=True)
        if origin in SEQUENCES or (isinstance(origin, type) and issubclass(origin, Collection)):
            elements = cls.merge(cls.of(each, depth) for each in arguments if each is not ...)
            return cls(elements.names, is_list=True, is_open=elements.is_open)
        if origin is Literal or not isinstance(kind, type):
            return cls()
        if issubclass(kind, dict) and not is_typeddict(kind):
            return cls(is_open=True)
        if issubclass(kind, msgspec.Struct) or is_dataclass(kind) or is_typeddict(kind):
            hints = get_type_hints(kind)
            known = getattr(kind, "__struct_fields__", None) or _own_names(kind, hints)
            return cls({name: cls.of(hints[name], depth - 1) for name in known})
        return cls()

    @classmethod
    def merge(cls, parts: Iterable[Fields]) -> Fields:
        """Return the fields of values that may have one of several types."""
        names: dict[str, Fields] = {}
        is_list = is_open = False
        for part in parts:
            for name, below in part.names.items():
                names[name] = cls.merge((names[name], below)) if name in names else below
            is_list, is_open = is_list or part.is_list, is_open or part.is_open
        return cls(names, is_list, is_open)

    def find(self, path: Collection[str]) -> list[Fields] | None:
        """Return the fields at each step of a path, or None if there is no such path."""
        steps = [self]
        for name in path:
            below = steps[-1].names.get(name)
            if below is None:
                if not (steps[-1].is_open and name):
                    return None
                below = Fields(is_open=True)
            steps.append(below)
        return steps

    def paths(self) -> Iterator[str]:
        """Yield the path of every field that has no fields of its own."""
        for name, below in self.names.items():
            if name.endswith(BYTES_SUFFIX) and name.removesuffix(BYTES_SUFFIX) in self.names:
                continue
            yield from [f"{name}.{each}" for each in below.paths()] or [name]


def _own_names(kind: Any, hints: Mapping[str, Any]) -> Collection[str]:
    return getattr(kind, "__dataclass_fields__", None) or hints
