"""Reads the settings of a server program: defaults, then a TOML file, then flags; the later wins."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..protocol.errors import ConfigError
from ..protocol.settings import refuse

Settings = TypeVar("Settings")


def read_settings(
    kind: Callable[..., Settings],
    flags: Mapping[str, Any],
    config: Path | None,
    *,
    problems_of: Callable[[Mapping[str, object]], list[str]],
) -> Settings:
    """
    Make the settings of a program.

    Args:
        kind: a dataclass.  A `Path` may be given as text, a `tuple[str, ...]` as an array or as text with commas.
        flags: settings by name; None: not given.
        config: a TOML file with settings by name.
        problems_of: says what is wrong with values, by name; those that are missing are left out.

    Raises:
        ConfigError: the file is unreadable, names are unknown or missing, values are impossible; all at once.
    """
    given = {} if config is None else _read_toml(config)
    given |= {name: value for name, value in flags.items() if value is not None}
    known: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    names = {field.name for field in known}
    values = {name: _typed(hints[name], given[name]) for name in given if name in names}
    refuse(
        [
            *(f"{name}: no such setting" for name in given if name not in names),
            *(
                f"{field.name} is missing"
                for field in known
                if _needed(field) and field.name not in given
            ),
            *problems_of(values),
        ]
    )
    return kind(**values)


def _read_toml(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {config}: {error}", path=str(config)) from error


def _needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _typed(hint: Any, value: Any) -> Any:
    """The value in the type of its field, if it is given in another form of it; else as it is."""
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint == tuple[str, ...] and isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if hint == tuple[str, ...] and isinstance(value, list):
        return tuple(value)
    return value
