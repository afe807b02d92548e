"""Moves the broker group of a host to another host, as a whole.

    the files of a copy ─▶ its follower runs ─▶ acks wait for it ─▶ it takes the broker's place
        ─▶ as many data folders as before

All but the number of data folders is read from the cluster, so it continues after an interruption.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from ....admin import Admin, BrokerView
from ....protocol.control import Health
from ....protocol.copies import COPIES_MAX
from ....protocol.errors import ConfigError, KeylaneError, Reason
from ....protocol.text import format_age, format_size
from ....rpc.http_network import HttpNetwork, client_network
from ...health import fetch_health
from ...status import showing
from .delivery import ClusterStep, bring
from .folder import ClusterFolder, Host, Leaving
from .hosts import add_copy, check_new_host, start_advice
from .served import folder_tls, token_differences

POLL_S = 0.5
SERVES_S = 20.0
"""How long a copy that has the broker's place may take to report itself, in seconds."""
AGAIN = "Ctrl-C ends the command at any time, and the same command continues"


async def find_leaving(admin: Admin, folder: ClusterFolder, host: Host, to: str) -> Leaving | None:
    """
    Return where the broker group of a host moves; None if it does not.

    Args:
        to: where it is to move; "" only continues.

    Raises:
        ConfigError: it cannot move there, or moves elsewhere already; nothing was changed.
    """
    known = folder.leaving(host)
    if known is not None:
        if to not in ("", known.to):
            raise ConfigError(
                Reason.HOST_IN_USE,
                f"the broker group of {host.name} moves to {known.to} already; to end that, remove "
                f"{known.to}/{host.group}, or {known.to} if that is a host of its own",
            )
        return known
    if not to:
        return None
    if not host.group:
        raise ConfigError(f"{host.name} has no broker that could move to {to}")
    if to == host.machine:
        raise ConfigError(f"{to} is the host that is to be removed")
    if all(other.machine != to for other in folder.hosts.values()):
        check_new_host(folder, to)
    _check_serves(await _find_broker(admin, host), host)
    stored = await admin.copies(host.group)
    if stored.wanted >= COPIES_MAX:
        raise ConfigError(
            Reason.HOST_IN_USE,
            f"{host.group} is to have {COPIES_MAX} data folders, the most that there may be; make "
            f"room for one more: keylane broker copies {host.group} --wanted {COPIES_MAX - 1}",
        )
    return Leaving(to, stored.wanted, stored.least)


async def move_group(
    admin: Admin,
    folder: ClusterFolder,
    host: Host,
    leaving: Leaving,
    *,
    data: str,
    keylane: str,
    deliver: str | None,
) -> ClusterStep:
    """
    Continue a move until something is left to do for the operator, or the host is not needed.

    Raises:
        ConfigError: the group's broker is silent, and no copy can take its place.
        BusyError: an operation changes partitions of the group.
        UnavailableError: the copy has not taken the place in time; the broker continues.
    """
    done = []
    target = _find_target(folder, host, leaving)
    if target is None:
        folder.put_leaving(host, leaving)
        name = add_copy(folder, host, leaving.to, data=data, keylane=keylane)
        done.append(f"{folder.path / name} has the files of a copy of broker group {host.group}")
        folder = ClusterFolder.read(folder.path)
        target = folder.host(name)
    ask = partial(token_differences, folder, target.token(), wanted=True)
    left = await bring(ask, folder.hosts.values(), deliver)
    probed = dict(target.servers)["broker"]
    network = client_network(folder_tls(folder))
    try:
        if await _probe(network, probed) is None:
            left.append(start_advice(target, probed))
        if left:
            return ClusterStep(done, left)
        return await _move(admin, host, target, leaving, done, partial(_probe, network, probed))
    finally:
        await network.close()


async def _move(
    admin: Admin,
    host: Host,
    target: Host,
    leaving: Leaving,
    done: list[str],
    probe: Callable[[], Awaitable[Health | None]],
) -> ClusterStep:
    """
    Wait until the copy is in the set, and let it take the broker's place.

    Args:
        probe: returns what the copy's follower says of itself; None if it does not answer.
    """
    broker = await _find_broker(admin, host)
    if broker.address != target.broker_address:
        # with a new number, the set has room for the copy beside those that are there
        await admin.set_copies(host.group, leaving.wanted + 1, least=leaving.least)
        copy_id = await _wait_for_copy(admin, host, target, probe)
        broker = await _find_broker(admin, host)
        if broker.address != host.broker_address:
            return ClusterStep(
                [*done, f"acks of {host.group} wait for the copy on {leaving.to}"], []
            )
        await admin.hand_over(host.group, copy_id=copy_id)
    await put_back(admin, host, leaving)
    await _wait_until_serves(admin, host, target)
    done.append(f"{leaving.to} serves broker group {host.group}, with all that {host.name} stores")
    return ClusterStep(done, [])


