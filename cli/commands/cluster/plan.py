"""Builds the settings files, systemd units and tokens for the hosts of a new cluster. Writes
nothing to disk.

The administrator and each broker get a token; metaservers get only the hashes of the tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import parse_qsl, unquote, urlsplit

from ....protocol.access.tokens import make_token, token_hash
from ....protocol.address import is_host
from ....protocol.copies import COPIES_MAX
from ....protocol.errors import ConfigError
from ....protocol.text import PORT_MAX, parse_number, url_problem

BROKER_FILE = "broker.token"
"""Name of the file that contains the token of a host's broker, next to the settings."""


class ClusterTokens:
    """
    The tokens of a new cluster. The token of `admin` is shown once and never written to a file.

    Args:
        groups: the broker group of each host that has a broker.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        self._groups = groups
        self.admin = make_token(secrets.randbits)
        self.of_host = {host: make_token(secrets.randbits) for host in groups}

    @property
    def for_metaservers(self) -> dict[str, object]:
        """The access settings of a metaserver."""
        hashes = [
            f"{self._groups[host]}:{token_hash(token)}" for host, token in self.of_host.items()
        ]
        return {
            "access": "on",
            "admin_token_hash": token_hash(self.admin),
            "broker_token_hashes": hashes,
        }

    @property
    def for_brokers(self) -> dict[str, object]:
        """The access settings of a broker."""
        return {"access": "on", "token_file": BROKER_FILE}


SETTINGS_FILE = "keylane.toml"
CONFIG_FOLDER = "/etc/keylane"
HOSTS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """
    The hosts, ports and folders of a new cluster.

    Raises:
        ConfigError: some values are invalid, or a host is repeated; the message lists all problems.
    """

    hosts: Sequence[str]
    """Names or addresses at which the hosts are reached."""
    postgresql: str | None
    """URL of the metaservers' database. If None, the only metaserver runs on the first host, with
    an embedded database.
    """
    data: str
    """Folder for stored data, on each host."""
    meta_port: int
    broker_port: int
    meta_only: Sequence[str] = ()
    """Hosts with a metaserver but no broker. If there are any, the hosts in `hosts` have only
    brokers.
    """
    one_group: bool = False
    """True if the hosts in `hosts` are one broker group: the first one has the broker, and the
    others copies of its data folder.
    """
    name: str = ""
    """Name of the cluster, which prevents programs and databases of different clusters from being
    mixed up; "" for none.
    """

    def __post_init__(self) -> None:
        hosts = self.all_hosts
        problems = [
            f"{host!r:.80} is not a host name or address" for host in hosts if not is_host(host)
        ]
        duplicates = sorted({host for host in hosts if hosts.count(host) > 1})
        problems += [f"{host} is given twice" for host in duplicates]
        if not 0 < len(self.hosts) <= HOSTS_MAX:
            problems.append(f"a cluster has 1 to {HOSTS_MAX} hosts, not {len(self.hosts)}")
        if len(self.meta_only) > HOSTS_MAX:
            problems.append(f"a cluster has up to {HOSTS_MAX} metaservers")
        if len(self.meta_only) > 1 and self.postgresql is None:
            problems.append("several metaservers need a database that they share (postgresql)")
        if self.meta_port == self.broker_port:
            problems.append("metaserver and broker need two ports")
        if self.one_group and len({self.meta_port, self.broker_port, self.broker_port + 1}) < 3:
            problems.append("the port behind that of the brokers is for their health")
        if self.one_group and len(self.hosts) > COPIES_MAX:
            problems.append(f"a broker group has up to {COPIES_MAX} data folders")
        if not self.data.startswith("/"):
            problems.append(
                f"the folder for data on the hosts is an absolute path, not {self.data}"
            )
        if self.postgresql is not None and not self.postgresql.startswith(
            ("postgresql://", "postgresql+asyncpg://")
        ):
            problems.append("the database is postgresql://user:password@host/name")
        elif self.postgresql is not None and (url_error := url_problem(self.postgresql, new=True)):
            problems.append(f"cannot use the URL of --postgresql: {url_error}")
        elif self.postgresql is not None:
            problems += _database_problems(self.postgresql)
        if problems:
            raise ConfigError("; ".join(problems), problems=len(problems))

    @property
    def all_hosts(self) -> list[str]:
        """All hosts of the cluster, including those without a broker."""
        return [*self.hosts, *self.meta_only]

    @property
    def meta_hosts(self) -> Sequence[str]:
        """The hosts with a metaserver: several if they share a database, otherwise only one."""
        if self.meta_only:
            return self.meta_only
        return self.hosts if self.postgresql else self.hosts[:1]

    @property
    def metaservers(self) -> list[str]:
        """The addresses of all metaservers, as `host:port`."""
        return [join_address(host, self.meta_port) for host in self.meta_hosts]

    def group_of(self, host: str) -> str:
        """Return the name of the broker group on a host."""
        if self.one_group:
            return "g1"
        return f"g{list(self.hosts).index(host) + 1}"

    def settings_of(self, host: str, tokens: ClusterTokens) -> str:
        """Return the TOML settings file for the programs on a host."""
        tables = []
        if host in self.meta_hosts:
            tables.append(toml_table("metaserver", self._metaserver_settings(host, tokens)))
        if host in self.hosts:
            tables.append(toml_table("broker", self._broker_settings(host, tokens)))
        header = (
            "# Paths of certificates are relative to this file. SIGHUP makes a running program "
            "read it again.\n\n"
        )
        return header + "\n".join(tables)

    def _broker_settings(self, host: str, tokens: ClusterTokens) -> dict[str, object]:
        group = self.group_of(host)
        return {
            "group": group,
            **self._cluster_setting(),
            "data": f"{self.data}/broker-{group}",
            "meta": self.metaservers,
            **listen_settings(host),
            "port": self.broker_port,
            **tokens.for_brokers,
            **(
                copy_settings(self.broker_port, follows=host != self.hosts[0])
                if self.one_group
                else {}
            ),
        }

    def _metaserver_settings(self, host: str, tokens: ClusterTokens) -> dict[str, object]:
        number = list(self.meta_hosts).index(host) + 1
        url = self.postgresql and self.postgresql.replace(
            "postgresql://", "postgresql+asyncpg://", 1
        )
        return {
            "data": f"{self.data}/metaserver-{number}",
            **self._cluster_setting(),
            **({"database_url": url} if url else {}),
            **listen_settings(host),
            "port": self.meta_port,
            **tokens.for_metaservers,
        }

    def _cluster_setting(self) -> dict[str, object]:
        return {"cluster": self.name} if self.name else {}

    def units_of(self, host: str, keylane: str) -> dict[str, str]:
        """Return a host's systemd units by file name. `keylane` is the path of the command."""
        hosts = {"broker": self.hosts, "metaserver": self.meta_hosts}
        programs = [name for name, members in hosts.items() if host in members]
        return {
            f"keylane-{name}.service": systemd_unit(name, keylane, self.data) for name in programs
        }


