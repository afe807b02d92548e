"""What servers refuse of callers that may not do what they ask, and tokens that cannot be used.
Pure.
"""

from __future__ import annotations

from .base import Detail, RetryRule
from .refusals import ConfigError, InvalidRequestError, RefusedError


class UnauthenticatedError(RefusedError):
    """A server with access control does not know the caller."""

    code = 1350
    summary = "the caller is not known"
    hint = (
        "Give a token of this cluster: token=, KEYLANE_TOKEN_FILE or KEYLANE_TOKEN.  An "
        "administrator makes one with keylane access token create PRINCIPAL.  A client identified "
        "by its certificate needs one that has not expired: replace its files, and it "
        "continues by itself."
    )
    reason = Detail(str)


class AccessDeniedError(RefusedError):
    """The caller is known, and has no right to do this."""

    code = 1351
    summary = "the principal has no right to do this"
    hint = "keylane access list PRINCIPAL shows what is granted."
    principal = Detail(str)
    right = Detail(str)
    subject = Detail(str)
    group = Detail(str)


class CapabilityEndedError(RefusedError):
    """A capability has ended, or rights of its principal were changed after it was made."""

    code = 1352
    retry = RetryRule.LATER
    summary = "the capability has ended"
    hint = (
        "keylane's clients renew it by themselves; other clients ask a metaserver for a new one: "
        "POST /v1/access/capability"
    )
    principal = Detail(str)


class TokenInvalidError(ConfigError):
    """A token, or a file of one, cannot be used."""

    code = 1353
    summary = "the token cannot be used"
    hint = (
        "A token begins with kl_ and is given in a file (KEYLANE_TOKEN_FILE), in "
        "KEYLANE_TOKEN, or as token=."
    )


class TokenInUrlError(InvalidRequestError):
    """A token stands in a URL, where logs keep it."""

    code = 1354
    summary = "a token does not belong in a URL"
    hint = (
        "Give it in the header Authorization: Bearer TOKEN.  Revoke this token, because logs may "
        "contain it."
    )


class TokenIdUnknownError(RefusedError):
    """No token has this id."""

    code = 1355
    summary = "there is no such token"
    hint = "keylane access token list shows the ids of all tokens."
    token_id = Detail(str)


class AccessOffError(RefusedError):
    """A call about access came to a metaserver that has access control off."""

    code = 1356
    summary = "access control is off at this metaserver"
    hint = (
        "Start the metaserver with access = on, and give it an admin_token_file or "
        "admin_token_hash."
    )


class QuotaExceededError(RefusedError):
    """A principal or a subject is so far over its limit that waiting in the call would take too
    long.
    """

    code = 1357
    retry = RetryRule.LATER
    summary = "the quota is used up for a while"
    hint = "Try again after retry_after_ms.  keylane access quota list shows the limits."
    principal = Detail(str)
    retry_after_ms = Detail(int)


class ConnectionQuotaError(RefusedError):
    """A principal has as many connections at a broker as it may have."""

    code = 1358
    retry = RetryRule.LATER
    summary = "the principal has too many connections"
    hint = (
        "Close a connection, or raise the quota: keylane access quota set PRINCIPAL --connections N"
    )
    principal = Detail(str)
    limit = Detail(int)
    retry_after_ms = Detail(int)


class SessionQuotaError(RefusedError):
    """A principal has as many sessions of consumers as it may have."""

    code = 1368
    retry = RetryRule.LATER
    summary = "the principal has too many consumers"
    hint = (
        "Close a consumer, or raise the quota: keylane access quota set PRINCIPAL --sessions N.  "
        "The session of a killed consumer ends after its ttl."
    )
    principal = Detail(str)
    limit = Detail(int)
    retry_after_ms = Detail(int)


class IssuerUnreachableError(RefusedError):
    """The keys of the issuer of JWTs cannot be read now."""

    code = 1359
    retry = RetryRule.LATER
    summary = "the keys of the outside issuer cannot be read"
    hint = "Check the metaserver's jwt_jwks and its log; keylane's own tokens work meanwhile."
