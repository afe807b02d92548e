"""`keylane cluster add-host`: makes the files of another broker's host."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ....admin import Admin
from ....protocol.address import is_host
from ....protocol.errors import ConfigError, Reason
from .certificates import CertificateAuthority, server_names
from .delivery import ClusterStep, bring
from .findings import Finding
from .folder import (
    AUTHORITY,
    AUTHORITY_KEY,
    HASHES,
    PUBLIC,
    SECRET,
    ClusterFolder,
    Host,
    config_folder,
    draw_token,
    unit_name,
)
from .plan import (
    BROKER_FILE,
    HOSTS_MAX,
    SETTINGS_FILE,
    copy_settings,
    listen_settings,
    systemd_unit,
    toml_table,
)
from .served import folder_tls, token_differences

OF_HOST = ("host", "advertised_host", "machine", "zone")
"""Settings of a broker that say where it runs."""


async def add_host(
    path: Path,
    name: str,
    *,
    copy_of: str,
    has_metaserver: bool,
    data: str,
    keylane: str,
    deliver: str | None,
) -> ClusterStep:
    """
    Write the files of a host with a broker, and let the metaservers know its token.

    Args:
        copy_of: the broker group of which the host is to have a copy; "" for a group of its own.
        has_metaserver: the host gets a metaserver as well.
        data: folder for stored data on the host; "" for that of another host.

    Raises:
        ConfigError: the host is known or cannot be one, or the authority cannot be used; nothing
            was changed.
    """
    folder = ClusterFolder.read(path)
    if name in folder.hosts:
        raise ConfigError(Reason.HOST_KNOWN, f"{path} has the host {name} already")
    check_new_host(folder, name)
    brokers = [host for host in folder.hosts.values() if host.group]
    model = next((host for host in brokers if copy_of in ("", host.group)), None)
    if model is None:
        known = ", ".join(sorted({host.group for host in brokers}))
        raise ConfigError(
            Reason.HOST_UNKNOWN, f"no host of {path} has the broker group {copy_of!r:.80}: {known}"
        )
    tables: dict[str, dict[str, Any]] = {}
    if has_metaserver:
        tables["metaserver"] = _metaserver_table(folder, name, data)
    authority = _load_authority(folder)
    group = copy_of or await _free_group(folder)
    place = f"{data or _data_parent(model)}/broker-{group}"
    tables["broker"] = _broker_table(
        model.tables["broker"], name, group, place, is_copy=bool(copy_of)
    )
    token = _write_host(folder, name, tables, authority, keylane)
    done = [f"{path / name} has the files of {name}, with broker group {group}"]
    grown = ClusterFolder.read(path)
    if has_metaserver:
        grown.put_metaservers(grown.metaservers)
        done.append(metaservers_line(grown.metaservers))
    left = await bring(
        partial(token_differences, folder, token, wanted=True), folder.hosts.values(), deliver
    )
    new = grown.hosts[name]
    left += [start_advice(new, address) for _, address in new.servers]
    if copy_of:
        left.append(_copy_advice(new))
    return ClusterStep(done, left)


def check_new_host(folder: ClusterFolder, name: str) -> None:
    """Raise ConfigError if a cluster cannot get a host with this name."""
    if not is_host(name):
        raise ConfigError(f"{name!r:.80} is not a host name or address")
    if len(folder.hosts) >= HOSTS_MAX:
        raise ConfigError(f"a cluster has up to {HOSTS_MAX} hosts")


def add_copy(folder: ClusterFolder, model: Host, machine: str, *, data: str, keylane: str) -> str:
    """
    Write the files of a host with a copy of the broker group of another one, and the hash of its
    token for the metaservers.

    Args:
        model: the host that has the broker group.
        machine: the host; if the cluster has it, it gets a second broker.
        data: folder for stored data on the host; "" for that of its other programs.

    Returns:
        The name of the new folder.

    Raises:
        ConfigError: the files cannot be written, or the authority cannot be used.
    """
    authority = _load_authority(folder)
    there = [host for host in folder.hosts.values() if host.machine == machine]
    name = f"{machine}/{model.group}" if there else machine
    place = f"{data or _data_parent((there or [model])[0])}/broker-{model.group}"
    settings = model.tables["broker"]
    if there:
        used = [
            port
            for host in there
            for table in host.tables.values()
            for port in (table["port"], table.get("health_port", 0))
        ]
        settings = {**settings, "port": max(used) + 1}
    table = _broker_table(settings, machine, model.group, place, is_copy=True)
    _write_host(folder, name, {"broker": table}, authority, keylane)
    return name


def _load_authority(folder: ClusterFolder) -> CertificateAuthority:
    return CertificateAuthority.load(
        folder.path / AUTHORITY, folder.path / AUTHORITY_KEY, dt.datetime.now(dt.UTC)
    )


def _write_host(
    folder: ClusterFolder,
    name: str,
    tables: dict[str, dict[str, Any]],
    authority: CertificateAuthority,
    keylane: str,
) -> str:
    """Write the files of a host with a new broker, and return the broker's token. Raises
    ConfigError.
    """
    group = tables["broker"]["group"]
    token, digest = draw_token()
    folder.put_hashes(add={digest: group})
    if "metaserver" in tables:
        entries = tables["metaserver"].get(HASHES, [])
        tables["metaserver"][HASHES] = [*entries, f"{group}:{digest}"]
    pair = authority.issue(server_names(name.partition("/")[0]))
    settings = "\n".join(toml_table(program, table) for program, table in tables.items())
    files = {
        AUTHORITY: ((folder.path / AUTHORITY).read_bytes(), PUBLIC),
        "server.pem": (pair.certificate, PUBLIC),
        "server.key": (pair.key, SECRET),
        BROKER_FILE: (f"{token}\n".encode(), SECRET),
        SETTINGS_FILE: (settings.encode(), SECRET),
    }
    for program, table in tables.items():
        data = str(PurePosixPath(table["data"]).parent)
        unit = systemd_unit(program, keylane, data, config_folder(name))
        files[f"{unit_name(name, program)}.service"] = unit.encode(), PUBLIC
    folder.add_host(name, files)
    return token


async def _free_group(folder: ClusterFolder) -> str:
    """Return a name that no broker group of the cluster has ever had."""
    async with Admin(folder.metaservers, tls=folder_tls(folder)) as admin:
        taken = {broker.broker_group for broker in (await admin.list_brokers()).brokers}
    taken |= {host.group for host in folder.hosts.values()}
    return next(name for number in range(1, 1_000_000) if (name := f"g{number}") not in taken)


def _metaserver_table(folder: ClusterFolder, name: str, data: str) -> dict[str, Any]:
    """Return the settings of another metaserver. Raises ConfigError if those that run cannot share
    their database.
    """
    model = next(
        host.tables["metaserver"] for host in folder.hosts.values() if "metaserver" in host.tables
    )
    if not str(model.get("database_url", "")).startswith("postgresql"):
        raise ConfigError("several metaservers need a database that they share (PostgreSQL)")
    kept = {key: value for key, value in model.items() if key not in ("host", "advertised_host")}
    parent = data or str(PurePosixPath(model["data"]).parent)
    return {**kept, "data": f"{parent}/metaserver-{name}", **listen_settings(name)}


def _data_parent(host: Host) -> str:
    """Return the folder below which the programs of a host have their data."""
    table = host.tables.get("broker") or host.tables["metaserver"]
    return str(PurePosixPath(table["data"]).parent)


def _broker_table(
    model: Mapping[str, Any], machine: str, group: str, data: str, *, is_copy: bool
) -> dict[str, Any]:
    """Return the settings of a new broker: those of another one, but for its place."""
    place = {"group": group, "data": data, "token_file": BROKER_FILE}
    kept = {key: value for key, value in model.items() if key not in OF_HOST}
    role: dict[str, object] = {"follow": False} if "follow" in model else {}
    if is_copy:
        role = copy_settings(model["port"], follows=True)
    return {**kept, **place, **listen_settings(machine), **role}


def start_advice(host: Host, address: str) -> Finding:
    """Return what is left to do for a program of a new host."""
    return Finding(
        "it has not been started yet",
        f"Copy the files of {host.folder} to {host.config_folder} on {host.machine}, the units to "
        f"/etc/systemd/system, and run there: systemctl enable --now {host.units}",
        address,
    )


def _copy_advice(host: Host) -> Finding:
    return Finding(
        f"acks of broker group {host.group} do not wait for its copy on {host.name} yet",
        f"Set failover = true at the group's broker, restart it, and run: keylane broker copies "
        f"{host.group} --wanted 2",
    )


def metaservers_line(addresses: Iterable[str]) -> str:
    """Return the line that says that brokers' settings name other metaservers."""
    return (
        f"the settings of all brokers name the metaservers {', '.join(addresses)}: bring them to "
        "the hosts before each broker's next restart, and tell the clients"
    )