def join_address(host: str, port: int) -> str:
    """Return the address of a server, as host:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_settings(host: str) -> dict[str, object]:
    """Return the settings for listening: on the address of the host, or on all addresses if the
    host is given by name, because a name may have several.
    """
    try:
        ip_address(host)
        address: dict[str, object] = {"host": host}
    except ValueError:
        address = {"host": "0.0.0.0", "advertised_host": host}  # noqa: S104 - TLS is served
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_ca": "ca.pem"}
    return address | files


def copy_settings(port: int, *, follows: bool) -> dict[str, object]:
    """Return the settings of a broker that has the port `port` and whose place a copy may take, or
    of a copy.
    """
    return {"follow": follows, "failover": True, "health_port": port + 1}


def toml_table(name: str, values: Mapping[str, object]) -> str:
    """Return a table of a settings file."""
    # JSON strings and lists of strings are valid TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, ""])


MEMORY_MAX = {"broker": "2G", "metaserver": "1G"}
"""The most memory of a program, beyond which systemd ends it and starts it again. Containers have
the same limits in deploy/kubernetes.
"""


def systemd_unit(program: str, keylane: str, data: str, config: str = CONFIG_FOLDER) -> str:
    """Return the systemd unit of a program whose data are below the folder `data`, and whose
    settings are in the folder `config`.
    """
    return f"""\
[Unit]
Description=keylane {program}
Wants=network-online.target
After=network-online.target time-sync.target

[Service]
Type=notify
TimeoutStartSec=30min
WatchdogSec=30
User=keylane
Group=keylane
ExecStart={keylane} {program} run --config {config}/{SETTINGS_FILE}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=65536
MemoryMax={MEMORY_MAX[program]}
Environment=PYTHONFAULTHANDLER=1
UMask=0077
ReadWritePaths={data}
NoNewPrivileges=true
PrivateTmp=true
PrivateDevices=true
ProtectSystem=strict
ProtectHome=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectClock=true
ProtectHostname=true
ProtectProc=invisible
ProtectControlGroups=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
CapabilityBoundingSet=
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def _database_problems(url: str) -> list[str]:
    """Return a list of what a database URL lacks to be usable by all hosts of a cluster."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if "\0" in unquote(url):
        return ["the URL of --postgresql has the character U+0000"]
    if not (parts.hostname or query.get("host")) or not parts.path.strip("/"):
        return ["the URL of --postgresql needs a host and a name: postgresql://user@host/name"]
    if not 0 < (parse_number(query.get("port", "5432")) or 0) <= PORT_MAX:
        return [f"the port of --postgresql is not a number from 1 to {PORT_MAX}"]
    return []
