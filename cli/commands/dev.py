"""`keylane dev`: runs a complete cluster in this process, on the loopback interface, until
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from ...broker.app import run_follower, running_broker
from ...broker.settings import BrokerSettings
from ...metaserver.running import running_metaserver
from ...metaserver.settings import MetaserverSettings
from ...protocol.address import META_DEFAULT
from ...protocol.errors import AddressError, DataFolderError, KeylaneError, Reason, UnavailableError
from ...protocol.ids import check_name
from ...protocol.text import PORT_MAX, counted
from ...rpc.http_network import HttpNetwork
from ...rpc.listening import check_free, check_port
from ...rpc.program import Stop, announce_stop, print_line, run_program
from ..connection import open_admin, wait_for_brokers
from ..options import OutputFormat
from ..screen import show_data, show_error, show_line
from ..status import showing

log = logging.getLogger("keylane.cli")

BROKERS_DEFAULT = 2
REGISTER_TIMEOUT_S = 20.0
ORDER = '{"id": 100, "customer": "ada", "total": "12"}'
"""A value that the handlers of the tutorial can read."""
REMOVED_CHECK_S = 0.5
"""How often a running cluster looks whether its data folder is still there, in seconds."""
REMOVED_HINT = (
    "What was stored in it is lost. Stop keylane before you remove the folder; start it again for "
    "an empty cluster."
)


class DevCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The information shown about a running cluster."""

    ready: bool = True
    metaserver: str
    console: str
    """The address of the console, for a browser."""
    brokers: dict[str, str]
    """Maps each broker group to its address."""
    subjects: list[str]
    data: str
    copies: int = 1
    """How many data folders each broker group has."""
    seconds: float
    """How long it took to start, in seconds."""


def broker_count(data: Path, requested: int | None) -> int:
    """Return the number of brokers to run, which is the requested number, but at least the number
    of broker folders in `data`.
    """
    count = BROKERS_DEFAULT if requested is None else requested
    while (data / f"broker-{count + 1}").is_dir():
        count += 1
    return count


def prepare_data(data: Path) -> None:
    """
    Create the data folder if necessary and check that it is writable.

    Raises:
        DataFolderError: the folder cannot be created or written.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataFolderError(
            f"cannot use {data} as data folder: {error.strerror or error}", path=str(data)
        ) from error


def _inode(folder: Path) -> int | None:
    """Return the inode of a folder, None if there is no folder."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


async def _wait_for_stop(stop: asyncio.Event, data: Path) -> None:
    """
    Wait for a signal.

    Raises:
        DataFolderError: the data folder was removed or replaced. Files that are open would still
            take messages, which would be lost at the end.
    """
    inode = _inode(data)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVED_CHECK_S):
                await stop.wait()
        if _inode(data) != inode:
            error = DataFolderError(
                f"keylane stops, because its data folder {data} was removed", path=str(data)
            )
            error.hint = REMOVED_HINT
            raise error


async def _start_cluster(
    stack: AsyncExitStack,
    data: Path,
    port: int,
    *,
    brokers: int,
    copies: int,
    subjects: list[str],
    auto_create: str,
) -> DevCluster:
    started_at = time.monotonic()
    check_port(port)
    if port > PORT_MAX - brokers:
        raise AddressError(
            f"ports are 0 to {PORT_MAX}, and those after {port} are for "
            f"{counted(brokers, 'broker')}",
            port=port,
        )
    try:
        for number in range(brokers + 1 if port else 0):
            check_free("127.0.0.1", port + number)
    except AddressError as error:
        error.hint = (
            "If keylane dev already runs there, use it, or stop it. "
            f"The metaserver and {counted(brokers, 'broker')} use the ports {port} to "
            f"{port + brokers}: choose others with --port, or --port 0 for any free ones."
        )
        raise
    prepare_data(data)
    network = HttpNetwork()
    stack.push_async_callback(network.close)
    meta_settings = MetaserverSettings(data=data / "metaserver", port=port, auto_create=auto_create)
    metaserver = await stack.enter_async_context(running_metaserver(meta_settings, network=network))
    addresses = {}
    copied = []
    for number in range(1, brokers + 1):
        group = f"broker-{number}"
        settings = BrokerSettings(
            group=group,
            data=data / group,
            meta=(metaserver.address,),
            port=port + number if port else 0,
        )
        broker = await stack.enter_async_context(running_broker(settings, network=network))
        addresses[group] = broker.address
        copied += [
            replace(settings, data=data / f"{group}-copy-{index}", follow=True)
            for index in range(1, copies)
        ]
    async with open_admin(metaserver.address) as admin:
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                await wait_for_brokers(admin, brokers)
        except TimeoutError:
            raise UnavailableError(
                Reason.NOT_ENOUGH_BROKERS, "the brokers did not report to the metaserver"
            ) from None
        for each in copied:
            await stack.enter_async_context(_following(each, network))
        for group in addresses:
            stored = await admin.copies(group)
            if (stored.wanted, stored.may_share_machine) != (copies, copies > 1):
                await admin.set_copies(group, copies, may_share_machine=copies > 1)
        for subject in subjects:
            await admin.create_subject(subject)
    return DevCluster(
        metaserver=metaserver.address,
        console=f"http://{metaserver.address}/console",
        brokers=addresses,
        subjects=subjects,
        data=str(data),
        copies=copies,
        seconds=round(time.monotonic() - started_at, 2),
    )


