"""Hidden subjects and their publication, as calls of an admin."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..protocol.control import SubjectView
from ..protocol.ids import check_name
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..protocol.operations import ROUTE_FINAL, HideSubject, Publication, PublishSubject
from ..protocol.settings import flag_problems, refuse_call
from .arguments import checked, mapping_of
from .calls import ClusterCalls

POLL_MS = 100


class PublicationCalls(ClusterCalls):
    """The calls of an admin that concern hidden subjects."""

    async def hide_subject(
        self,
        subject: str,
        hidden: str,
        *,
        partitions: int = 0,
        static: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        cut: bool = False,
    ) -> SubjectView:
        """
        Make a hidden subject, to be published in `subject`; again changes nothing.

        Messages are sent to it and read by its name; it has no consumer groups, and `subjects()` leaves it out.

        Args:
            partitions: of a `subject` that does not exist; `static` and `message_bytes_max` are of it as well.  A hidden
                subject beside an existing one has that one's ranges and settings.  0: `subject` must exist.
            cut: also seal the open partitions of `subject` and continue them by others, behind those of the hidden subject:
                it can then take the place of all that was stored before.  Returns before the cut is done.

        Raises:
            SubjectUnknownError, SubjectDeletedError, NotEnoughBrokersError
            PublishTargetError: `hidden` exists and is another subject, or was published.
            OperationRunningError: the partitions of `subject` are being changed.
            PublishOutdatedError: they have changed since the hidden subject was made, and are to be cut.
        """
        check_name("subject", subject)
        fields = {
            "partitions": partitions,
            "static": static,
            "message_bytes_max": message_bytes_max,
            "cut": cut,
        }
        body = checked(HideSubject, {"hidden": hidden, **fields})
        return await self._meta.hide_subject(subject, body)

    async def publish_subject(
        self,
        hidden: str,
        subject: str,
        *,
        replace: bool = False,
        starts: Mapping[str, Mapping[int, int]] | None = None,
        ends: Mapping[int, int] | None = None,
        subject_id: int = 0,
        revisions: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Publication:
        """
        Publish a hidden subject in `subject`, with one change of its route; again changes nothing and says how far it is.

        What is stored in `subject` stays before the messages of the hidden one.  Cancelled while it waits, it goes on.

        Args:
            replace: delete what is stored in `subject`: the hidden subject takes its name.
            starts: with `replace`, for each consumer group of `subject` the first offset that it has not handled in each
                partition of the hidden subject, by partition id.
            ends: with `replace`, for each partition of `subject` before the cut the end of those messages that the hidden
                subject has the rows of.  None: what is deleted is not looked at.
            subject_id: the id of the hidden subject: another one of its name is refused.  0: the one that has the name.
            revisions: with `starts`, for each group `revision` of `describe_group`, as it was before its cursors were looked
                at.  None: a reset since then is not noticed.
            wait: return when the route has changed, not at once.

        Raises:
            SubjectUnknownError, SubjectDeletedError, PublishTargetError
            PublishOutdatedError: the partitions of `subject` have changed since the hidden subject was made.
            OperationRunningError: they are being changed.
            PublishGroupsError, GroupBusyError: a group of a subject that is replaced has no position, or live consumers.
            PublishCursorsError: a group was reset, or had a consumer, since the look at its `revisions`; nothing is changed.
            PublishBehindError: a subject that is replaced has messages behind `ends`; nothing is changed.
        """
        check_name("subject", hidden)
        refuse_call(flag_problems(wait=wait))
        placed = {
            group: mapping_of(f"starts of {group!r:.60}", offsets)
            for group, offsets in mapping_of("starts", {} if starts is None else starts).items()
        }
        known = None if ends is None else mapping_of("ends", ends)
        seen = mapping_of("revisions", {} if revisions is None else revisions)
        body = checked(
            PublishSubject,
            {"target": subject, "replace": replace, "starts": placed, "ends": known}
            | {"subject_id": subject_id, "revisions": seen},
        )
        answer = await self._meta.publish_subject(hidden, body)
        while wait and answer.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            answer = await self._meta.publish_subject(hidden, body)
        return answer
