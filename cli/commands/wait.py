"""`keylane wait`: waits until a metaserver is ready and enough broker groups are available;
intended for scripts.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypedDict

from ...admin import Admin
from ...protocol.errors import (
    KeylaneError,
    OutcomeUnknownError,
    Reason,
    RetryRule,
    StorageError,
    UnavailableError,
)
from ...protocol.text import counted, listed
from ..options import OutputFormat
from ..screen import show_data, show_line
from ..status import showing

POLL_SECONDS = 0.1


class ReadyServers(TypedDict):
    """The broker groups that are available, as JSON."""

    ready: bool
    brokers: list[str]
    waited_s: float


async def wait_for_servers(
    meta: str, output: OutputFormat, *, brokers: int, timeout_s: float
) -> None:
    """
    Wait until a metaserver is ready and `brokers` broker groups are available, for at most
    `timeout_s` seconds.

    Raises:
        NotSentError, OutcomeUnknownError: no metaserver responded in time.
        StorageError, UnavailableError: the metaserver did not become ready, or too few broker
            groups became available, in time.
        KeylaneError: raised immediately if waiting cannot help, for example because another program
            responds.
    """
    started_at = time.monotonic()
    last_error: KeylaneError = OutcomeUnknownError.of_read("no metaserver answered")
    names: list[str] = []
    with showing(lambda: f"waiting for {meta}: {last_error.message}"):
        async with Admin(meta) as admin:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        try:
                            names = await _available_groups(admin, brokers)
                            break
                        except KeylaneError as error:
                            if error.retry is RetryRule.NEVER and not isinstance(
                                error, StorageError
                            ):
                                raise
                            last_error = error
                        await asyncio.sleep(POLL_SECONDS)
            except TimeoutError:
                text = f"after {timeout_s:g} s: {last_error.message}"
                raise last_error.copy(message=text) from last_error
    waited_s = time.monotonic() - started_at
    if output is not OutputFormat.TABLE:
        show_data(output, ReadyServers(ready=True, brokers=names, waited_s=round(waited_s, 3)))
        return
    groups = counted(len(names), "broker group is", "broker groups are")
    show_line(f"ready after {waited_s:.1f} s: {groups} available: {listed(names)}")


async def _available_groups(admin: Admin, count: int) -> list[str]:
    """Return the names of the available broker groups. Raises an error if there are fewer than
    `count` or the metaserver is not ready.
    """
    health = await admin.health()
    if not health.ready:
        raise StorageError(f"the metaserver is not ready: {health.reason}")
    brokers = (await admin.list_brokers()).brokers
    names = sorted(
        broker.broker_group for broker in brokers if broker.available and broker.writable
    )
    if len(names) < count:
        groups = counted(count, "broker group is", "broker groups are")
        unavailable = [
            f"{view.broker_group} {view.state}"
            for view in brokers
            if view.broker_group not in names
        ]
        others = f"; {listed(unavailable)}" if unavailable else ""
        raise UnavailableError(
            Reason.NOT_ENOUGH_BROKERS,
            f"{len(names)} of {groups} available: {listed(names)}{others}",
        )
    return names
