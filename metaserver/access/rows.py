"""Stores principals, tokens, grants and signing keys. Runs SQL synchronously.

Invariants
    Every change raises the version of the access state and stores it with the principal, which
    invalidates all capabilities that were signed before.
    Only the SHA-256 of a token is stored.
    Times are wall-clock times of the metaserver, because people choose the dates of tokens.
    A revoked or expired token remains listed until its row is needed for a new token.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.capability import GRANT_BYTES_MAX, GRANTS_MAX
from ...protocol.access.principals import check_principal
from ...protocol.access.rights import AccessGrant, Rights, check_grant
from ...protocol.errors import InvalidRequestError, NotFoundError, OverloadedError, Reason
from ...protocol.http.access import ChangeGrant, CreateToken, TokenView
from ...protocol.ids import check_name
from ..sql.dialect import insert_new, insert_or_replace
from ..sql.schema import (
    access_grants,
    access_keys,
    access_principals,
    access_state,
    access_tokens,
)
from .book import CHANGED_MS

TOKENS_MAX = 10_000
PRINCIPALS_MAX = 10_000

_changed = sa.select(
    sa.func.coalesce(sa.func.max(access_principals.c.version), 0)
).scalar_subquery()
_version = sa.case((_changed > access_state.c.version, _changed), else_=access_state.c.version)
"""The version of the access state. It is never lower than the version of any principal, even if a
row was copied from another database.
"""
STATE = sa.select(access_state.c.cluster, _version.label("version"))


def read_version(connection: Connection) -> tuple[str, int] | None:
    """Return the cluster's access id and the version; None before `create_access_state` has been
    called.
    """
    row = connection.execute(STATE).one_or_none()
    return None if row is None else (row.cluster, row.version)


def create_access_state(connection: Connection, cluster: str) -> None:
    """Create the access state unless it exists. `cluster` is a random id."""
    insert_new(connection, access_state, {"one": 1, "cluster": cluster, "version": 1})


def store_key(
    connection: Connection, key_id: str, public: bytes, *, ends_at: int, now_ms: int
) -> None:
    """Store a metaserver's public key and delete expired keys."""
    connection.execute(sa.delete(access_keys).where(access_keys.c.ends_at <= now_ms))
    row = {"key_id": key_id, "public": public.hex(), "ends_at": ends_at}
    insert_or_replace(connection, access_keys, row)
    raise_version(connection)


def create_token(
    connection: Connection, request: CreateToken, token_hash: str, *, now_ms: int
) -> TokenView:
    """
    Store a new token.

    Raises:
        InvalidRequestError: the principal is invalid, or the token would expire before it becomes
            valid or before now.
        OverloadedError: there are too many valid tokens, or too many principals.
    """
    check_name("principal", request.principal)
    if request.ends_at_ms and request.ends_at_ms <= max(now_ms, request.begins_at_ms):
        raise InvalidRequestError("the token would end before it begins, or has expired already")
    _evict_token(connection, now_ms)
    record_principal_change(connection, request.principal, now_ms)
    row = {
        "principal": request.principal,
        "hash": token_hash,
        "label": request.label,
        "made_at": now_ms,
        "begins_at": request.begins_at_ms,
        "ends_at": request.ends_at_ms,
    }
    token_id = connection.execute(
        sa.insert(access_tokens).values(row).returning(access_tokens.c.token_id)
    ).scalar_one()
    return _read_token(connection, token_id, now_ms)


def _evict_token(connection: Connection, now_ms: int) -> None:
    """
    Delete one token if there are TOKENS_MAX tokens: the one that was revoked first or, if there is
    none, the one that expired first.

    Only one token is deleted at a time, so that a wrong wall clock does not remove many tokens that
    have not really expired.

    Raises:
        OverloadedError: no token has been revoked or has expired.
    """
    tokens = access_tokens.c
    count = sa.select(sa.func.count()).select_from(access_tokens)
    if connection.execute(count).scalar_one() < TOKENS_MAX:
        return
    unusable_query = (
        sa.select(tokens.token_id)
        .where(_is_unusable(now_ms))
        .order_by(sa.case((tokens.revoked_at > 0, 0), else_=1), tokens.revoked_at, tokens.ends_at)
        .limit(1)
    )
    token_id = connection.execute(unusable_query).scalar()
    if token_id is None:
        raise OverloadedError(
            f"there are {TOKENS_MAX:,} tokens, and none was revoked or has expired: revoke "
            f"unused ones",
            limit=TOKENS_MAX,
        )
    connection.execute(sa.delete(access_tokens).where(tokens.token_id == token_id))


def read_tokens(connection: Connection, principal: str | None, now_ms: int) -> list[TokenView]:
    """Return all tokens, or those of one principal, by id."""
    query = sa.select(access_tokens).order_by(access_tokens.c.token_id)
    if principal is not None:
        query = query.where(access_tokens.c.principal == principal)
    return [_build_view(row, now_ms) for row in connection.execute(query)]


def revoke_token(connection: Connection, token_id: int, *, now_ms: int) -> TokenView:
    """Revoke a token. Repeating the call has no effect. Raises NotFoundError."""
    token = _read_token(connection, token_id, now_ms)
    if not token.revoked_at_ms:
        record_principal_change(connection, token.principal, now_ms)
        connection.execute(
            sa.update(access_tokens)
            .where(access_tokens.c.token_id == token_id)
            .values(revoked_at=now_ms)
        )
    return _read_token(connection, token_id, now_ms)


