"""Builds the texts of settings and systemd units for the hosts of a new cluster; writes nothing.

The first tokens of a new cluster: one for the administrator and one for each broker; metaservers
get only the hashes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from ....protocol.access.tokens import make_token, token_hash
from ....protocol.address import is_host
from ....protocol.errors import ConfigError
from ....protocol.text import url_problem

BROKER_FILE = "broker.token"
"""Name of the file with the token of a host's broker, next to the settings."""


class ClusterTokens:
    """
    New tokens; that of `admin` is shown once, and never written.

    Args:
        brokers: names of the broker groups.
    """

    def __init__(self, brokers: Sequence[str]) -> None:
        self.admin = make_token(secrets.randbits)
        self.of_broker = {name: make_token(secrets.randbits) for name in brokers}

    @property
    def for_metaservers(self) -> dict[str, object]:
        """The settings of a metaserver that concern access."""
        hashes = [f"{name}:{token_hash(token)}" for name, token in self.of_broker.items()]
        return {
            "access": "on",
            "admin_token_hash": token_hash(self.admin),
            "broker_token_hashes": hashes,
        }

    @property
    def for_brokers(self) -> dict[str, object]:
        """The settings of a broker that concern access."""
        return {"access": "on", "token_file": BROKER_FILE}


SETTINGS_FILE = "keylane.toml"
CONFIG_FOLDER = "/etc/keylane"
HOSTS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """
    The hosts, ports and folders of a new cluster.

    Raises:
        ConfigError: it lists every host that is no name or address, or is given twice, and all
            other invalid values.
    """

    hosts: Sequence[str]
    """The names or addresses by which the hosts are reached."""
    postgresql: str | None
    """URL of the metaservers' database; None: one metaserver on the first host, with an embedded
    database.
    """
    data: str
    """Folder for stored data, on each host."""
    meta_port: int
    broker_port: int
    meta_only: Sequence[str] = ()
    """Hosts with a metaserver and no broker; if there are any, other hosts have only brokers."""
    name: str = ""
    """The name of the cluster, which protects against mixing programs and databases of two
    clusters; "" for none.
    """

    def __post_init__(self) -> None:
        given = self.all_hosts
        problems = [
            f"{host!r:.80} is no host name or address" for host in given if not is_host(host)
        ]
        twice = sorted({host for host in given if given.count(host) > 1})
        problems += [f"{host} is given twice" for host in twice]
        if not 0 < len(self.hosts) <= HOSTS_MAX:
            problems.append(f"a cluster has 1 to {HOSTS_MAX} hosts, not {len(self.hosts)}")
        if len(self.meta_only) > HOSTS_MAX:
            problems.append(f"a cluster has up to {HOSTS_MAX} metaservers")
        if len(self.meta_only) > 1 and self.postgresql is None:
            problems.append("several metaservers need a database that they share (postgresql)")
        if self.meta_port == self.broker_port:
            problems.append("metaserver and broker need two ports")
        if not self.data.startswith("/"):
            problems.append(
                f"the folder for data on the hosts is an absolute path, not {self.data}"
            )
        if self.postgresql is not None and not self.postgresql.startswith(
            ("postgresql://", "postgresql+asyncpg://")
        ):
            problems.append("the database is postgresql://user:password@host/name")
        elif self.postgresql is not None and (unescaped := url_problem(self.postgresql, new=True)):
            problems.append(f"cannot use the URL of --postgresql: {unescaped}")
        if problems:
            raise ConfigError("; ".join(problems), problems=len(problems))

    @property
    def all_hosts(self) -> list[str]:
        """All hosts of the cluster."""
        return [*self.hosts, *self.meta_only]

    @property
    def meta_hosts(self) -> Sequence[str]:
        """The hosts that have a metaserver: several if they share a database, otherwise one."""
        if self.meta_only:
            return self.meta_only
        return self.hosts if self.postgresql else self.hosts[:1]

    @property
    def metaservers(self) -> list[str]:
        """The addresses of all metaservers."""
        return [_address(host, self.meta_port) for host in self.meta_hosts]

    def group_of(self, host: str) -> str:
        """Return the name of the broker group on a host."""
        return f"g{list(self.hosts).index(host) + 1}"

    def settings_of(self, host: str, tokens: ClusterTokens) -> str:
        """Return the TOML file for the programs of a host."""
        tables = []
        if host in self.meta_hosts:
            tables.append(_table("metaserver", self._metaserver_of(host, tokens)))
        if host in self.hosts:
            tables.append(_table("broker", self._broker_of(host, tokens)))
        head = (
            "# Paths of certificates are relative to this file. SIGHUP makes a running program "
            "read it again.\n\n"
        )
        return head + "\n".join(tables)

    def _broker_of(self, host: str, tokens: ClusterTokens) -> dict[str, object]:
        group = self.group_of(host)
        return {
            "group": group,
            **self._named(),
            "data": f"{self.data}/broker-{group}",
            "meta": self.metaservers,
            **_serving(host),
            "port": self.broker_port,
            **tokens.for_brokers,
        }

    def _metaserver_of(self, host: str, tokens: ClusterTokens) -> dict[str, object]:
        number = list(self.meta_hosts).index(host) + 1
        url = self.postgresql and self.postgresql.replace(
            "postgresql://", "postgresql+asyncpg://", 1
        )
        return {
            "data": f"{self.data}/metaserver-{number}",
            **self._named(),
            **({"database_url": url} if url else {}),
            **_serving(host),
            "port": self.meta_port,
            **tokens.for_metaservers,
        }

    def _named(self) -> dict[str, object]:
        return {"cluster": self.name} if self.name else {}

    def units_of(self, host: str, keylane: str) -> dict[str, str]:
        """Return the systemd units of a host by file name; `keylane` is the path of the command."""
        hosts = {"broker": self.hosts, "metaserver": self.meta_hosts}
        programs = [name for name, having in hosts.items() if host in having]
        return {f"keylane-{name}.service": _unit(name, keylane, self.data) for name in programs}


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _serving(host: str) -> dict[str, object]:
    """Return where a program listens: on its address, or for a name on all addresses, because a
    name may have several.
    """
    try:
        ip_address(host)
        place: dict[str, object] = {"host": host}
    except ValueError:
        place = {"host": "0.0.0.0", "advertised_host": host}  # noqa: S104 - TLS is served
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_ca": "ca.pem"}
    return place | files


def _table(name: str, values: dict[str, object]) -> str:
    # A JSON string or list of strings is also valid TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def _unit(program: str, keylane: str, data: str) -> str:
    return f"""\
[Unit]
Description=keylane {program}
Wants=network-online.target
After=network-online.target time-sync.target

[Service]
Type=exec
User=keylane
Group=keylane
ExecStart={keylane} {program} run --config {CONFIG_FOLDER}/{SETTINGS_FILE}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=65536
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
