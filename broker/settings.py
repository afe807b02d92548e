"""The settings of a broker, with their defaults and validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.address import parse_addresses
from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.ids import check_name
from ..protocol.limits import BATCH_BYTES_MAX, CONNECTIONS_MAX, HTTP_CONNECTIONS_MAX
from ..protocol.settings import check_no_problems, cluster_problems, field_values, range_problems
from ..rpc.access.settings import access_problems, is_access_on
from ..rpc.operating.log_lines import log_problems
from ..rpc.settings import SettingSources
from ..rpc.tls.settings import RELOADED_TLS, ServingSettings, serving_problems

MIB = 1 << 20
INDEX_KINDS = ("file", "rocksdb")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(ServingSettings):
    """Settings of a broker process."""

    group: str = field(metadata={"doc": "name of the broker group that it serves"})
    data: Path = field(
        metadata={"doc": "its data folder, used by no other process; created if missing"}
    )
    meta: tuple[str, ...] = field(metadata={"doc": "addresses of metaservers, host:port"})
    port: int = field(default=0, metadata={"doc": "0: any free port"})
    cluster: str = field(
        default="",
        metadata={
            "doc": "name of the cluster; programs and databases of another one are refused; empty: "
            "not checked"
        },
    )
    follow: bool = field(
        default=False,
        metadata={
            "doc": "keep the data folder a copy of that of the group's broker, and serve nothing"
        },
    )
    serve_reads: bool = field(
        default=False,
        metadata={
            "doc": "while it follows: answer reads of clients that ask copies, at its host and port"
        },
    )
    failover: bool = field(
        default=False,
        metadata={
            "doc": "with a copy: take the broker's place when it is gone; with the broker's "
            "folder: make it a copy when another has taken its place"
        },
    )
    machine: str = field(
        default="",
        metadata={
            "doc": "name of the machine that it runs on: acks wait for no two data folders of one "
            "machine; empty: a name that all processes of a kernel have"
        },
    )
    zone: str = field(
        default="",
        metadata={
            "doc": "name of the zone, such as a rack or a room: acks rather wait for copies in "
            "other zones"
        },
    )
    health_port: int = field(
        default=0,
        metadata={
            "doc": "port that answers /health/live, /health/ready and /metrics too, also while it "
            "follows; 0: none"
        },
    )
    takeover_ms: int = field(
        default=0,
        metadata={
            "doc": "how long a start waits for a broker that is stopping to leave the data folder "
            "and the port; 0: not at all"
        },
    )
    segment_bytes: int = field(
        default=1 << 30,
        metadata={
            "doc": "most bytes in a segment of the commit log; RocketMQ and QMQ "
            "have the same default"
        },
    )
    snapshot_bytes: int = field(
        default=256 * MIB,
        metadata={
            "doc": "a snapshot is written when the log has grown by this many bytes; a start reads "
            "the log behind it"
        },
    )
    index: str = field(
        default="file",
        metadata={"doc": 'kind of index of the log: "file", or "rocksdb" for very many partitions'},
    )
    retention_ms: int = field(
        default=72 * 3_600_000,
        metadata={
            "doc": "messages older than this are removed, a whole segment at a time; 0: age "
            "removes no messages"
        },
    )
    retention_bytes: int = field(
        default=0,
        metadata={
            "doc": "the oldest segments are removed while the log is larger than this; 0: size "
            "removes no messages"
        },
    )
    queued_bytes_max: int = field(
        default=32 * MIB,
        metadata={
            "doc": "bytes of appends that wait for the disk; above it producers have to wait; a "
            "quarter second of a 128 MB/s disk"
        },
    )
    commit_bytes_max: int = field(
        default=16 * MIB,
        metadata={
            "doc": "most bytes in a write and sync; in a burst the first append need "
            "not wait for the last"
        },
    )
    cache_bytes: int = field(
        default=8 * MIB,
        metadata={"doc": "memory for the newest batches, which consumers that keep up read"},
    )
    reader_threads: int = field(
        default=2, metadata={"doc": "threads that read old batches from the disk"}
    )
    copy_lag_ms: int = field(
        default=2_000,
        metadata={
            "doc": "milliseconds for which acks wait for a copy that is silent or slow, before the "
            "broker serves without it"
        },
    )
    scheduled_count_max: int = field(
        default=250_000,
        metadata={
            "doc": "messages that wait for a later delivery; each takes some 400 bytes of memory, "
            "besides its value on the disk"
        },
    )
    scheduled_bytes_max: int = field(
        default=256 * MIB,
        metadata={
            "doc": "bytes of these messages; a start reads them all, and what was settled lately: "
            "up to three times as much"
        },
    )
    http_connections_max: int = field(
        default=HTTP_CONNECTIONS_MAX,
        metadata={"doc": "plain HTTP connections at a time, those of the data plane apart"},
    )
    data_connections_max: int = field(
        default=CONNECTIONS_MAX,
        metadata={
            "doc": "connections of producers and consumers at a time; with access control, each "
            "principal gets an equal share where all are taken"
        },
    )
    token_file: Path | None = field(
        default=None,
        metadata={
            "doc": "file with the token of this broker, whose principal has the right cluster"
        },
    )
    log_level: str = field(default="INFO", metadata={"doc": "DEBUG, INFO, WARNING or ERROR"})
    log_format: str = field(
        default="auto", metadata={"doc": "text, json, or auto: text on a terminal, json elsewhere"}
    )

    def __post_init__(self) -> None:
        check_no_problems(_find_problems(field_values(self)))


_RANGES = {
    "port": (0, (1 << 16) - 1),
    "health_port": (0, (1 << 16) - 1),
    "takeover_ms": (0, 3_600_000),
    "copy_lag_ms": (100, 600_000),
    "segment_bytes": (4096, 1 << 40),
    "retention_ms": (0, 1 << 50),
    "retention_bytes": (0, 1 << 60),
    "snapshot_bytes": (4096, 1 << 40),
    "queued_bytes_max": (BATCH_BYTES_MAX, 1 << 34),
    "commit_bytes_max": (BATCH_BYTES_MAX, 1 << 30),
    "cache_bytes": (0, 1 << 40),
    "reader_threads": (1, 64),
    "scheduled_count_max": (0, 10_000_000),
    "scheduled_bytes_max": (0, 1 << 40),
    "http_connections_max": (1, 1_000_000),
    "data_connections_max": (1, 1_000_000),
}


def _find_problems(values: Mapping[str, object]) -> list[str]:
    problems = range_problems(values, _RANGES)
    if "group" in values:
        try:
            check_name("broker group", values["group"])
        except InvalidRequestError as error:
            problems.append(f"group: {error.message}")
    for name in ("machine", "zone"):
        if values.get(name):
            try:
                check_name(name, values[name])
            except InvalidRequestError as error:
                problems.append(error.message)
    if values.get("health_port", 0) and values.get("health_port") == values.get("port"):
        problems.append("health_port must not be port")
    for name in ("follow", "failover", "serve_reads"):
        if not isinstance(values.get(name, False), bool):
            problems.append(f"{name} must be true or false")
    data = values.get("data", Path())
    if not isinstance(data, Path) or "\0" in str(data):
        problems.append("data must be the path of a folder")
    meta = values.get("meta", ("127.0.0.1:7000",))
    for address in meta if isinstance(meta, tuple) and meta else (meta,):
        try:
            parse_addresses(address)
        except ConfigError as error:
            problems.append(f"meta: {error.message}")
    if values.get("index", "file") not in INDEX_KINDS:
        problems.append(f"index must be {' or '.join(INDEX_KINDS)}, not {values['index']!r:.40}")
    problems += cluster_problems(values) + serving_problems(values)
    problems += access_problems(values, ("token_file",))
    access, host = values.get("access", "auto"), values.get("host", "127.0.0.1")
    if values.get("serve_reads") is True and is_access_on(access, host):
        problems.append("serve_reads needs access = off: a copy does not know who may read what")
    return problems + log_problems(values)


def broker_settings(
    flags: Mapping[str, Any],
    config: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> BrokerSettings:
    """
    Read the settings from a TOML file, the environment and flags. A flag whose value is None is not
    set.

    Raises:
        ConfigError: the file is unreadable, a name is unknown or missing, or a value is invalid.
            The error lists all problems.
    """
    return SOURCES.read(flags, config, environment or {})


SOURCES = SettingSources("broker", BrokerSettings, _find_problems)
"""The sources of a broker's settings."""
RELOADED = frozenset({"log_level", "retention_ms", "retention_bytes"}) | RELOADED_TLS
"""The settings that a running broker reloads from its file on SIGHUP. The others need a restart."""
