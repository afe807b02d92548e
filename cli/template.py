"""Templates for --output, such as "{subject} {partitions}", which format each row as one line.
Pure.

    keylane subject list --output '{subject} {partitions}'
    keylane group describe orders billing --output '{group} {partitions.name} {partitions.lag}'

Fields have the same names as in the JSON output. A list results in one line per element. The fields
of a list inside an object are written with a dot. The template '{}' lists the fields.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from ..protocol.errors import ConfigError
from ..protocol.text import json_printable, listed, printable

if TYPE_CHECKING:
    from .fields import Fields

EXAMPLE = "{subject} {partitions}"
NAMES_SHOWN = 60
_MISSING = object()

FieldPath = tuple[str, ...]


class Template:
    """
    A compiled template.

    Raises:
        ConfigError: the text is not a template.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise self._error(str(error)) from None
        if any(spec or conversion for _, _, spec, conversion in parsed):
            raise self._error(f"a field is only a name, as in {EXAMPLE}")
        self._parts = [
            (literal, None if field is None else tuple(field.split(".")))
            for literal, field, _, _ in parsed
        ]
        self._paths = list(dict.fromkeys(path for _, path in self._parts if path is not None))
        if not self._paths:
            raise self._error(f"give table, json, or a template such as {EXAMPLE!r}")

    def check(self, fields: Fields) -> None:
        """
        Raise ConfigError if the template does not fit what a command shows.

        A field must exist, and all fields that are in lists must be in the same list.
        """
        lists: set[FieldPath] = set()
        for path in self._paths:
            steps = fields.find(path)
            if steps is None:
                raise self._error(_unknown_text(".".join(path), fields))
            lists |= {path[:depth] for depth in range(1, len(path)) if steps[depth].is_list}
        for first, second in pairwise(sorted(lists, key=lambda path: (len(path), path))):
            if second[: len(first)] != first:
                raise self._error(
                    f"{'.'.join(first)} and {'.'.join(second)} are two lists; take the fields of "
                    "one"
                )

    def line(self, row: object) -> str:
        """Return the line for one row. Fields that the row does not have are shown as "-"."""
        return "".join(
            literal if path is None else literal + printable(_text(_find(row, path)))
            for literal, path in self._parts
        )

    def lines(self, value: object) -> list[str]:
        """Return a line for each row of `value`, which consists of structs, dicts and lists."""
        objects = list(cast("Collection[object]", value)) if _is_list(value) else [value]
        return [self.line(row) for each in objects for row in self._rows(each)]

    def _rows(self, value: object) -> Iterator[object]:
        """Yield `value` once for each element of the list that the fields refer to."""
        prefix = next(filter(None, (_list_on(value, path) for path in self._paths)), None)
        if prefix is None:
            yield value
            return
        for element in cast("Collection[object]", _find(value, prefix)):
            yield from self._rows(_replace(value, prefix, element))

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"--output {self.text[:200]!r}: {problem}")


def _unknown_text(name: str, fields: Fields) -> str:
    known = sorted(fields.paths())
    if not known:
        return "the fields are those of the JSON" if fields.is_open else "there are no fields"
    names = ", ".join(f"{{{each}}}" for each in known[:NAMES_SHOWN])
    names += ", …" * (len(known) > NAMES_SHOWN)
    if not name:
        return f"the fields are {names}"
    last_names = {each: each.rpartition(".")[2] for each in known}
    close = get_close_matches(name, known) or get_close_matches(name, last_names.values(), n=1)
    similar = [each for each in known if last_names[each] == name] or [
        each for each in known if each in close or last_names[each] in close
    ]
    hint = f"did you mean {listed(f'{{{each}}}' for each in similar)}? " * bool(similar)
    return f"there is no field {{{name}}}; {hint}the fields are {names}"


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))


def _children(value: object) -> Mapping[str, object] | None:
    """Return the fields of a struct, dataclass or dict; None for any other value."""
    if isinstance(value, Mapping):
        return {str(name): child for name, child in value.items()}
    if names := getattr(type(value), "__struct_fields__", None):
        return {name: getattr(value, name) for name in names}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _find(value: object, path: FieldPath) -> object:
    """Return the field at a path without lists, None if it is below None, or _MISSING. Bytes that
    are not valid text are in a field of their own.
    """
    for name in path:
        if value is None:
            return None
        children = _children(value) or {}
        value = children.get(name, children.get(f"{name}_base64", _MISSING))
    return value


def _list_on(value: object, path: FieldPath) -> FieldPath | None:
    """Return the first part of a path that leads to a list, if the path refers to a field in
    one.
    """
    for depth in range(1, len(path)):
        if _is_list(_find(value, path[:depth])):
            return path[:depth]
    return None


def _replace(value: object, path: FieldPath, element: object) -> object:
    """Return a copy of an object with a different value at a path."""
    if not path:
        return element
    children = dict(_children(value) or {})
    children[path[0]] = _replace(children[path[0]], path[1:], element)
    return children


def _text(value: object) -> str:
    if value is None or value is _MISSING:
        return "-"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    import msgspec

    return json_printable(msgspec.json.encode(value).decode())
