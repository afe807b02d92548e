"""The pages of access control: tokens, rights, quotas and the audit log."""

from __future__ import annotations

from collections.abc import Mapping

from ...admin import AccessGrant, AuditRow, QuotaRow, TokenView
from ...protocol.text import parse_number
from ..feed import Feed
from ..page import Cell, Link, Page, PageColumn, Pager, Table, TableRow, href, window
from ..shown import count, moment

TABS = (
    Link("Tokens", href("access")),
    Link("Rights", href("access", "rights")),
    Link("Quotas", href("access", "quotas")),
    Link("Audit log", href("access", "audit")),
)


def _page(
    title: str, table: Table, *acts: Link, template: str = "page.html", **extra: object
) -> Page:
    return Page(
        title="Access",
        section="access",
        tabs=TABS,
        acts=acts,
        tables=(table,),
        template=template,
        extra={"tab": title, **extra},
        is_live=False,
    )


async def tokens(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the tokens."""

    def cells(each: TokenView) -> tuple[Cell, ...]:
        is_valid = each.state == "valid"
        return (
            Cell(str(each.token_id)),
            Cell(each.principal),
            Cell(each.label or "–", tone="" if each.label else "muted"),
            Cell(each.state, tone="good" if is_valid else "muted"),
            Cell(moment(each.made_at_ms)),
            Cell(moment(each.ends_at_ms)),
            Cell("revoke", href("act", "token-revoke", id=each.token_id))
            if not each.revoked_at_ms
            else Cell(""),
        )

    listed = (await feed.admin.list_tokens()).tokens
    rows = [TableRow(str(each.token_id), cells(each)) for each in reversed(listed)]
    shown, pager = window(rows, query, href("access"))
    table = Table(
        name="tokens",
        caption="Tokens",
        columns=_columns(
            "Token", "Principal", "Label", "State", "Made (UTC)", "Ends (UTC)", "Revoke"
        ),
        rows=shown,
        empty="There are only the tokens of the servers' files. Create one for a program:",
        empty_command="keylane access token create NAME --label TEXT",
        pager=pager,
    )
    return _page("Tokens", table, Link("Create a token", href("act", "token-create")))


async def rights(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the rights."""

    def cells(principal: str, grant: AccessGrant) -> tuple[Cell, ...]:
        given = {
            "principal": principal,
            "right": grant.right.value,
            "subject": grant.subject,
            "consumer_group": grant.group,
        }
        return (
            Cell(principal),
            Cell(grant.right.value),
            Cell(grant.subject),
            Cell(grant.group),
            Cell("revoke", href("act", "grant-revoke", **given)),
        )

    listed = (await feed.admin.list_grants()).grants
    rows = [
        TableRow(str(index), cells(each.principal, each.grant)) for index, each in enumerate(listed)
    ]
    shown, pager = window(rows, query, href("access", "rights"))
    table = Table(
        name="rights",
        caption="Rights",
        columns=_columns("Principal", "Right", "Subjects", "Groups", "Revoke"),
        rows=shown,
        empty="Nobody but the administrator has a right. Grant one:",
        empty_command="keylane access grant NAME produce --subject orders",
        pager=pager,
    )
    return _page("Rights", table, Link("Grant a right", href("act", "grant")))


async def quotas(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the quotas."""

    def cells(each: QuotaRow) -> tuple[Cell, ...]:
        limits = (
            each.bytes_per_s,
            each.requests_per_s,
            each.connections,
            each.sessions,
            each.subjects,
            each.scheduled_bytes,
        )
        for_subjects = "on" if each.kind == "subject" else ""
        return (
            Cell(each.name),
            Cell("principal" if each.kind == "principal" else "subjects"),
            *(
                Cell(count(limit) if limit else "no limit", tone="" if limit else "muted")
                for limit in limits
            ),
            Cell("unset", href("act", "quota-unset", name=each.name, for_subjects=for_subjects)),
        )

    listed = (await feed.admin.list_quotas()).quotas
    rows = [TableRow(f"{each.kind}/{each.name}", cells(each)) for each in listed]
    shown, pager = window(rows, query, href("access", "quotas"))
    table = Table(
        name="quotas",
        caption="Quotas",
        columns=_columns(
            "Name",
            "Of",
            "Bytes/s",
            "Requests/s",
            "Connections",
            "Consumers",
            "Subjects",
            "Scheduled bytes",
            "Unset",
        ),
        rows=shown,
        empty="Nothing has a limit. Set one:",
        empty_command="keylane access quota set NAME --bytes 1000000",
        pager=pager,
    )
    return _page("Quotas", table, Link("Set a quota", href("act", "quota-set")))


async def audit(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return a page of the audit log."""
    before = parse_number(query.get("before", ""))
    who, subject, outcome = (query.get(each) or None for each in ("who", "subject", "outcome"))
    page = await feed.admin.list_audit(who=who, subject=subject, outcome=outcome, before=before)

    def cells(row: AuditRow) -> tuple[Cell, ...]:
        event = row.event
        return (
            Cell(moment(event.at_ms)),
            Cell(event.who or "(unknown)"),
            Cell(event.did),
            Cell(event.subject or "–"),
            Cell(event.group or "–"),
            Cell(event.outcome, tone="bad" if event.outcome != "done" else "good"),
            Cell(f"{event.detail}{f' ({event.times} times)' if event.times > 1 else ''}" or "–"),
            Cell(event.remote),
        )

    pager = None
    if page.before is not None or before is not None:
        kept = {"who": who, "subject": subject, "outcome": outcome}
        pager = Pager(
            text=f"{len(page.rows)} events",
            before=href("access", "audit", **kept) if before is not None else "",
            after=href("access", "audit", **kept, before=page.before) if page.before else "",
        )
    table = Table(
        name="audit",
        caption="Audit log, the newest events first",
        columns=_columns(
            "Time (UTC)", "Who", "Call", "Subject", "Group", "Outcome", "Detail", "From"
        ),
        rows=tuple(TableRow(str(row.audit_id), cells(row)) for row in page.rows),
        empty="No event matches.",
        pager=pager,
    )
    fields = {"who": who or "", "subject": subject or "", "outcome": outcome or ""}
    return _page("Audit log", table, template="audit.html", fields=fields)


_NUMBERS = frozenset({"Bytes/s", "Requests/s", "Connections", "Consumers", "Scheduled bytes"})


def _columns(*titles: str) -> tuple[PageColumn, ...]:
    return tuple(PageColumn(title, is_number=title in _NUMBERS) for title in titles)
