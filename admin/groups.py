"""An admin's calls about what is stored of consumer groups: made with a start, given a policy, suspended and resumed."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.groups import (
    CreateGroup,
    FailurePolicy,
    FullPolicy,
    GroupSettings,
    SetGroup,
    StartAt,
    SuspendGroup,
)
from ..protocol.ids import check_name
from ..protocol.progress import CanceledReset
from ..protocol.reading.instants import check_unit
from ..protocol.routing import ConsumeStrategy
from .arguments import check_where, checked, mapping_of
from .calls import ClusterCalls


class GroupCalls(ClusterCalls):
    """The part of an admin that is about the settings of consumer groups."""

    async def create_group(
        self,
        subject: str,
        group: str,
        *,
        start: StartAt | str = StartAt.EARLIEST,
        at_ms: int | None = None,
        cursors: Mapping[int, int] | None = None,
        consume_strategy: ConsumeStrategy | str = ConsumeStrategy.EXCLUSIVE,
    ) -> GroupSettings:
        """
        Make a consumer group, and fix where it begins; a repeat changes nothing.

        Everything that is stored from this call's answer on is delivered to the group.  Partitions that are opened later, as
        by a resize, are read from their first message.

        Args:
            start: "earliest", "latest", "time" or "cursors".
            at_ms: milliseconds since 1970.  For "time": the group begins at the first message stored at or after it.
                For "cursors": when they were taken, which tells a repeat from another start.
            cursors: for "cursors": partition id → first offset; a partition that is not named is read from its first message.
            consume_strategy: "exclusive" or "shared".

        Raises:
            SubjectUnknownError
            OffsetOutOfRangeError: messages behind a cursor are gone.
            GroupExistsError: it exists, with another start or strategy.
            GroupDeletedError: a group of this name is being deleted.
            GroupStartUnfinishedError: it is made, and a broker has not stored its start yet.
            OverloadedError: the subject has as many groups as it may have.
        """
        check_where("start", start, time="at_ms", cursors="cursors")
        check_unit("at_ms", at_ms)
        fields = {
            "start": {
                "at": start,
                "at_ms": at_ms,
                "cursors": None if cursors is None else mapping_of("cursors", cursors),
            },
            "strategy": consume_strategy,
        }
        body = checked(CreateGroup, fields, strategy="consume_strategy")
        return await self._meta.create_group(*_names(subject, group), body)

    async def group_settings(self, subject: str, group: str) -> GroupSettings:
        """
        What is stored of a consumer group: its start, its failure policy, what an operator has suspended.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._meta.group_settings(*_names(subject, group))

    async def set_group(
        self,
        subject: str,
        group: str,
        *,
        on_failure: FailurePolicy | str | None = None,
        on_full: FullPolicy | str | None = None,
        tries_max: int | None = None,
        backoff_first_ms: int | None = None,
        backoff_max_ms: int | None = None,
        forget: bool = False,
    ) -> GroupSettings:
        """
        Change the stored failure policy of a consumer group; its running consumers follow within a heartbeat.

        What is stored counts more than the code of the consumers; what is not stored is as their code says.

        Args:
            on_failure: "block", "park" or "dead": what becomes of a message that has failed `tries_max` times.
            on_full: "block" or "dead": what becomes of a key that is to be parked and finds no room.
            tries_max: 1 to 1_000_000.
            backoff_first_ms: the pause after the first try, in milliseconds; goes with `backoff_max_ms`.
            backoff_max_ms: the longest pause between two tries, in milliseconds.
            forget: forget first all that was stored of the policy.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PolicyInvalidError: the fields do not work together; nothing has changed.
        """
        fields = {"on_failure": on_failure, "on_full": on_full, "tries_max": tries_max}
        fields |= {
            "forget": forget,
            "backoff_first_ms": backoff_first_ms,
            "backoff_max_ms": backoff_max_ms,
        }
        return await self._meta.set_group(*_names(subject, group), checked(SetGroup, fields))

    async def suspend_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        Have a consumer group hand over its partitions, and get none until `resume_group`; a repeat changes nothing.

        Its consumers stay open.  The switch is stored, and holds for consumers that are started later.

        Args:
            client: only the consumers of this name, also if none is there now; others take their partitions over.

        Raises:
            SubjectUnknownError, GroupUnknownError
            SuspendedClientsError: too many clients are suspended by name.
        """
        return await self._switch(subject, group, client, suspended=True)

    async def resume_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        End what `suspend_group` with the same `client` has begun; clients that were suspended by name stay so.

        A consumer whose own code has suspended it gets nothing until its code resumes it.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._switch(subject, group, client, suspended=False)

    async def _switch(
        self, subject: str, group: str, client: str | None, *, suspended: bool
    ) -> GroupSettings:
        body = checked(SuspendGroup, {"suspended": suspended, "client": client})
        return await self._meta.suspend_group(*_names(subject, group), body)

    async def cancel_reset(self, subject: str, group: str) -> CanceledReset:
        """
        Cancel a `live` reset that waits until the group's consumers hand over: they go on where they were.

        Returns:
            What the reset would have set; a repeat returns the same.

        Raises:
            SubjectUnknownError, GroupUnknownError
            ResetForwardError: cursors may be set already, and the reset goes on by itself; it is done; or there is none.
        """
        return await self._meta.cancel_reset(*_names(subject, group))


def _names(subject: str, group: str) -> tuple[str, str]:
    return check_name("subject", subject), check_name("consumer group", group)
