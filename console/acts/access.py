"""Changes of tokens, rights and quotas."""

from __future__ import annotations

from datetime import UTC, datetime

from ...admin import Admin
from ...protocol.errors import InvalidRequestError
from ..page import href
from .act import Act, ActResult, Field, Values, flag, number_of, option


async def _create_token(admin: Admin, values: Values) -> ActResult:
    text = values.get("ends", "").strip()
    try:
        ends = datetime.fromisoformat(text) if text else None
    except ValueError:
        raise InvalidRequestError(f"the end is an ISO 8601 time, not {text!r:.60}") from None
    if ends is not None and ends.tzinfo is None:
        ends = ends.replace(tzinfo=UTC)
    made = await admin.create_token(
        values.get("principal", ""), label=values.get("label", ""), ends=ends
    )
    return ActResult(
        (f"Token {made.view.token_id} of {made.view.principal}. It is never shown again:",),
        href("access"),
        made.token,
    )


async def _revoke_token(admin: Admin, values: Values) -> ActResult:
    view = await admin.revoke_token(number_of(values, "id"))
    return ActResult((f"Token {view.token_id} of {view.principal} is revoked.",), href("access"))


async def _grant(admin: Admin, values: Values) -> ActResult:
    await admin.grant(
        values.get("principal", ""),
        values.get("right", ""),
        subject=values.get("subject") or "*",
        group=values.get("consumer_group") or "*",
    )
    return ActResult((f"{values['principal']} has the right.",), href("access", "rights"))


async def _revoke_grant(admin: Admin, values: Values) -> ActResult:
    await admin.revoke_grant(
        values.get("principal", ""),
        values.get("right", ""),
        subject=values.get("subject") or "*",
        group=values.get("consumer_group") or "*",
    )
    return ActResult(
        (f"{values['principal']} no longer has this right.",), href("access", "rights")
    )


def _grant_words(values: Values) -> list[str]:
    return [
        values.get("principal", ""),
        values.get("right", ""),
        *option("--subject", values.get("subject", ""), "*"),
        *option("--group", values.get("consumer_group", ""), "*"),
    ]


LIMITS = (
    ("bytes_per_s", "--bytes", "Bytes per second"),
    ("requests_per_s", "--requests", "Requests per second"),
    ("connections", "--connections", "Connections to each broker"),
    ("sessions", "--sessions", "Consumers at a time"),
    ("subjects", "--subjects", "Number of subjects"),
    ("scheduled_bytes", "--scheduled-bytes", "Bytes of scheduled messages"),
)


async def _set_quota(admin: Admin, values: Values) -> ActResult:
    limits = {name: number_of(values, name, 0) for name, _, _ in LIMITS}
    kind = "subject" if values.get("for_subjects") else "principal"
    await admin.set_quota(values.get("name", ""), **limits, kind=kind)  # type: ignore[arg-type]
    return ActResult((f"The limits of {values['name']} are set.",), href("access", "quotas"))


async def _unset_quota(admin: Admin, values: Values) -> ActResult:
    kind = "subject" if values.get("for_subjects") else "principal"
    await admin.unset_quota(values.get("name", ""), kind=kind)  # type: ignore[arg-type]
    return ActResult((f"{values['name']} has no limits of its own.",), href("access", "quotas"))


RIGHTS = ("produce", "consume", "read", "administer", "cluster")

PRINCIPAL = Field(name="principal", label="Principal", is_required=True)

FOR_SUBJECTS = Field(name="for_subjects", label="The name is one of subjects", kind="check")


ACTS: dict[str, Act] = {
    "token-create": Act(
        title="Create a token",
        button="Create",
        lead="The token is shown once; the servers store only its hash.",
        fields=(
            PRINCIPAL,
            Field(name="label", label="What uses it"),
            Field(name="ends", label="Ends", help="An ISO 8601 time in UTC; empty: never."),
        ),
        command=lambda values: [
            "access",
            "token",
            "create",
            values.get("principal", ""),
            *option("--label", values.get("label", "")),
            *option("--ends", values.get("ends", "")),
        ],
        do=_create_token,
        back=lambda _values: href("access"),
    ),
    "token-revoke": Act(
        title="Revoke a token",
        button="Revoke",
        lead="Brokers refuse it within seconds. It cannot be made valid again.",
        fields=(Field(name="id", label="Token", kind="fixed", is_required=True),),
        command=lambda values: ["access", "token", "revoke", values.get("id", "")],
        do=_revoke_token,
        typed="id",
        back=lambda _values: href("access"),
    ),
    "grant": Act(
        title="Grant a right",
        button="Grant",
        lead="Patterns are a name, or the beginning of names followed by *.",
        fields=(
            PRINCIPAL,
            Field(name="right", label="Right", kind="select", options=RIGHTS),
            Field(name="subject", label="Subjects", default="*"),
            Field(name="consumer_group", label="Consumer groups", default="*"),
        ),
        command=lambda values: ["access", "grant", *_grant_words(values)],
        do=_grant,
        back=lambda _values: href("access", "rights"),
    ),
    "grant-revoke": Act(
        title="Revoke a right",
        button="Revoke",
        lead="Exactly this right, with these patterns.",
        fields=(
            Field(name="principal", label="Principal", kind="fixed", is_required=True),
            Field(name="right", label="Right", kind="fixed", is_required=True),
            Field(name="subject", label="Subjects", kind="fixed"),
            Field(name="consumer_group", label="Consumer groups", kind="fixed"),
        ),
        command=lambda values: ["access", "revoke", *_grant_words(values)],
        do=_revoke_grant,
        typed="principal",
        back=lambda _values: href("access", "rights"),
    ),
    "quota-set": Act(
        title="Set a quota",
        button="Set",
        lead="The limits replace all earlier ones of this name; 0 is no limit.",
        fields=(
            Field(
                name="name",
                label="Principal, or subjects",
                is_required=True,
                help="* is all principals without a quota of their own.",
            ),
            FOR_SUBJECTS,
            *(
                Field(name=name, label=label, kind="number", default="0")
                for name, _, label in LIMITS
            ),
        ),
        command=lambda values: [
            "access",
            "quota",
            "set",
            values.get("name", ""),
            *(word for name, given, _ in LIMITS for word in option(given, values.get(name, ""), 0)),
            *flag(values, "for_subjects", "--for-subjects"),
        ],
        do=_set_quota,
        back=lambda _values: href("access", "quotas"),
    ),
    "quota-unset": Act(
        title="Remove a quota",
        button="Remove",
        lead="The name has no limits of its own any more.",
        fields=(
            Field(name="name", label="Name", kind="fixed", is_required=True),
            Field(name="for_subjects", label="Of subjects", kind="fixed"),
        ),
        command=lambda values: [
            "access",
            "quota",
            "unset",
            values.get("name", ""),
            *flag(values, "for_subjects", "--for-subjects"),
        ],
        do=_unset_quota,
        typed="name",
        back=lambda _values: href("access", "quotas"),
    ),
}
