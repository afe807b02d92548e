"""`keylane cluster remove-host`: takes a host out of a running cluster.

the open partitions move to other brokers ─▶ the others are read and removed ─┐
or the broker group moves to another host, as a whole ────────────────────────┴▶ its programs
are stopped ─▶ its token and its files are removed
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ....admin import Admin
from ....protocol.access.tokens import token_hash
from ....protocol.address import parse_address
from ....protocol.errors import ConfigError, Reason
from ....protocol.membership.views import BrokerView
from ....protocol.routing import PartitionState
from ....protocol.text import counted
from ...confirmation import confirm
from ...health import TIMEOUT_MS
from ...status import showing
from .delivery import ClusterStep, bring
from .findings import Finding
from .folder import ClusterFolder, Host
from .hosts import metaservers_line
from .moving import end_moves_to, find_leaving, move_group, put_back
from .served import folder_tls, token_differences


async def remove_host(
    path: Path,
    name: str,
    *,
    to: str,
    data: str,
    keylane: str,
    yes: bool,
    deliver: str | None,
) -> ClusterStep:
    """
    Move the partitions or the broker group away from a host, and remove its files and token once it
    has stopped.

    Args:
        to: the host to which the broker group moves, as a whole; "": the open partitions move to
            other brokers.
        data: folder for stored data on that host; "" for that of its other programs.
        keylane: path of the keylane command on that host.

    Raises:
        ConfigError: the host is unknown, or the cluster still needs it; its files were not changed.
        KeylaneError: the broker group cannot be handed over now.
    """
    folder = ClusterFolder.read(path)
    host = folder.host(name)
    own = [address for program, address in host.servers if program == "metaserver"]
    metaservers = [address for address in folder.metaservers if address not in own]
    if not metaservers:
        raise ConfigError(Reason.HOST_IN_USE, f"{name} has the only metaserver of the cluster")
    second = [each for each in folder.hosts if each.startswith(f"{name}/")]
    if second:
        raise ConfigError(Reason.HOST_IN_USE, f"{name} has other brokers: remove {second[0]} first")
    running = [address for _, address in host.servers if await _answers(address)]
    done: list[str] = []
    async with Admin(metaservers, tls=folder_tls(folder)) as admin:
        leaving = await find_leaving(admin, folder, host, to)
        if leaving is not None:
            if folder.leaving(host) is None:
                text = f"Move broker group {host.group} from {name} to {to}?"
                confirm(text, yes=yes, required=True)
            step = await move_group(
                admin, folder, host, leaving, data=data, keylane=keylane, deliver=deliver
            )
            if step.left:
                return step
            done += step.done
            folder = ClusterFolder.read(path)
        others = [other for other in folder.hosts.values() if other.name != name]
        if leaving is None and host.group:
            await _give_up_broker(admin, host, others, is_running=bool(running), yes=yes)
        if running:
            advice = f"Run on {host.machine}: systemctl disable --now {host.units}"
            left = [Finding("it still runs", advice, address) for address in running]
            done = done or [f"no open or unread partition is on {name} alone"]
            return ClusterStep(done, left)
        # The host's folder goes last, so that a repeated call does what this one could not.
        rest = ClusterFolder(path, {other.name: other for other in others})
        if leaving is not None:
            await put_back(admin, host, leaving)
        await end_moves_to(admin, rest, host)
    tokens = folder.tokens_of(host)
    rest.put_hashes(add={}, drop=[token_hash(token) for token in tokens])
    if own:
        rest.put_metaservers(metaservers)
        done.append(metaservers_line(metaservers))
    left = []
    for token in tokens:
        ask = partial(token_differences, rest, token, wanted=False)
        left += await bring(ask, others, deliver)
    if not left:
        folder.remove_host(host)
        done.append(f"the files and the token of {name} are removed from {path}")
    return ClusterStep(done, left)


async def _give_up_broker(
    admin: Admin, host: Host, others: Sequence[Host], *, is_running: bool, yes: bool
) -> None:
    """See that nothing is on the host's broker alone. Raises ConfigError if something is."""
    brokers = {each.broker_group: each for each in (await admin.list_brokers()).brokers}
    broker = brokers.get(host.group)
    if broker is None:
        return
    if any(other.group == host.group for other in others):
        _check_copies(broker, host, is_running=is_running)
    else:
        await _empty(admin, host, is_running=is_running, yes=yes)


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
