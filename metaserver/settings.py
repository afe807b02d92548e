"""The metaserver's settings: defaults, then a TOML file, then the command line; all problems at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..protocol.errors import ConfigError, DataFolderError
from ..protocol.limits import CONNECTIONS_MAX
from ..protocol.settings import range_problems

DATABASE_SCHEMES = ("sqlite+aiosqlite:", "postgresql+asyncpg:")
NO_FILE = ("", "//", "///", "///:memory:")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaserverSettings:
    """
    The settings of a metaserver.

    Raises:
        ConfigError: lists every impossible value.
    """

    data: Path = field(metadata={"doc": "folder of the embedded database"})
    database_url: str | None = field(
        default=None,
        metadata={"doc": "postgresql+asyncpg://… where several metaservers share a database"},
    )
    host: str = field(default="127.0.0.1", metadata={"doc": "loopback address to listen on"})
    port: int = field(default=7000, metadata={"doc": "0: any free one"})
    broker_heartbeat_ms: int = field(
        default=1_000, metadata={"doc": "how often a broker reports itself"}
    )
    broker_ttl_ms: int = field(
        default=10_000,
        metadata={
            "doc": "a broker without a report for this long is not available; a restart fits in"
        },
    )
    heartbeat_ms_max: int = field(
        default=5_000, metadata={"doc": "longest time between two heartbeats of a consumer"}
    )
    poll_ms: int = field(
        default=500,
        metadata={"doc": "how often the database is polled for changes by other metaservers"},
    )
    repair_ms: int = field(
        default=2_000, metadata={"doc": "how often an interrupted creation is retried"}
    )
    operation_lease_ms: int = field(
        default=5_000,
        metadata={"doc": "after this long another metaserver continues an operation left behind"},
    )
    expire_ms: int = field(
        default=10_000,
        metadata={"doc": "interval between checks for data removed by retention"},
    )
    sessions_max: int = field(default=10_000, metadata={"doc": "consumers of one group"})
    subjects_max: int = field(default=10_000, metadata={"doc": "subjects"})
    http_connections_max: int = field(
        default=CONNECTIONS_MAX,
        metadata={"doc": "HTTP connections at once: each consumer and producer has one or two"},
    )

    def __post_init__(self) -> None:
        problems = range_problems(self, _RANGES)
        if not problems and self.broker_ttl_ms < 2 * self.broker_heartbeat_ms:
            problems.append("broker_ttl_ms must be at least twice broker_heartbeat_ms")
        url = self.database_url
        if url is not None and not str(url).startswith(DATABASE_SCHEMES):
            problems.append(f"database_url begins with one of {', '.join(DATABASE_SCHEMES)}")
        elif url is not None and str(url).removeprefix(DATABASE_SCHEMES[0]) in NO_FILE:
            problems.append("an SQLite database_url names a file")
        if not isinstance(self.host, str) or not self.host:
            problems.append("host must be an address")
        if problems:
            raise ConfigError("; ".join(problems), problems=len(problems))


_RANGES = {
    "port": (0, 65_535),
    "broker_heartbeat_ms": (50, 60_000),
    "broker_ttl_ms": (100, 600_000),
    "heartbeat_ms_max": (100, 60_000),
    "poll_ms": (10, 10_000),
    "repair_ms": (100, 600_000),
    "operation_lease_ms": (100, 600_000),
    "expire_ms": (100, 600_000),
    "sessions_max": (1, 100_000),
    "subjects_max": (1, 1_000_000),
    "http_connections_max": (1, 1_000_000),
}


def read_settings(given: Mapping[str, Any], config: Path | None = None) -> MetaserverSettings:
    """
    Read settings from a TOML file and overlay those of `given` that are not None.

    Raises:
        ConfigError: the file is unreadable, names are unknown, values are impossible.
    """
    merged: dict[str, Any] = {}
    if config is not None:
        try:
            merged = tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read {config}: {error}") from error
    merged |= {name: value for name, value in given.items() if value is not None}
    known = {setting.name for setting in fields(MetaserverSettings)}
    problems = [f"unknown setting {name!r}" for name in merged if name not in known]
    if "data" not in merged:
        problems.append("data: a folder is needed")
    elif not isinstance(merged["data"], str | Path):
        problems.append("data must be the path of a folder")
    else:
        merged["data"] = Path(merged["data"])
    if problems:
        raise ConfigError("; ".join(problems), problems=len(problems))
    return MetaserverSettings(**merged)


def prepare_folder(data: Path) -> Path:
    """
    Create the data folder if it does not exist.

    Raises:
        DataFolderError: it cannot be created.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataFolderError(f"cannot use {data} as data folder: {error}", path=data) from error
    return data


def machine_boot() -> str:
    """Return the id of the machine's present boot; the boot-time clock begins again with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # unknown: every start counts as a new boot, and sessions live a ttl longer
