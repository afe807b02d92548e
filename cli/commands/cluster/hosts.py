"""`keylane cluster add-host` and `remove-host`: make the files of another broker's host, and take a
host out of a running cluster.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ....admin import Admin
from ....protocol.access.tokens import token_hash
from ....protocol.address import is_host, parse_address
from ....protocol.errors import ConfigError, Reason
from ....protocol.membership.views import BrokerView
from ....protocol.routing import PartitionState
from ....protocol.text import counted
from ...confirmation import confirm
from ...status import showing
from .certificates import CertificateAuthority, server_names
from .delivery import ClusterStep, bring
from .findings import Finding
from .folder import (
    AUTHORITY,
    AUTHORITY_KEY,
    HASHES,
    PUBLIC,
    SECRET,
    UNITS,
    ClusterFolder,
    Host,
    draw_token,
)
from .plan import (
    BROKER_FILE,
    CONFIG_FOLDER,
    HOSTS_MAX,
    SETTINGS_FILE,
    copy_settings,
    listen_settings,
    systemd_unit,
    toml_table,
)
from .reports import TIMEOUT_MS
from .served import folder_tls, token_differences


# ── growing ───────────────────────────────────────────────────────────────────────────────────────
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
    if not is_host(name):
        raise ConfigError(f"{name!r:.80} is not a host name or address")
    if name in folder.hosts:
        raise ConfigError(Reason.HOST_KNOWN, f"{path} has the host {name} already")
    if len(folder.hosts) >= HOSTS_MAX:
        raise ConfigError(f"a cluster has up to {HOSTS_MAX} hosts")
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
    authority = CertificateAuthority.load(
        path / AUTHORITY, path / AUTHORITY_KEY, dt.datetime.now(dt.UTC)
    )
    group = copy_of or await _free_group(folder)
    token, digest = draw_token()
    folder.put_hashes(add={digest: group})
    if has_metaserver:
        entries = tables["metaserver"].get(HASHES, [])
        tables["metaserver"][HASHES] = [*entries, f"{group}:{digest}"]
    tables["broker"] = _broker_table(
        model.tables["broker"], name, group, data, is_copy=bool(copy_of)
    )
    pair = authority.issue(server_names(name))
    settings = "\n".join(toml_table(program, table) for program, table in tables.items())
    files = {
        AUTHORITY: ((path / AUTHORITY).read_bytes(), PUBLIC),
        "server.pem": (pair.certificate, PUBLIC),
        "server.key": (pair.key, SECRET),
        BROKER_FILE: (f"{token}\n".encode(), SECRET),
        SETTINGS_FILE: (settings.encode(), SECRET),
    }
    for program, table in tables.items():
        unit = systemd_unit(program, keylane, str(PurePosixPath(table["data"]).parent))
        files[f"{UNITS[program]}.service"] = unit.encode(), PUBLIC
    folder.add_host(name, files)
    done = [f"{path / name} has the files of {name}, with broker group {group}"]
    grown = ClusterFolder.read(path)
    if has_metaserver:
        grown.put_metaservers(grown.metaservers)
        done.append(_told_metaservers(grown.metaservers))
    left = await bring(
        partial(token_differences, folder, token, wanted=True), folder.hosts.values(), deliver
    )
    new = grown.hosts[name]
    left += [_start_advice(new, address) for _, address in new.servers]
    if copy_of:
        left.append(_copy_advice(new))
    return ClusterStep(done, left)


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


def _broker_table(
    model: Mapping[str, Any], name: str, group: str, data: str, *, is_copy: bool
) -> dict[str, Any]:
    """Return the settings of a new broker: those of another one, but for its place."""
    parent = data or str(PurePosixPath(model["data"]).parent)
    place = {"group": group, "data": f"{parent}/broker-{group}", "token_file": BROKER_FILE}
    kept = {key: value for key, value in model.items() if key not in ("host", "advertised_host")}
    role: dict[str, object] = {"follow": False} if "follow" in model else {}
    if is_copy:
        role = copy_settings(model["port"], follows=True)
    return {**kept, **place, **listen_settings(name), **role}


def _start_advice(host: Host, address: str) -> Finding:
    return Finding(
        "it has not been started yet",
        f"Copy the files of {host.folder} to {CONFIG_FOLDER} on {host.name}, the units to "
        f"/etc/systemd/system, and run there: systemctl enable --now {host.units}",
        address,
    )


def _copy_advice(host: Host) -> Finding:
    return Finding(
        f"acks of broker group {host.group} do not wait for its copy on {host.name} yet",
        f"Set failover = true at the group's broker, restart it, and run: keylane broker copies "
        f"{host.group} --wanted 2",
    )


# ── shrinking ─────────────────────────────────────────────────────────────────────────────────────
async def remove_host(path: Path, name: str, *, yes: bool, deliver: str | None) -> ClusterStep:
    """
    Move the partitions away from a host, and remove its files and token once it has stopped.

    Raises:
        ConfigError: the host is unknown, or the cluster still needs it; its files were not changed.
    """
    folder = ClusterFolder.read(path)
    host = folder.host(name)
    own = [address for program, address in host.servers if program == "metaserver"]
    metaservers = [address for address in folder.metaservers if address not in own]
    if not metaservers:
        raise ConfigError(Reason.HOST_IN_USE, f"{name} has the only metaserver of the cluster")
    others = [other for other in folder.hosts.values() if other is not host]
    running = [address for _, address in host.servers if await _answers(address)]
    if host.group:
        async with Admin(metaservers, tls=folder_tls(folder)) as admin:
            brokers = {each.broker_group: each for each in (await admin.list_brokers()).brokers}
            broker = brokers.get(host.group)
            if broker is not None and any(other.group == host.group for other in others):
                _check_copies(broker, host, is_running=bool(running))
            elif broker is not None:
                await _empty(admin, host, is_running=bool(running), yes=yes)
    if running:
        advice = f"Run on {name}: systemctl disable --now {host.units}"
        left = [Finding("it still runs", advice, address) for address in running]
        return ClusterStep([f"no open or unread partition is on {name} alone"], left)
    # The host's folder goes last, so that a repeated call does what this one could not.
    rest = ClusterFolder(path, {other.name: other for other in others})
    tokens = folder.tokens_of(host)
    rest.put_hashes(add={}, drop=[token_hash(token) for token in tokens])
    done = []
    if own:
        rest.put_metaservers(metaservers)
        done.append(_told_metaservers(metaservers))
    left = []
    for token in tokens:
        ask = partial(token_differences, rest, token, wanted=False)
        left += await bring(ask, others, deliver)
    if not left:
        folder.remove_host(host)
        done.append(f"the files and the token of {name} are removed from {path}")
    return ClusterStep(done, left)


def _told_metaservers(addresses: Iterable[str]) -> str:
    return (
        f"the settings of all brokers name the metaservers {', '.join(addresses)}: bring them to "
        "the hosts before each broker's next restart, and tell the clients"
    )


async def _answers(address: str) -> bool:
    """Return True if a server listens at an address."""
    try:
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            _, writer = await asyncio.open_connection(*parse_address(address))
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def _check_copies(broker: BrokerView, host: Host, *, is_running: bool) -> None:
    """Raise ConfigError if a host serves its broker group, and no copy can take its place, or none
    has taken it.
    """
    if broker.address != host.broker_address:
        return
    if is_running and broker.folders > 1:
        return
    problem = (
        "no copy has taken its place" if broker.folders > 1 else "no copy has all its messages"
    )
    raise ConfigError(
        Reason.HOST_IN_USE, f"{host.name} has the broker of {host.group}, and {problem} yet"
    )


async def _empty(admin: Admin, host: Host, *, is_running: bool, yes: bool) -> None:
    """Move the open partitions of a host's broker group away. Raises ConfigError if others stay, or
    if its broker cannot seal them.
    """
    open_count = sum(is_open for is_open, _ in await _partitions(admin, host.group))
    still_open = counted(open_count, "open partition")
    if open_count and not is_running:
        raise ConfigError(
            Reason.HOST_IN_USE,
            f"{host.group} has {still_open}, and its broker on {host.name} does not answer: start "
            "it, or give its partitions up with "
            f"`keylane broker evacuate {host.group} --accept-loss`",
        )
    if open_count:
        confirm(
            f"{host.group} has {still_open}. Move them to other brokers?", yes=yes, required=True
        )
        with showing(f"moving the partitions of {host.group}"):
            for operation in (await admin.evacuate(host.group)).operations:
                await admin.wait(operation)
    else:
        await admin.cordon(host.group)
    left = await _partitions(admin, host.group)
    if left:
        subjects = sorted({subject for _, subject in left})
        raise ConfigError(
            Reason.HOST_IN_USE,
            f"{host.group} on {host.name} still stores {counted(len(left), 'partition')} of "
            f"{_few(subjects)}, until its groups have read them and retention has removed them",
        )


def _few(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {counted(len(others), 'other subject')}" if others else first


async def _partitions(admin: Admin, group: str) -> list[tuple[bool, str]]:
    """Return for each partition that a broker group stores whether it is open, and its subject."""
    found = []
    for summary in await admin.list_subjects(hidden=True):
        described = await admin.describe_subject(summary.subject)
        found += [
            (part.state is PartitionState.OPEN, summary.subject)
            for part in described.partitions
            if part.broker_group == group
        ]
    return found
