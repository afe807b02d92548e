"""The settings of a broker: defaults, a TOML file, flags.  Pure, but for reading that file.

    defaults  ◀─  FILE.toml  ◀─  flags            the later value wins; an unknown name is an error

All problems are reported together.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol.address import parse_address
from ..protocol.errors import ConfigError, InvalidNameError
from ..protocol.ids import check_name
from ..protocol.limits import BATCH_BYTES_MAX, HTTP_CONNECTIONS_MAX

MIB = 1 << 20
INDEX_KINDS = ("file", "rocksdb")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of a broker process."""

    group: str
    """Name of the broker group that it serves."""
    data: Path
    """Its data folder, used by no other process; made if missing."""
    meta: tuple[str, ...]
    """Addresses of metaservers, host:port."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    segment_bytes: int = 1 << 30
    """Most bytes in a segment of the commit log.  RocketMQ and QMQ have the same default."""
    snapshot_bytes: int = 256 * MIB
    """A snapshot is written when the log has grown by this many bytes; a start reads the log behind it."""
    index: str = "file"
    """Kind of index of the log: "file", or "rocksdb" for very many partitions."""
    retention_ms: int = 72 * 3_600_000
    """Messages older than this are removed, a whole segment at a time; 0: age removes no messages."""
    retention_bytes: int = 0
    """The oldest segments are removed while the log is larger than this; 0: size removes no messages."""
    queued_bytes_max: int = 32 * MIB
    """Bytes of appends that wait for the disk; above it producers have to wait.  A quarter second of a 128 MB/s disk."""
    commit_bytes_max: int = 16 * MIB
    """Most bytes in a write and sync.  In a burst the first append need not wait for the last."""
    cache_bytes: int = 16 * MIB
    """Memory for the newest batches, which consumers that keep up read."""
    reader_threads: int = 2
    """Threads that read old batches from the disk."""
    http_connections_max: int = HTTP_CONNECTIONS_MAX
    """Plain HTTP connections at a time, those of the data plane apart."""

    def __post_init__(self) -> None:
        _refuse(_value_problems({name: getattr(self, name) for name in self.__slots__}))


_RANGES = {
    "port": (0, (1 << 16) - 1),
    "segment_bytes": (4096, 1 << 40),
    "retention_ms": (0, 1 << 50),
    "retention_bytes": (0, 1 << 60),
    "snapshot_bytes": (4096, 1 << 40),
    "queued_bytes_max": (BATCH_BYTES_MAX, 1 << 34),
    "commit_bytes_max": (BATCH_BYTES_MAX, 1 << 30),
    "cache_bytes": (0, 1 << 40),
    "reader_threads": (1, 64),
    "http_connections_max": (1, 1_000_000),
}


def _value_problems(values: Mapping[str, Any]) -> list[str]:
    problems = []
    if "group" in values:
        try:
            check_name("broker group", values["group"])
        except InvalidNameError as error:
            problems.append(f"group: {error.message}")
    if "\0" in str(values.get("data", "")):
        problems.append("data: not a folder's name")
    if "meta" in values:
        if not values["meta"]:
            problems.append("meta: at least one address, as 127.0.0.1:7000")
        for address in values["meta"]:
            try:
                parse_address(address)
            except ConfigError as error:
                problems.append(f"meta: {error.message}")
    if values.get("index", "file") not in INDEX_KINDS:
        problems.append(f"index: {values['index']!r} is neither {' nor '.join(INDEX_KINDS)}")
    problems += [
        f"{name}: {values[name]} is not in [{low}, {high}]"
        for name, (low, high) in _RANGES.items()
        if name in values and not low <= values[name] <= high
    ]
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("broker settings:\n  " + "\n  ".join(problems), problems=len(problems))


def broker_settings(flags: Mapping[str, Any], config: Path | None = None) -> BrokerSettings:
    """
    Settings from a TOML file and flags; a flag that is None was not given.

    Raises:
        ConfigError: the file is unreadable, names are unknown or missing, values have wrong types or are impossible.
            It lists all problems.
    """
    given: dict[str, Any] = {}
    if config is not None:
        try:
            given.update(tomllib.loads(config.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read {config}: {error}", path=str(config)) from error
    given.update({name: value for name, value in flags.items() if value is not None})
    problems = []
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(BrokerSettings)}
    for name, value in given.items():
        if name not in fields:
            problems.append(f"{name}: no such setting")
            continue
        try:
            values[name] = _typed(name, value)
        except TypeError as error:
            problems.append(f"{name}: {error}")
    problems += [
        f"{name}: missing"
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    _refuse(problems + _value_problems(values))
    return BrokerSettings(**values)


def _typed(name: str, value: Any) -> Any:
    if name == "data":
        if isinstance(value, str | Path):
            return Path(value)
        raise TypeError(f"text is wanted, not {value!r}")
    if name == "meta":
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(part.strip() for part in parts)
        raise TypeError(f"addresses are wanted, not {value!r}")
    kind = str if name in {"group", "host", "index"} else int
    if type(value) is not kind:
        raise TypeError(f"{'text' if kind is str else 'a whole number'} is wanted, not {value!r}")
    return value
