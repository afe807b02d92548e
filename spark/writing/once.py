"""A batch job with a name: its rows are published once, however often it is run.  Network only.

    made         ─▶ fill it, publish it
    taken        ─▶ a driver was killed before it had published: delete what it has left, make it anew
    published    ─▶ nothing to write

The hidden subject has the job's name, and the metaserver notes which ones were published, for its
`history_retention_ms`.

Invariants
    What is deleted was not published, and a driver that fills it still is refused from then on.
    A job counts as published only when its publication is done; after a canceled one it has another
    hidden subject.

Source: a batch of `foreachBatch` is run again if Spark has not noted its end, with the same number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...protocol.clock import Clock
from ...protocol.errors import PublishError, Reason, SubjectDeletedError
from .hidden import POLL_S, HiddenSubject


async def make_once(
    hidden: str, subject_of: Callable[[str, int], HiddenSubject], *, timeout_ms: int, clock: Clock
) -> tuple[str, int]:
    """
    Make the hidden subject of a job with a name.

    Args:
        hidden: its name; that of a later one, after a canceled publication, has a number behind it.
        subject_of: the hidden subject of a name, with the id that it has; 0: whatever id.
        timeout_ms: how long what is left of an earlier run may take to be deleted.

    Returns:
        The name of the hidden subject, and its id; 0: the job was published, and there is nothing
        to write.

    Raises:
        PublishError: other drivers write the same job, and make it anew again and again.
        SubjectDeletedError: a broker that has rows of an earlier run is away.
        KeylaneError: what the metaserver answers.
    """
    name, canceled = hidden, 0
    until_ms = clock.boot_ms() + timeout_ms
    while True:
        try:
            return name, (await subject_of(name, 0).make()).route.subject_id
        except SubjectDeletedError:
            if clock.boot_ms() >= until_ms:
                raise
            await asyncio.sleep(POLL_S)
        except PublishError as error:
            if error.reason is Reason.HIDDEN_TAKEN and clock.boot_ms() < until_ms:
                # While one is being published this waits, and then finds none of the name.
                await subject_of(name, 0).delete()
                continue
            if error.published_id is None:
                raise
            try:
                await subject_of(name, error.published_id).publish()
            except PublishError as refusal:
                if refusal.reason is not Reason.PUBLISH_OUTDATED:
                    raise
                canceled += 1
                name = f"{hidden}.{canceled}"
            else:
                return name, 0
