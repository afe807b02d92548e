"""The settings of a broker, with the reasons for the defaults; all problems are told at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol.address import addresses_of
from ..protocol.errors import ConfigError, InvalidNameError
from ..protocol.ids import check_name
from ..protocol.limits import BATCH_BYTES_MAX, HTTP_CONNECTIONS_MAX
from ..protocol.settings import kind_problems, range_problems, refuse, values_of
from ..rpc.settings import read_settings

MIB = 1 << 20
INDEX_KINDS = ("file", "rocksdb")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of one broker process."""

    group: str
    """Name of the broker group it serves."""
    data: Path
    """Its data folder, used by no other process; made if missing."""
    meta: tuple[str, ...]
    """Addresses of metaservers, host:port."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    segment_bytes: int = 1 << 30
    """A segment of the commit log is rolled before it grows past this. RocketMQ's and QMQ's default."""
    snapshot_bytes: int = 256 * MIB
    """A snapshot of the state is written each time the log has grown by this much; a start reads what follows it."""
    index: str = "file"
    """What finds batches in the log: "file", or "rocksdb" for very many partitions."""
    retention_ms: int = 72 * 3_600_000
    """Messages older than this are removed, a whole segment at a time; 0: never because of their age."""
    retention_bytes: int = 0
    """The oldest segments are removed while the log is larger than this; 0: however large it is."""
    queued_bytes_max: int = 32 * MIB
    """Appends waiting for the disk; beyond it producers are told to wait. A quarter second of a 128 MB/s disk."""
    commit_bytes_max: int = 16 * MIB
    """What one write and sync carries at most, so that a burst does not make the first of it wait for the last."""
    cache_bytes: int = 16 * MIB
    """Newest batches kept in memory for consumers that keep up."""
    reader_threads: int = 2
    """Threads that read old batches from the disk."""
    http_connections_max: int = HTTP_CONNECTIONS_MAX
    """Plain HTTP connections at once; those of the data plane are not among them."""

    def __post_init__(self) -> None:
        refuse(_problems(values_of(self)))


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


def _problems(values: Mapping[str, object]) -> list[str]:
    problems = range_problems(values, _RANGES)
    if "group" in values:
        try:
            check_name("broker group", values["group"])
        except InvalidNameError as error:
            problems.append(f"group: {error.message}")
    data = values.get("data", Path())
    if not isinstance(data, Path) or "\0" in str(data):
        problems.append("data must be the path of a folder")
    meta = values.get("meta", ("127.0.0.1:7000",))
    for address in meta if isinstance(meta, tuple) and meta else (meta,):
        try:
            addresses_of(address)
        except ConfigError as error:
            problems.append(f"meta: {error.message}")
    if values.get("index", "file") not in INDEX_KINDS:
        problems.append(f"index must be {' or '.join(INDEX_KINDS)}, not {values['index']!r:.40}")
    return problems + kind_problems(values, {"host": str})


def broker_settings(flags: Mapping[str, Any], config: Path | None = None) -> BrokerSettings:
    """
    Settings from a TOML file and flags; a flag that is None was not given.

    Raises:
        ConfigError: an unreadable file, unknown or missing names, wrong types, impossible values; all at once.
    """
    return read_settings(BrokerSettings, flags, config, problems_of=_problems)