async def put_back(admin: Admin, host: Host, leaving: Leaving) -> None:
    """Let the broker group have as many data folders as before."""
    await admin.set_copies(host.group, leaving.wanted, least=leaving.least)


async def end_moves_to(admin: Admin, folder: ClusterFolder, removed: Host) -> None:
    """End the moves to a copy that is removed."""
    for host in folder.hosts.values():
        leaving = folder.leaving(host)
        if leaving is not None and (leaving.to, host.group) == (removed.machine, removed.group):
            await put_back(admin, host, leaving)
            folder.end_leaving(host)


def _find_target(folder: ClusterFolder, host: Host, leaving: Leaving) -> Host | None:
    for other in folder.hosts.values():
        if other is not host and (other.machine, other.group) == (leaving.to, host.group):
            return other
    return None


async def _find_broker(admin: Admin, host: Host) -> BrokerView:
    for broker in (await admin.list_brokers()).brokers:
        if broker.broker_group == host.group:
            return broker
    raise ConfigError(f"no broker of group {host.group} has ever run: remove {host.name} alone")


def _check_serves(broker: BrokerView, host: Host) -> None:
    if not broker.available:
        raise ConfigError(
            Reason.HOST_IN_USE,
            f"the broker of {host.group} at {broker.address} is {broker.state}, so nothing can be "
            "copied: start it",
        )


async def _probe(network: HttpNetwork, address: str) -> Health | None:
    try:
        return await fetch_health(network, address)
    except KeylaneError:
        return None


async def _wait_for_copy(
    admin: Admin, host: Host, target: Host, probe: Callable[[], Awaitable[Health | None]]
) -> str:
    """
    Wait until acks wait for the copy on a host, and return its id.

    Raises:
        ConfigError: its follower has ended, or there is no broker that it could follow.
    """
    progress = CopyProgress(f"copying {host.group} to {target.machine}")
    with showing(progress.text, advice=AGAIN):
        while True:
            health = await probe()
            if health is None:
                raise ConfigError(
                    Reason.HOST_IN_USE,
                    f"the follower of {host.group} on {target.machine} does not answer any more",
                )
            copy_id = str(health.details.get("copy_id", ""))
            if copy_id in (await admin.copies(host.group)).members:
                return copy_id
            broker = await _find_broker(admin, host)
            _check_serves(broker, host)
            with suppress(KeylaneError):  # it has stepped back
                copies = (await admin.broker_health(broker.address)).details.get("copies", {})
                lag_bytes = copies.get(copy_id, {}).get("bytes_behind")
                progress.note(lag_bytes, time.monotonic())
            await asyncio.sleep(POLL_S)


async def _wait_until_serves(admin: Admin, host: Host, target: Host) -> None:
    with showing(f"waiting for the broker of {host.group} on {target.machine}"):
        try:
            async with asyncio.timeout(SERVES_S):
                while True:
                    broker = await _find_broker(admin, host)
                    if broker.available and broker.address == target.broker_address:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ConfigError(
                Reason.HOST_IN_USE,
                f"the copy on {target.machine} has the place of the broker of {host.group}, and "
                "does not serve yet",
            ) from None


class CopyProgress:
    """How far a copy is behind its broker, and how long it takes until it is not."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def note(self, lag_bytes: int | None, now_s: float) -> None:
        """Note how many bytes the copy lacks; None if the broker does not know it."""
        if lag_bytes is not None:
            self._last = lag_bytes, now_s
            self._first = self._first or self._last

    def text(self) -> str:
        """Return what is shown."""
        if self._first is None or self._last is None:
            return f"{self._what}: waiting for its follower"
        (first, began_s), (left, now_s) = self._first, self._last
        text = f"{self._what}: {format_size(left)} left"
        if left < first:
            left_ms = 1000 * left * (now_s - began_s) / (first - left)
            text += f", about {format_age(round(left_ms))}"
        return text
