"""An admin's calls about access: tokens of principals, and their rights."""

from __future__ import annotations

from datetime import datetime

from ..protocol.access.principals import check_principal
from ..protocol.access.quota import NO_QUOTA, Quota, check_quota, check_sessions, check_together
from ..protocol.access.rights import ANY, AccessGrant, Rights, check_grant, check_granted
from ..protocol.errors import InvalidRequestError
from ..protocol.http import access as calls
from ..protocol.http.access import (
    ChangeGrant,
    CheckAccess,
    CreateToken,
    Decision,
    GrantList,
    MadeToken,
    TokenList,
    TokenView,
)
from ..protocol.http.audit import AUDIT, AuditPage
from ..protocol.http.quotas import (
    QUOTAS,
    SET_QUOTA,
    UNSET_QUOTA,
    QuotaKind,
    QuotaList,
    SetQuota,
    UnsetQuota,
)
from ..protocol.ids import check_name
from ..protocol.reading.instants import since_1970_ms
from ..protocol.text import is_not_a_time
from .arguments import checked
from .calls import ClusterCalls


class AccessCalls(ClusterCalls):
    """
    The part of an admin that is about access; all of it needs the right administer on `*`.

    Besides the errors that are named there, each call raises
        AccessOffError: the metaserver has access control off.
    """

    async def create_token(
        self,
        principal: str,
        *,
        label: str = "",
        begins: datetime | None = None,
        ends: datetime | None = None,
    ) -> MadeToken:
        """
        Make a token; `token` of the answer is shown this once, and is not stored.

        Args:
            principal: whose it is; the principal begins with its first token or right.
            label: for people, such as the program that uses it.
            begins, ends: with a time zone; None: at once, and never.

        Raises:
            InvalidRequestError: it would end before it begins, or has ended already.
            OverloadedError: there are too many tokens or principals.
        """
        fields = {
            "principal": check_name("principal", principal),
            "label": label,
            "begins_at_ms": _instant("begins", begins),
            "ends_at_ms": _instant("ends", ends),
        }
        return await self._meta.access(calls.CREATE_TOKEN, checked(CreateToken, fields))

    async def list_tokens(self, principal: str | None = None) -> TokenList:
        """All tokens by id, or those of a principal; revoked and ended ones too."""
        return await self._meta.access(calls.TOKENS, query=_known(principal))

    async def revoke_token(self, token_id: int) -> TokenView:
        """
        Revoke a token; brokers refuse within seconds what was made with it.  A repeat changes nothing.

        Raises:
            TokenIdUnknownError
        """
        return await self._meta.access(calls.REVOKE_TOKEN, id=token_id)

    async def grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """
        AccessGrant a right; a repeat changes nothing.

        Args:
            right: "produce", "consume", "read", "administer" or "cluster".
            subject, group: a name, or the beginning of names and `*`.

        Raises:
            OverloadedError: the principal has as many rights as it may.
        """
        await self._meta.access(calls.GRANT, _change(principal, right, subject, group))

    async def revoke_grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """Take back exactly this right, with its patterns; a repeat changes nothing."""
        await self._meta.access(calls.REVOKE_GRANT, _change(principal, right, subject, group))

    async def list_grants(self, principal: str | None = None) -> GrantList:
        """All rights, or those of a principal."""
        return await self._meta.access(calls.GRANTS, query=_known(principal))

    async def check_access(
        self, principal: str, right: Rights | str, *, subject: str = "", group: str = ""
    ) -> Decision:
        """Whether a principal has a right on a subject and group, and by which grant; "": on all of them."""
        fields = {"principal": principal, "right": right, "subject": subject, "group": group}
        return await self._meta.access(calls.CHECK_ACCESS, checked(CheckAccess, fields))

    async def set_quota(
        self,
        name: str,
        *,
        bytes_per_s: int = 0,
        requests_per_s: int = 0,
        connections: int = 0,
        subjects: int = 0,
        scheduled_bytes: int = 0,
        sessions: int = 0,
        kind: QuotaKind = "principal",
    ) -> None:
        """
        Limit a principal at each server, or each subject that a pattern means, in place of the limits before.

        Who is over a limit waits, and hears for how long; a connection above `connections` is refused.

        Args:
            name: a principal, `*` for all without a quota of their own; with kind="subject" a subject or pattern.
            bytes_per_s: of messages, sent and received; 0: no limit.  Of a subject: of messages stored at each broker.

            subjects: with kind="subject", how many subjects there may be of a pattern.
            scheduled_bytes: with kind="subject", bytes of messages that wait for a later delivery, of all subjects of a
                pattern together, at each broker.
            sessions: consumers of a principal at a time, of all groups together.

        Raises:
            OverloadedError: there are too many quotas.
        """
        quota = {
            "bytes_per_s": bytes_per_s,
            "requests_per_s": requests_per_s,
            "connections": connections,
        }
        counts = {"subjects": subjects, "scheduled_bytes": scheduled_bytes, "sessions": sessions}
        for limit, value in (quota | counts).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequestError(f"{limit} must be a whole number, not {value!r:.40}")
        limits = Quota(**quota)
        body = checked(SetQuota, {"kind": kind, "name": name, "quota": limits, **counts})
        check_together(name, subjects, scheduled_bytes, of_subjects=kind == "subject")
        check_sessions(sessions, of_subjects=kind == "subject")
        if limits != NO_QUOTA or not any(counts.values()):
            check_quota(limits)
        await self._meta.access(SET_QUOTA, body)

    async def unset_quota(self, name: str, *, kind: QuotaKind = "principal") -> None:
        """End the limits of a principal or of subjects; a repeat changes nothing."""
        await self._meta.access(UNSET_QUOTA, checked(UnsetQuota, {"kind": kind, "name": name}))

    async def list_quotas(self) -> QuotaList:
        """The limits of principals and subjects."""
        return await self._meta.access(QUOTAS)

    async def list_audit(
        self,
        *,
        who: str | None = None,
        subject: str | None = None,
        outcome: str | None = None,
        since: datetime | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> AuditPage:
        """
        Who did what to subjects, groups, rights and messages, and who was refused; the newest first.

        Args:
            outcome: "done" or "refused".
            since: with a time zone.
            before: `before` of the page with newer ones.
            limit: events in the page, 1 to 500.
        """
        query = {"limit": str(limit), "since_ms": str(_instant("since", since))}
        given = {"who": who, "subject": subject, "outcome": outcome, "before": before}
        query |= {name: str(value) for name, value in given.items() if value is not None}
        return await self._meta.access(AUDIT, query=query)


def _change(principal: str, right: Rights | str, subject: str, group: str) -> ChangeGrant:
    check_principal(principal)
    check_granted(right)
    fields = {"right": right, "subject": subject, "group": group}
    return ChangeGrant(principal=principal, grant=check_grant(checked(AccessGrant, fields)))


def _known(principal: str | None) -> dict[str, str] | None:
    return None if principal is None else {"principal": check_principal(principal)}


def _instant(name: str, at: datetime | None) -> int:
    if at is None:
        return 0
    if not isinstance(at, datetime) or is_not_a_time(at):
        raise InvalidRequestError(f"{name} must be a datetime with a time zone, not {at!r:.60}")
    if at.utcoffset() is None:
        raise InvalidRequestError(f"{name} needs a time zone: {at.isoformat()}")
    return since_1970_ms(at)
