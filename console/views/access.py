"""The pages of access control: tokens, rights, quotas and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...admin import AuditEvent, GrantRow, QuotaRow, TokenView
from ...protocol.text import parse_number
from ..feed import Feed
from ..page import Cell, Link, Page, Pager, Table, href, table
from ..shown import count, moment
from .cells import or_none_cell

TABS = (
    Link("Tokens", href("access")),
    Link("Rights", href("access", "rights")),
    Link("Quotas", href("access", "quotas")),
    Link("Audit log", href("access", "audit")),
)


def _page(
    title: str, listed: Table, *acts: Link, template: str = "page.html", **extra: object
) -> Page:
    return Page(
        title="Access",
        section="access",
        tabs=TABS,
        acts=acts,
        tables=(listed,),
        template=template,
        extra={"tab": title, **extra},
        is_live=False,
    )


async def tokens(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the tokens."""

    def revoke(each: TokenView) -> Cell:
        return (
            Cell("")
            if each.revoked_at_ms
            else Cell("revoke", href("act", "token-revoke", id=each.token_id))
        )

    listed = table(
        "tokens",
        "Tokens",
        (await feed.admin.list_tokens()).tokens[::-1],
        lambda each: str(each.token_id),
        (
            ("Token", lambda each: str(each.token_id)),
            ("Principal", lambda each: each.principal),
            ("Label", lambda each: or_none_cell(each.label)),
            ("State", lambda each: Cell(each.state, tone=_TONES.get(each.state, "muted"))),
            ("Made (UTC)", lambda each: moment(each.made_at_ms)),
            ("Ends (UTC)", lambda each: moment(each.ends_at_ms)),
            ("Revoke", revoke),
        ),
        empty="There are only the tokens of the servers' files. Create one for a program:",
        empty_command="keylane access token create NAME --label TEXT",
        query=query,
        path=href("access"),
    )
    return _page("Tokens", listed, Link("Create a token", href("act", "token-create")))


async def rights(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the rights."""

    def given(row: GrantRow) -> dict[str, str]:
        grant = row.grant
        names = {"subject": grant.subject, "consumer_group": grant.group}
        return {"principal": row.principal, "right": grant.right.value, **names}

    listed = table(
        "rights",
        "Rights",
        (await feed.admin.list_grants()).grants,
        lambda each: " ".join(given(each).values()),
        (
            ("Principal", lambda each: each.principal),
            ("Right", lambda each: each.grant.right.value),
            ("Subjects", lambda each: each.grant.subject),
            ("Groups", lambda each: each.grant.group),
            ("Revoke", lambda each: Cell("revoke", href("act", "grant-revoke", **given(each)))),
        ),
        empty="Nobody but the administrator has a right. Grant one:",
        empty_command="keylane access grant NAME produce --subject orders",
        query=query,
        path=href("access", "rights"),
    )
    return _page("Rights", listed, Link("Grant a right", href("act", "grant")))


async def quotas(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the quotas."""

    def limit(number: int) -> Cell:
        return Cell(count(number)) if number else Cell("no limit", tone="muted")

    def unset(each: QuotaRow) -> Cell:
        for_subjects = "on" if each.kind == "subject" else ""
        return Cell("unset", href("act", "quota-unset", name=each.name, for_subjects=for_subjects))

    listed = table(
        "quotas",
        "Quotas",
        (await feed.admin.list_quotas()).quotas,
        lambda each: f"{each.kind}/{each.name}",
        (
            ("Name", lambda each: each.name),
            ("Of", lambda each: "principal" if each.kind == "principal" else "subjects"),
            ("#Bytes/s", lambda each: limit(each.bytes_per_s)),
            ("#Requests/s", lambda each: limit(each.requests_per_s)),
            ("#Connections", lambda each: limit(each.connections)),
            ("#Consumers", lambda each: limit(each.sessions)),
            ("#Subjects", lambda each: limit(each.subjects)),
            ("#Scheduled bytes", lambda each: limit(each.scheduled_bytes)),
            ("Unset", unset),
        ),
        empty="Nothing has a limit. Set one:",
        empty_command="keylane access quota set NAME --bytes 1000000",
        query=query,
        path=href("access", "quotas"),
    )
    return _page("Quotas", listed, Link("Set a quota", href("act", "quota-set")))


async def audit(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return a page of the audit log."""
    before = parse_number(query.get("before", ""))
    who, subject, outcome = (query.get(each) or None for each in ("who", "subject", "outcome"))
    page = await feed.admin.list_audit(who=who, subject=subject, outcome=outcome, before=before)

    def detail(event: AuditEvent) -> str:
        return f"{event.detail}{f' ({event.times} times)' if event.times > 1 else ''}" or "–"

    pager = None
    if page.before is not None or before is not None:
        kept = {"who": who, "subject": subject, "outcome": outcome}
        pager = Pager(
            text=f"{len(page.rows)} events",
            before=href("access", "audit", **kept) if before is not None else "",
            after=href("access", "audit", **kept, before=page.before) if page.before else "",
        )
    listed = table(
        "audit",
        "Audit log, the newest events first",
        page.rows,
        lambda row: str(row.audit_id),
        (
            ("Time (UTC)", lambda row: moment(row.event.at_ms)),
            ("Who", lambda row: row.event.who or "(unknown)"),
            ("Call", lambda row: row.event.did),
            ("Subject", lambda row: or_none_cell(row.event.subject)),
            ("Group", lambda row: or_none_cell(row.event.group)),
            (
                "Outcome",
                lambda row: Cell(row.event.outcome, tone=_TONES.get(row.event.outcome, "bad")),
            ),
            ("Detail", lambda row: detail(row.event)),
            ("From", lambda row: row.event.remote),
        ),
        empty="No event matches.",
    )
    fields = {"who": who or "", "subject": subject or "", "outcome": outcome or ""}
    return _page("Audit log", replace(listed, pager=pager), template="audit.html", fields=fields)


_TONES = {"valid": "good", "done": "good"}
