"""A batch job with a name, whose rows are published once, however often it runs. Network only.

    created      ─▶ fill the hidden subject, publish it
    taken        ─▶ a driver was killed before it had published: delete its hidden subject, and
                    create another
    published    ─▶ there is nothing to write

The hidden subject has the job's name, and the metaserver remembers which ones were published, for
its `history_retention_ms`.

Invariants
    A hidden subject that is deleted was not published, and a driver that still fills it is refused
    from then on.
    A job counts as published only when its publication is done; after a canceled publication it
    has another hidden subject.

Source: Spark runs a batch of `foreachBatch` again, with the same number, if it has not noted its
end.
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
    Create the hidden subject of a job with a name.

    Args:
        hidden: the name of the hidden subject; after a canceled publication a number is appended.
        subject_of: returns the hidden subject of a name and an id; with 0, of any id.
        timeout_ms: milliseconds that the deletion of an earlier run's rows may take.

    Returns:
        The name of the hidden subject and its id; the id is 0 if the job was published, so that
        there is nothing to write.

    Raises:
        PublishError: other drivers write the same job, and repeatedly create it again.
        SubjectDeletedError: a broker that has rows of an earlier run is unreachable.
        KeylaneError: the metaserver refuses, or does not answer.
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