def grant(connection: Connection, request: ChangeGrant, *, now_ms: int) -> None:
    """
    Store a right. Repeating the call has no effect.

    Raises:
        InvalidRequestError
        OverloadedError: the principal's rights would not fit into a capability, or there are too
            many principals.
    """
    check_principal(request.principal)
    check_grant(request.grant)
    grants = [row[1] for row in read_grants(connection, request.principal)]
    if request.grant in grants:
        return
    grants.append(request.grant)
    text_bytes = sum(len(each.right) + len(each.subject) + len(each.group) for each in grants)
    if len(grants) > GRANTS_MAX or text_bytes > GRANT_BYTES_MAX:
        raise OverloadedError(
            f"{request.principal!r} has too many rights: at most {GRANTS_MAX}, of "
            f"{GRANT_BYTES_MAX} characters together; a pattern such as orders.* stands for many "
            "subjects",
            limit=GRANTS_MAX,
        )
    record_principal_change(connection, request.principal, now_ms)
    insert_new(connection, access_grants, _grant_row(request))


def revoke_grant(connection: Connection, request: ChangeGrant, *, now_ms: int) -> None:
    """Delete a right. Repeating the call has no effect. Raises InvalidRequestError."""
    check_principal(request.principal)
    row = _grant_row(request)
    this_grant = sa.and_(*(access_grants.c[name] == value for name, value in row.items()))
    if connection.execute(sa.delete(access_grants).where(this_grant)).rowcount:
        record_principal_change(connection, request.principal, now_ms)


def read_grants(connection: Connection, principal: str | None) -> list[tuple[str, AccessGrant]]:
    """Return all rights, or those of one principal, as sorted (principal, right) pairs."""
    query = sa.select(access_grants)
    if principal is not None:
        query = query.where(access_grants.c.principal == principal)
    return sorted(
        (row.principal, AccessGrant(Rights(row.right), row.subject, row.group))
        for row in connection.execute(query)
    )


def _grant_row(request: ChangeGrant) -> dict[str, str]:
    return {
        "principal": request.principal,
        "right": request.grant.right.value,
        "subject": request.grant.subject,
        "group": request.grant.group,
    }


def raise_version(connection: Connection) -> int:
    """Increment the version of the access state and return it."""
    statement = sa.update(access_state).values(version=_version + 1)
    version: int = connection.execute(statement.returning(access_state.c.version)).scalar_one()
    return version


def record_principal_change(connection: Connection, principal: str, now_ms: int) -> None:
    """Record a change of a principal; the first change creates the principal's row."""
    version = raise_version(connection)
    result = connection.execute(
        sa.update(access_principals)
        .where(access_principals.c.principal == principal)
        .values(version=version, changed_at=now_ms)
    )
    if result.rowcount:
        return
    _evict_principal(connection, now_ms)
    row = {"principal": principal, "version": version, "changed_at": now_ms}
    insert_new(connection, access_principals, row)


def _evict_principal(connection: Connection, now_ms: int) -> None:
    """
    Delete one principal if there are PRINCIPALS_MAX principals: the one that has had no rights and
    no valid token for the longest time.

    Raises:
        OverloadedError: every principal has a right or a valid token.
    """
    count = sa.select(sa.func.count()).select_from(access_principals)
    if connection.execute(count).scalar_one() < PRINCIPALS_MAX:
        return
    principals = access_principals.c
    has_right = sa.exists().where(access_grants.c.principal == principals.principal)
    has_token = sa.exists().where(
        access_tokens.c.principal == principals.principal, sa.not_(_is_unusable(now_ms))
    )
    # A change is sent to brokers until the capabilities signed before it have expired.
    idle_query = (
        sa.select(principals.principal)
        .where(sa.not_(has_right), sa.not_(has_token), principals.changed_at < now_ms - CHANGED_MS)
        .order_by(principals.changed_at, principals.principal)
        .limit(1)
    )
    principal = connection.execute(idle_query).scalar()
    if principal is None:
        raise OverloadedError(
            f"there are {PRINCIPALS_MAX:,} principals, each with a right or a valid token: "
            f"revoke unused ones",
            limit=PRINCIPALS_MAX,
        )
    for table in (access_tokens, access_principals):
        connection.execute(sa.delete(table).where(table.c.principal == principal))


def _is_unusable(now_ms: int) -> sa.ColumnElement[bool]:
    """Return the SQL condition for tokens that have been revoked or have expired."""
    tokens = access_tokens.c
    return (tokens.revoked_at > 0) | ((tokens.ends_at > 0) & (tokens.ends_at <= now_ms))


def _read_token(connection: Connection, token_id: int, now_ms: int) -> TokenView:
    query = sa.select(access_tokens).where(access_tokens.c.token_id == token_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(
            Reason.TOKEN_ID_UNKNOWN, f"there is no token {token_id}", token_id=token_id
        )
    return _build_view(row, now_ms)


def _build_view(row: sa.Row[tuple[object, ...]], now_ms: int) -> TokenView:
    state = "valid"
    if row.revoked_at:
        state = "revoked"
    elif row.ends_at and now_ms >= row.ends_at:
        state = "ended"
    elif now_ms < row.begins_at:
        state = "not yet valid"
    return TokenView(
        token_id=row.token_id,
        principal=row.principal,
        label=row.label,
        made_at_ms=row.made_at,
        begins_at_ms=row.begins_at,
        ends_at_ms=row.ends_at,
        revoked_at_ms=row.revoked_at,
        state=state,
    )
