"""The access control of a metaserver: identifies callers, signs capabilities, and keeps brokers
informed.

    SQL ──every POLL_MS──▶ AccessState ──▶ callers and their rights
    signing key, new every KEY_MS ──▶ public key in SQL ──▶ every metaserver ──▶ every broker

Invariants
    The private key never leaves this process.
    Nothing is signed before the public key is in SQL.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...protocol.access.capability import CAPABILITY_MS, TEXT_CHARS_MAX, AccessNews, Capability
from ...protocol.access.principals import ADMIN
from ...protocol.access.rights import ADMIN_GRANTS, CLUSTER_GRANTS, AccessGrant, allows, check_grant
from ...protocol.access.tokens import make_token, token_hash
from ...protocol.clock import Clock
from ...protocol.control import Done
from ...protocol.endpoints import (
    ACCESS,
    ACCESS_NEWS,
    CAPABILITY,
    CHECK_ACCESS,
    CREATE_TOKEN,
    GRANT,
    GRANTS,
    QUOTAS,
    REVOKE_GRANT,
    REVOKE_TOKEN,
    SET_QUOTA,
    TOKENS,
    UNSET_QUOTA,
)
from ...protocol.errors import (
    InvalidRequestError,
    OverloadedError,
    Reason,
    StorageError,
    UnauthenticatedError,
)
from ...protocol.http.access import (
    HOLDER_BYTES,
    AskCapability,
    Capabilities,
    ChangeGrant,
    CheckAccess,
    CreateToken,
    Decision,
    GrantList,
    GrantRow,
    MadeToken,
    QuotaList,
    SetQuota,
    TokenList,
    TokenView,
    UnsetQuota,
)
from ...rpc.access.caller import Caller
from ...rpc.access.credentials import CapabilityCredential
from ...rpc.access.guard import CALLER
from ...rpc.access.peers import Peer
from ...rpc.access.signing import OwnKey
from ...rpc.server import ControlRoute, Params, whole_number
from ..sql.database import Database
from .audit_log import AuditLog
from .book import AccessState
from .book_rows import read_access_state
from .quota_rows import read_quotas, set_quota, unset_quota
from .readings import ReadOrder
from .rows import (
    create_access_state,
    create_token,
    grant,
    read_grants,
    read_tokens,
    read_version,
    revoke_grant,
    revoke_token,
    store_key,
)

if TYPE_CHECKING:
    from .issuer import Issuer


log = logging.getLogger("keylane.metaserver")

POLL_MS = 1_000
KEY_MS = 3_600_000
REREAD_MS = 30_000
"""Interval, in milliseconds, at which the complete state is read again, in case rows were changed
directly in the database.
"""
METASERVER = "metaserver"


class AccessService:
    """
    Access control based on one database. Call `start` before use.

    Args:
        settings_tokens: maps each token hash in the settings to its principal (ADMIN, CLUSTER or a
            broker).
        audit: the audit log.
        issuer: an external issuer whose tokens are accepted, or None.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock,
        settings_tokens: Mapping[str, str],
        audit: AuditLog,
        issuer: Issuer | None = None,
    ) -> None:
        self.audit = audit
        self._issuer = issuer
        self._database = database
        self._clock = clock
        self._signing_key = OwnKey()
        self._key_created_ms = 0
        self.set_settings_tokens(settings_tokens)
        self._holder_key = OwnKey()
        self.state = AccessState()
        self._read_order = ReadOrder()

    def set_settings_tokens(self, tokens: Mapping[str, str]) -> None:
        """Use these tokens of the settings instead of the earlier ones, within POLL_MS."""
        self._settings_tokens = dict(tokens)
        self._settings_grants = {
            principal: ADMIN_GRANTS if principal == ADMIN else CLUSTER_GRANTS
            for principal in tokens.values()
        }
        self._last_read_ms = -REREAD_MS - 1

    async def start(self) -> None:
        """Read the access state and store the public key. Raises StorageError."""
        await self._rotate_key()

    async def run(self) -> None:
        """Follow changes made by other metaservers and renew the key, until cancelled."""
        while True:
            await asyncio.sleep(POLL_MS / 1000)
            try:
                await self._poll()
            except StorageError as error:
                log.warning(
                    "cannot read rights; the last known ones stay in force: %s", error.message
                )

    async def _poll(self) -> None:
        """Read changes. Store a new key if it is due or if the database does not have the current
        one.
        """
        now_ms = self._clock.boot_ms()
        stored_version = await self._database.read(read_version)
        known_version = (self.state.cluster, self.state.version)
        if stored_version is not None and (
            stored_version != known_version or now_ms - self._last_read_ms > REREAD_MS
        ):
            await self.refresh()
        # If the row or the key is missing, the database was replaced, for example by a restore.
        is_stored = stored_version is not None and self._signing_key.key_id in self.state.keys
        if not is_stored or now_ms - self._key_created_ms > KEY_MS:
            await self._rotate_key()

    async def refresh(self) -> None:
        """Read the complete state again. Afterwards, `state` includes everything that was committed
        before this call. Raises StorageError.
        """
        number, self._last_read_ms = self._read_order.begin(), self._clock.boot_ms()
        state = await self._database.read(read_access_state, self._clock.wall_ms())
        if self._read_order.is_newest(number, state.version):
            self.state = state.with_settings(self._settings_tokens, self._settings_grants)

    async def _rotate_key(self) -> None:
        """Create a new signing key, store its public key, and use it from now on."""
        await self._database.write(create_access_state, secrets.token_hex(16))
        key, now_ms = OwnKey(), self._clock.wall_ms()
        ends_at = now_ms + KEY_MS + 2 * CAPABILITY_MS
        await self._database.write(
            store_key, key.key_id, key.public, ends_at=ends_at, now_ms=now_ms
        )
        self._signing_key = key
        self._key_created_ms = self._clock.boot_ms()
        await self.refresh()

    async def identify(self, text: str) -> Caller:
        """Return the caller that a token identifies. Raises UnauthenticatedError or
        UnavailableError.
        """
        if self._issuer is not None and self._issuer.looks_like(text):
            return self.state.build_caller(*await self._issuer.verify(text))
        return self.state.identify_caller(text, self._clock.wall_ms())

    def identify_peer(self, peer: Peer) -> Caller:
        """Return the caller that a client certificate, already verified by TLS, identifies. Raises
        UnauthenticatedError.
        """
        if self._clock.wall_ms() >= peer.ends_at_ms:
            raise UnauthenticatedError("the client's certificate has expired", problem="ended")
        return self.state.build_caller(peer.principal, ends_at_ms=peer.ends_at_ms)

    def version(self) -> int:
        """Return the version of the access state."""
        return self.state.version

    def news(self) -> AccessNews:
        """Return the recent changes for brokers."""
        return self.state.news(self._clock.wall_ms(), operators=self._settings_tokens)

    # ── capabilities ──────────────────────────────────────────────────────────────────────────────
    def sign(self, caller: Caller, holder: bytes = b"") -> str:
        """
        Sign a capability for the caller.

        Raises:
            OverloadedError: the rights of the caller and its groups do not fit into an HTTP header.
        """
        text = self._signing_key.sign(
            Capability(
                cluster=self.state.cluster,
                key=self._signing_key.key_id,
                principal=caller.principal,
                # Use the version of these grants, because the state may have changed since.
                version=caller.version or self.state.version,
                ends_at_ms=self._capability_end_ms(caller),
                grants=caller.grants,
                holder=holder,
                groups=caller.groups,
                quota=caller.quota,
            )
        )
        if len(text) > TEXT_CHARS_MAX:
            raise OverloadedError(
                f"{caller.principal!r} has too many rights with those of its {len(caller.groups)} "
                f"groups: its capability has {len(text)} characters of at most "
                f"{TEXT_CHARS_MAX}; grant patterns instead of names, or fewer groups",
                limit=TEXT_CHARS_MAX,
            )
        return text

    def _capability_end_ms(self, caller: Caller) -> int:
        """Return when a new capability expires: after CAPABILITY_MS, or earlier if the caller's
        token or certificate expires before that.
        """
        latest_ms = self._clock.wall_ms() + CAPABILITY_MS
        return min(latest_ms, caller.ends_at_ms) if caller.ends_at_ms else latest_ms

    def add_metaservers(self, addresses: Sequence[str]) -> None:
        """Do nothing, because a metaserver does not call other metaservers."""

    async def bearer(self, _address: str) -> str | None:
        """Return the metaserver's own capability; see `Credentials`."""
        return self.sign(Caller(METASERVER, CLUSTER_GRANTS))

    async def data_capability(self) -> CapabilityCredential | None:
        """See `Credentials`."""
        text = self.sign(Caller(METASERVER, CLUSTER_GRANTS), self._holder_key.public)
        return CapabilityCredential(text, self._holder_key, CAPABILITY_MS / 2_000)

    def mark_refused(self, _text: str) -> bool:
        """See `Credentials`. Does nothing, because each capability is new."""
        return True

    async def close(self) -> None:
        """See `Credentials`."""

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────
    def routes(self) -> list[ControlRoute]:
        """Return a route for each of `endpoints.ACCESS`."""
        return [
            ControlRoute(CREATE_TOKEN, self._create_token),
            ControlRoute(TOKENS, self._list_tokens),
            ControlRoute(REVOKE_TOKEN, self._revoke_token),
            ControlRoute(GRANT, self._grant),
            ControlRoute(REVOKE_GRANT, self._revoke_grant),
            ControlRoute(GRANTS, self._list_grants),
            ControlRoute(CHECK_ACCESS, self._check_access),
            ControlRoute(CAPABILITY, self._issue_capability),
            ControlRoute(ACCESS_NEWS, self._read_news),
            ControlRoute(SET_QUOTA, self._set_quota),
            ControlRoute(UNSET_QUOTA, self._unset_quota),
            ControlRoute(QUOTAS, self._list_quotas),
            *self.audit.routes(),
        ]

    async def _create_token(self, body: CreateToken, _params: Params) -> MadeToken:
        token = make_token(secrets.randbits)
        view = await self._database.write(
            create_token, body, token_hash(token), now_ms=self._clock.wall_ms()
        )
        await self.refresh()
        return MadeToken(token=token, view=view)

    async def _list_tokens(self, _body: object, params: Params) -> TokenList:
        principal = params.get("principal")
        now_ms = self._clock.wall_ms()
        return TokenList(tokens=await self._database.read(read_tokens, principal, now_ms))

    async def _revoke_token(self, _body: object, params: Params) -> TokenView:
        token_id = whole_number(params, "id", 0)
        view = await self._database.write(revoke_token, token_id, now_ms=self._clock.wall_ms())
        await self.refresh()
        return view

    async def _grant(self, body: ChangeGrant, _params: Params) -> Done:
        await self._database.write(grant, body, now_ms=self._clock.wall_ms())
        await self.refresh()
        return Done()

    async def _revoke_grant(self, body: ChangeGrant, _params: Params) -> Done:
        await self._database.write(revoke_grant, body, now_ms=self._clock.wall_ms())
        await self.refresh()
        return Done()

    async def _list_grants(self, _body: object, params: Params) -> GrantList:
        principal = params.get("principal")
        rows = await self._database.read(read_grants, principal)
        from_settings = {
            (name, each)
            for name, grants in self._settings_grants.items()
            for each in grants
            if principal in (None, name)
        }
        return GrantList(grants=[GrantRow(*row) for row in sorted({*rows, *from_settings})])

    async def _set_quota(self, body: SetQuota, _params: Params) -> Done:
        await self._database.write(set_quota, body, now_ms=self._clock.wall_ms())
        await self.refresh()
        return Done()

    async def _unset_quota(self, body: UnsetQuota, _params: Params) -> Done:
        await self._database.write(unset_quota, body, now_ms=self._clock.wall_ms())
        await self.refresh()
        return Done()

    async def _list_quotas(self, _body: object, _params: Params) -> QuotaList:
        return QuotaList(quotas=await self._database.read(read_quotas))

    async def _check_access(self, body: CheckAccess, _params: Params) -> Decision:
        check_grant(AccessGrant(body.right))
        for each in self.state.grants.get(body.principal, ()):
            if allows((each,), body.right, body.subject, body.group):
                return Decision(allowed=True, by=each)
        return Decision(allowed=False)

    async def _issue_capability(self, body: AskCapability, _params: Params) -> Capabilities:
        if len(body.holder) not in (0, HOLDER_BYTES):
            raise InvalidRequestError(f"a holder's key has {HOLDER_BYTES} bytes")
        caller = CALLER.get()
        return Capabilities(
            principal=caller.principal,
            bearer=self.sign(caller),
            held=self.sign(caller, body.holder) if body.holder else "",
            ends_in_ms=max(0, self._capability_end_ms(caller) - self._clock.wall_ms()),
        )

    async def _read_news(self, _body: object, _params: Params) -> AccessNews:
        """Return the recent changes to a broker."""
        return self.news()


def refusing_routes() -> list[ControlRoute]:
    """Return a route for each of `endpoints.ACCESS` that refuses all calls, for a metaserver
    without access control.
    """

    async def refuse(_body: object, _params: object) -> object:
        raise InvalidRequestError(Reason.ACCESS_OFF)

    return [ControlRoute(endpoint, refuse) for endpoint in ACCESS]
