"""Templates for --output, such as "{subject} {partitions}", which format each row as one line.
Pure.

    keylane subject list --output '{subject} {partitions}'
    keylane group describe orders billing --output '{group} {partitions.name} {partitions.lag}'

Fields have the same names as in the JSON output. A list results in one line per element. The fields
of a list inside an object are written with a dot.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import cast

from ..protocol.errors import ConfigError, Fate
from ..protocol.text import json_printable, printable

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

    def check(self, names: Collection[str], objects: Collection[str] = ()) -> None:
        """Raise ConfigError if a field is neither one of `names` nor below one of `objects`."""
        for path in self._paths:
            if path[0] not in names or (path[1:] and path[0] not in objects):
                raise self._error(_unknown_text(path, names))

    def line(self, row: object) -> str:
        """Return the line for one row. Fields that the row does not have are shown as "-"."""
        return "".join(
            literal if path is None else literal + printable(_text(_find(row, path)))
            for literal, path in self._parts
        )

    def lines(self, value: object) -> list[str]:
        """
        Return a line for each row of `value`, which consists of structs, dicts and lists. A field
        that only other rows have is shown as "-".

        Raises:
            ConfigError: no row has a field with this name, or the fields belong to several lists.
        """
        objects = list(cast("Collection[object]", value)) if _is_list(value) else [value]
        rows = [row for each in objects for row in self._rows(each)]
        for path in self._paths:
            if rows and all(_find(row, path) is _MISSING for row in rows):
                names = {name for each in objects for name in _names(each)}
                error = self._error(f"the command is done, but {_unknown_text(path, names)}")
                error.fate = Fate.UNKNOWN
                error.hint = "Do not repeat a command that changes something for its output."
                raise error
        return [self.line(row) for row in rows]

    def _rows(self, value: object, expanded: FieldPath = ()) -> Iterator[object]:
        """Yield `value` once for each element of the list that the fields refer to."""
        prefix = next(filter(None, (_list_on(value, path) for path in self._paths)), None)
        if prefix is None:
            yield value
            return
        if prefix[: len(expanded)] != expanded:
            raise self._error(
                f"{'.'.join(expanded)} and {'.'.join(prefix)} are two lists; take the fields of one"
            )
        for element in cast("Collection[object]", _find(value, prefix)):
            yield from self._rows(_replace(value, prefix, element), prefix)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"--output {self.text[:200]!r}: {problem}")


def _unknown_text(path: FieldPath, names: Collection[str]) -> str:
    known = ", ".join(f"{{{name}}}" for name in sorted(names)[:NAMES_SHOWN]) or "none"
    return f"there is no field {{{'.'.join(path)}}}; the fields are {known}"


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


def _names(value: object) -> Iterator[str]:
    """Yield the names of all fields of an object, including those of objects and lists inside
    it.
    """
    for name, child in (_children(value) or {}).items():
        first = next(iter(cast("Collection[object]", child)), None) if _is_list(child) else child
        below = list(_names(first))
        yield from (f"{name}.{each}" for each in below) if below else (name,)


def _text(value: object) -> str:
    if value is None or value is _MISSING:
        return "-"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    import msgspec

    return json_printable(msgspec.json.encode(value).decode())
