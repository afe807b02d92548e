"""Reads the settings of a server program from flags, the environment, a TOML file and defaults, in
this order of precedence.

    --retention-ms 3600000  ▶  KEYLANE_BROKER_RETENTION_MS=…  ▶  [broker] retention_ms = …
                            ▶  the default

Certificate paths in a TOML file are relative to the file. The settings are at the top level of the
file, or in a table named after the program, so that one file can configure all programs on a host.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from ..protocol.errors import ConfigError
from ..protocol.settings import check_no_problems
from ..protocol.text import mask_password, parse_number
from .reasons import reason

Settings = TypeVar("Settings")
CONFIG_VARIABLE = "KEYLANE_CONFIG"
"""The environment variable that names the TOML file if `--config` is not given."""
DEFAULT = "default"


def _parse_number(text: str) -> int | str:
    """Return the integer in a text. Any other text is returned unchanged, and refused by a later
    check.
    """
    number = parse_number(text.removeprefix("-"))
    if number is None:
        return text
    return -number if text.startswith("-") else number


_BOOLEANS = {"true": True, "false": False}
_FLAG_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _parse_number,
    bool: lambda text: _BOOLEANS.get(text.lower(), text),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting, its current value, and where the value comes from."""

    name: str
    value: object
    origin: str
    """Where the value comes from: the default, or the name of the file, variable or flag."""
    text: str
    """The description of the setting."""

    @property
    def shown(self) -> object:
        """The value for people: a path as text, and no password of a URL."""
        if isinstance(self.value, Path):
            return str(self.value)
        return mask_password(self.value) if isinstance(self.value, str) else self.value


class SettingSources(Generic[Settings]):
    """
    Reads the settings of one program.

    Args:
        program: "broker" or "metaserver".
        kind: a dataclass whose fields have `metadata["doc"]`. A `Path` may be given as text, and a
            `tuple[str, ...]` as an array or as comma-separated text.
        problems_of: takes values by name, and returns the problems with them as sentences.
    """

    def __init__(
        self,
        program: str,
        settings_class: Callable[..., Settings],
        problems_of: Callable[[Mapping[str, object]], list[str]],
    ) -> None:
        self._program = program
        self._settings_class = settings_class
        self._problems_of = problems_of
        self._fields: tuple[Field[Any], ...] = fields(settings_class)  # type: ignore[arg-type]
        self._hints = get_type_hints(settings_class)
        self._prefix = f"KEYLANE_{program.upper()}_"

    def read(
        self,
        flags: Mapping[str, Any],
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """
        Read the settings.

        Args:
            flags: the values of flags, by the name of the setting; None for flags that were not
                given.
            config: the TOML file; None uses the one named by the environment, if any.
            environment: the environment variables; None for none.

        Raises:
            ConfigError: the file cannot be read, settings are unknown or missing, or values are
                invalid. The message lists all problems.
        """
        values, _ = self._collect_values(flags, config, environment or {})
        return self._settings_class(**values)

    def explain(
        self,
        flags: Mapping[str, Any],
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Setting]:
        """Return every setting with its value and origin. Takes the same arguments as `read`, and
        raises the same errors.
        """
        values, origins = self._collect_values(flags, config, environment or {})
        settings = self._settings_class(**values)
        return [
            Setting(
                name=field.name,
                value=getattr(settings, field.name),
                origin=origins.get(field.name, DEFAULT),
                text=field.metadata.get("doc", ""),
            )
            for field in self._fields
        ]

    def _collect_values(
        self, flags: Mapping[str, Any], config: Path | None, environment: Mapping[str, str]
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Return the values that are set, converted to the types of their fields, and the origin of
        each value.
        """
        if config is None and environment.get(CONFIG_VARIABLE):
            config = Path(environment[CONFIG_VARIABLE])
        given_values: dict[str, tuple[object, str]] = {}
        if config is not None:
            for name, value in _read_toml(config, self._program).items():
                if self._hints.get(name) == Path | None and isinstance(value, str):
                    value = config.parent / value  # noqa: PLW2901 - a file beside the settings
                given_values[name] = value, f"file {config}"
        for variable, text in environment.items():
            if variable.startswith(self._prefix):
                name = variable.removeprefix(self._prefix).lower()
                given_values[name] = self._from_text(name, text), f"environment {variable}"
        for name, value in flags.items():
            if value is not None:
                given_values[name] = value, f"flag {flag_of(name)}"
        names = {field.name for field in self._fields}
        values = {
            name: _convert(self._hints[name], value)
            for name, (value, _) in given_values.items()
            if name in names
        }
        check_no_problems(
            [
                *(
                    f"{name}: no such setting ({origin})"
                    for name, (_, origin) in given_values.items()
                    if name not in names
                ),
                *(
                    f"{field.name} is missing"
                    for field in self._fields
                    if _is_required(field) and field.name not in given_values
                ),
                *self._problems_of(values),
            ]
        )
        return values, {name: origin for name, (_, origin) in given_values.items()}

    def _from_text(self, name: str, text: str) -> object:
        """Convert the text of an environment variable. A text that does not fit is returned
        unchanged, and refused by a later check.
        """
        if self._hints.get(name) is int:
            return _parse_number(text)
        if self._hints.get(name) is bool:
            return _BOOLEANS.get(text.lower(), text)
        return text

    def parser(self, prog: str, description: str) -> argparse.ArgumentParser:
        """Return an argument parser with a flag for each setting, and `--config`."""
        parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
        for field in self._fields:
            default = (
                ""
                if _is_required(field) or field.default in (None, "", ())
                else f" ({field.default})"
            )
            parser.add_argument(
                flag_of(field.name),
                action=_AppendToList if self._hints[field.name] == tuple[str, ...] else "store",
                type=_FLAG_PARSERS.get(self._hints[field.name], str),
                metavar="N" if self._hints[field.name] is int else "TEXT",
                help=(field.metadata.get("doc", "") + default).replace("%", "%%"),
            )
        parser.add_argument(
            "--config",
            type=Path,
            metavar="FILE.toml",
            help=f"TOML file with these settings by name, at its top or under [{self._program}]",
        )
        return parser


class _AppendToList(argparse.Action):
    """An argparse action for lists. A repeated flag adds to the list instead of replacing it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if earlier is None else f"{earlier},{values}")


def flag_of(name: str) -> str:
    """Return the flag for a setting, such as `--retention-ms` for `retention_ms`."""
    return "--" + name.replace("_", "-")


def _read_toml(config: Path, program: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {config}: {reason(error)}", path=str(config)) from error
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    if not tables:
        return document
    for name in document.keys() - tables.keys():
        raise ConfigError(
            f"{config}: {name} stands beside tables; put it under [{program}]", path=str(config)
        )
    table = tables.get(program)
    if table is None:
        raise ConfigError(f"{config} has no table [{program}]", path=str(config))
    return dict(table)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _convert(hint: Any, value: Any) -> Any:
    """Convert a value to the type of its field if it is in another accepted form; otherwise, return
    it unchanged.
    """
    if hint in (Path, Path | None) and isinstance(value, str):
        return Path(value)
    if hint == tuple[str, ...] and isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if hint == tuple[str, ...] and isinstance(value, list):
        return tuple(value)
    return value