@contextlib.asynccontextmanager
async def _following(settings: BrokerSettings, network: HttpNetwork) -> AsyncIterator[None]:
    """Keep a copy of a broker's folder in the block. What ends it earlier is logged."""
    stop = asyncio.Event()

    async def follow() -> None:
        try:
            await run_follower(settings, stop, network=network)
        except KeylaneError as error:
            log.error("the copy in %s has ended: %s", settings.data, error)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        stop.set()
        await task


def next_steps(cluster: DevCluster) -> str:
    """Return a text with the cluster's addresses and some commands to try."""
    subject = cluster.subjects[0] if cluster.subjects else "orders"
    lines = [
        (
            f"keylane is running, after {cluster.seconds:.1f} s; everything stored is in "
            f"{cluster.data}"
        ),
        f"  metaserver  {cluster.metaserver}",
        f"  console     {cluster.console}",
        *(f"  {group:<11} {address}" for group, address in cluster.brokers.items()),
        *_copies_line(cluster.copies),
        "next, in another terminal:",
    ]
    if cluster.metaserver != META_DEFAULT:
        lines.append(f"  export KEYLANE_META={cluster.metaserver}")
    if not cluster.subjects:
        lines.append(f"  keylane subject create {subject} --partitions 4")
    lines += [
        f"  keylane produce {subject} '{ORDER}' --key ada",
        f"  keylane consume {subject} --group trial",
        f"  keylane group describe {subject} trial",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def _copies_line(copies: int) -> list[str]:
    if copies == 1:
        return []
    folders = counted(copies, "data folder")
    return [
        f"  each has {folders}; acks wait for those that are up to date",
        "  all are on this machine, which may lose them at once",
    ]


def run_dev(
    output: OutputFormat,
    *,
    data: Path,
    port: int,
    brokers: int | None,
    copies: int,
    subjects: list[str],
    auto_create: str,
) -> int:
    """
    Run a cluster until SIGINT or SIGTERM.

    Returns:
        The exit status: 1 if the cluster could not start, otherwise 0.
    """
    status = 0
    count = broker_count(data, brokers)
    if brokers is not None and count > brokers:
        show_line(
            f"{data} has {count} brokers: all of them run, although --brokers is {brokers}",
            errors=True,
        )

    async def serve(stop: asyncio.Event) -> None:
        nonlocal status
        try:
            for subject in subjects:
                check_name("subject", subject)
            async with AsyncExitStack() as stack:
                with showing("starting the metaserver and the brokers"):
                    cluster = await _start_cluster(
                        stack,
                        data,
                        port,
                        brokers=count,
                        copies=copies,
                        subjects=subjects,
                        auto_create=auto_create,
                    )
                if output is not OutputFormat.TABLE:
                    show_data(output, cluster)
                else:
                    print(next_steps(cluster), flush=True)
                await _wait_for_stop(stop, data)
        except KeylaneError as error:
            show_error(error, output)
            status = 1

    def on_stop(stop: Stop) -> None:
        if output is not OutputFormat.TABLE:
            announce_stop("dev", stop)
        elif stop is Stop.STOPPING:
            print_line("keylane is stopping")
        elif not status:
            print_line(f"keylane has stopped; everything stored is in {data}")

    return run_program(serve, on_stop=on_stop) or status
