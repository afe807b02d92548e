"""The settings of a metaserver and their help texts. All invalid values are reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..protocol.errors import DataFolderError
from ..protocol.limits import CONNECTIONS_MAX, PARTITIONS_MAX
from ..protocol.settings import check_no_problems, cluster_problems, field_values, range_problems
from ..protocol.text import mask_password, url_problem
from ..rpc.access.settings import (
    LEEWAY_S_MAX,
    IssuerSettings,
    access_problems,
    hash_problems,
    issuer_problems,
)
from ..rpc.operating.log_lines import log_problems
from ..rpc.settings import SettingSources
from ..rpc.tls.settings import RELOADED_TLS, ServingSettings, serving_problems

DATABASE_SCHEMES = ("sqlite+aiosqlite:", "postgresql+asyncpg:")
AUTO_CREATE_OFF = "off"
EXPIRES_MS_MAX = 10 * 366 * 86_400_000
PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,200}")
NO_FILE = ("", "//", "///", "///:memory:")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaserverSettings(ServingSettings):
    """
    The settings of a metaserver.

    Raises:
        ConfigError: some values are invalid; the message lists all of them.
    """

    data: Path = field(metadata={"doc": "folder of the embedded database"})
    database_url: str | None = field(
        default=None,
        repr=False,  # may contain a password
        metadata={
            "doc": "postgresql+asyncpg://… if several metaservers share a database; do not give "
            "a password in a flag, which ps shows"
        },
    )
    port: int = field(default=7000, metadata={"doc": "port to listen on; 0: any free one"})
    cluster: str = field(
        default="",
        metadata={
            "doc": "name of the cluster; programs and databases of another one are refused; empty: "
            "not checked"
        },
    )
    broker_heartbeat_ms: int = field(
        default=1_000,
        metadata={
            "doc": "interval between two reports of a broker; without changes, up to a quarter of "
            "broker_ttl_ms"
        },
    )
    broker_ttl_ms: int = field(
        default=10_000,
        metadata={
            "doc": "silence after which a broker is not available; longer than a restart takes"
        },
    )
    heartbeat_ms_max: int = field(
        default=10_000, metadata={"doc": "longest time between two heartbeats of a consumer"}
    )
    poll_ms: int = field(
        default=500,
        metadata={
            "doc": "interval at which the database is polled for changes by other metaservers"
        },
    )
    repair_ms: int = field(
        default=2_000, metadata={"doc": "interval at which interrupted creations are retried"}
    )
    operation_lease_ms: int = field(
        default=5_000,
        metadata={"doc": "time after which another metaserver continues an abandoned operation"},
    )
    balance: bool = field(
        default=False,
        metadata={
            "doc": "partitions are moved between broker groups, one at a time, until these are "
            "balanced"
        },
    )
    balance_interval_ms: int = field(
        default=60_000, metadata={"doc": "interval at which the next one is moved"}
    )
    expire_ms: int = field(
        default=10_000,
        metadata={"doc": "interval between checks for data that retention has removed"},
    )
    group_expires_ms: int = field(
        default=0,
        metadata={"doc": "a consumer group without consumers for this time is deleted; 0: never"},
    )
    hidden_expires_ms: int = field(
        default=7 * 86_400_000,
        metadata={
            "doc": "a hidden subject that is neither filled nor published for this time is "
            "deleted; 0: never"
        },
    )
    history_retention_ms: int = field(
        default=90 * 86_400_000,
        metadata={
            "doc": "time for which deletions and publications of subjects and groups, and changes "
            "of partitions, are remembered"
        },
    )
    sessions_max: int = field(default=10_000, metadata={"doc": "most consumers of one group"})
    subjects_max: int = field(default=10_000, metadata={"doc": "most subjects"})
    auto_create: str = field(
        default=AUTO_CREATE_OFF,
        metadata={
            "doc": "off, or a pattern such as events.*: subjects that match are created by the "
            "first message that is sent to them"
        },
    )
    auto_create_partitions: int = field(
        default=2, metadata={"doc": "partitions of a subject created by its first message"}
    )
    http_connections_max: int = field(
        default=CONNECTIONS_MAX,
        metadata={"doc": "most HTTP connections; each consumer and producer has one or two"},
    )
    admin_token_file: Path | None = field(
        default=None,
        metadata={"doc": "file with the token of the principal admin, which has every right"},
    )
    admin_token_hash: str = field(
        default="", metadata={"doc": "SHA-256 of that token, instead of the file"}
    )
    cluster_token_file: Path | None = field(
        default=None,
        metadata={"doc": "file with the token of the brokers, the principal cluster"},
    )
    broker_token_hashes: tuple[str, ...] = field(
        default=(),
        metadata={"doc": "NAME:SHA-256 of each broker's token, instead of the file"},
    )
    jwt_issuer: str = field(
        default="", metadata={"doc": "claim iss of tokens (JWT) of an outside issuer"}
    )
    jwt_audience: str = field(default="", metadata={"doc": "claim aud of these tokens"})
    jwt_jwks: str = field(
        default="", metadata={"doc": "the issuer's public keys (JWKS): a path or an https URL"}
    )
    jwt_jwks_ca: Path | None = field(
        default=None,
        metadata={"doc": "PEM file of the authority of that URL; default: those of the machine"},
    )
    jwt_algorithms: tuple[str, ...] = field(
        default=("RS256", "ES256"),
        metadata={"doc": "signature algorithms that are accepted; none and HS* are never accepted"},
    )
    jwt_principal_claim: str = field(
        default="sub", metadata={"doc": "claim with the name of the principal jwt:NAME"}
    )
    jwt_groups_claim: str = field(
        default="", metadata={"doc": "claim with groups, the principals group:NAME"}
    )
    jwt_leeway_s: int = field(
        default=30, metadata={"doc": "largest difference between the issuer's clock and this one"}
    )
    audit_retention_ms: int = field(
        default=90 * 86_400_000,
        metadata={"doc": "events of the audit log older than this are removed"},
    )
    audit_rows_max: int = field(
        default=1_000_000, metadata={"doc": "most events of the audit log in the database"}
    )
    log_level: str = field(default="INFO", metadata={"doc": "DEBUG, INFO, WARNING or ERROR"})
    log_format: str = field(
        default="auto", metadata={"doc": "text, json, or auto: text on a terminal, json elsewhere"}
    )

    def __post_init__(self) -> None:
        check_no_problems(_problems(field_values(self)))
        if self.broker_ttl_ms < 2 * self.broker_heartbeat_ms:
            check_no_problems(["broker_ttl_ms must be at least twice broker_heartbeat_ms"])

    @property
    def outside_issuer(self) -> IssuerSettings | None:
        """The settings of the external token issuer, if there is one."""
        if not self.jwt_issuer:
            return None
        return IssuerSettings(
            issuer=self.jwt_issuer,
            audience=self.jwt_audience,
            jwks=self.jwt_jwks,
            jwks_ca="" if self.jwt_jwks_ca is None else str(self.jwt_jwks_ca),
            algorithms=self.jwt_algorithms,
            principal_claim=self.jwt_principal_claim,
            groups_claim=self.jwt_groups_claim,
            leeway_s=self.jwt_leeway_s,
        )

    def creates(self, subject: str) -> bool:
        """Return True if the first message sent to a subject with this name creates it."""
        return self.auto_create != AUTO_CREATE_OFF and fnmatchcase(subject, self.auto_create)


_RANGES = {
    "port": (0, 65_535),
    "broker_heartbeat_ms": (50, 60_000),
    "broker_ttl_ms": (100, 600_000),
    "heartbeat_ms_max": (100, 60_000),
    "poll_ms": (10, 60_000),
    "repair_ms": (100, 600_000),
    "operation_lease_ms": (100, 600_000),
    "balance_interval_ms": (100, 86_400_000),
    "expire_ms": (100, 600_000),
    "group_expires_ms": (0, EXPIRES_MS_MAX),
    "hidden_expires_ms": (0, EXPIRES_MS_MAX),
    "history_retention_ms": (60_000, EXPIRES_MS_MAX),
    "sessions_max": (1, 100_000),
    "subjects_max": (1, 1_000_000),
    "auto_create_partitions": (1, PARTITIONS_MAX),
    "http_connections_max": (1, 1_000_000),
    "jwt_leeway_s": (0, LEEWAY_S_MAX),
    "audit_retention_ms": (60_000, EXPIRES_MS_MAX),
    "audit_rows_max": (1_000, 100_000_000),
}


def _problems(values: Mapping[str, object]) -> list[str]:
    problems = range_problems(values, _RANGES)
    if not isinstance(values.get("balance", False), bool):
        problems.append("balance must be true or false")
    if not isinstance(values.get("data", Path()), Path):
        problems.append("data must be the path of a folder")
    url = values.get("database_url")
    if url is not None and not str(url).startswith(DATABASE_SCHEMES):
        problems.append(f"database_url must begin with one of {', '.join(DATABASE_SCHEMES)}")
    elif url is not None and str(url).removeprefix(DATABASE_SCHEMES[0]) in NO_FILE:
        problems.append("an SQLite database_url must name a file")
    elif url is not None and (url_error := url_problem(str(url))):
        problems.append(f"cannot use database_url: {url_error}")
    pattern = values.get("auto_create", AUTO_CREATE_OFF)
    if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
        problems.append(
            "auto_create must be off, or a pattern of names: letters, digits, '.', '_', '-', and * "
            "or ? for others, "
            f"not {pattern!r:.40}"
        )
    problems += cluster_problems(values)
    problems += serving_problems(values)
    problems += access_problems(
        values,
        ("admin_token_file", "admin_token_hash"),
        ("cluster_token_file", "broker_token_hashes"),
    )
    problems += issuer_problems(values)
    problems += hash_problems(values, "admin_token_hash")
    problems += hash_problems(values, "broker_token_hashes", named=True)
    return problems + log_problems(values)


def metaserver_settings(
    flags: Mapping[str, Any],
    config: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> MetaserverSettings:
    """
    Read the settings from a TOML file, the environment and flags. A flag is None if it was not
    given.

    Raises:
        ConfigError: the file cannot be read, names are unknown or missing, or values are invalid.
    """
    return SOURCES.read(flags, config, environment or {})


DATABASE_URL_VARIABLE = "KEYLANE_METASERVER_DATABASE_URL"
SOURCES = SettingSources("metaserver", MetaserverSettings, _problems)
"""The sources of a metaserver's settings."""
_TOKENS = ("admin_token_file", "admin_token_hash", "broker_token_hashes", "cluster_token_file")
_BALANCE = ("balance", "balance_interval_ms")
RELOADED = (
    frozenset({"log_level", "audit_retention_ms", "audit_rows_max", *_BALANCE, *_TOKENS})
    | RELOADED_TLS
)
"""Settings that a running metaserver reloads on SIGHUP; all others require a restart. Files of
tokens are read again even if their paths have not changed.
"""


def warning_about_flags(flags: Mapping[str, Any]) -> str:
    """Return a warning if a flag contains a password; otherwise ""."""
    url = flags.get("database_url")
    if not isinstance(url, str) or mask_password(url) == url:
        return ""
    return (
        "every user of this host can see the password in --database-url, for example with ps: "
        f"give the URL as {DATABASE_URL_VARIABLE}, or as database_url in the file of --config"
    )


def prepare_folder(data: Path) -> Path:
    """
    Create the data folder if it does not exist.

    Raises:
        DataFolderError: the folder cannot be created.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise DataFolderError(f"cannot use {data} as data folder: {why}", path=data) from error
    return data


def machine_boot() -> str:
    """Return the id of the machine's current boot; the boot-time clock restarts with each boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # unknown, so each start counts as a new boot, and sessions live one ttl longer
