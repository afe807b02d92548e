"""The TLS of a running server, which is loaded at startup, reloaded on SIGHUP, and reported in the
log and metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...protocol.access.tokens import token_hash
from ...protocol.errors import ConfigError
from ..access.credentials import Credentials
from ..access.token_file import TokenSource
from ..http_network import HttpNetwork
from ..tls.contexts import ServerTls, fingerprint, read_certificates
from ..tls.settings import ServingSettings
from .metrics import gauge, labelled

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("keylane.rpc")
TOKEN_DIGITS = 16
"""As many digits of a hash tell tokens apart, and no token can be found by them."""


class ServedNetwork:
    """
    The TLS with which a server program serves its clients, and the network for its calls to other
    servers.

    Raises:
        ConfigError: a certificate or key file cannot be used.
    """

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self.tls = None if settings.tls_cert is None else ServerTls(settings)
        self._authorities = self._read_authorities(settings)
        self._outgoing: HttpNetwork | None = None
        self._token: TokenSource | None = None
        if settings.is_insecure:
            log.warning(
                "insecure_network: %s is served without TLS; anyone who can reach "
                "it can read and write",
                settings.host,
            )
        if settings.is_unguarded:
            log.warning(
                "access = off: anyone who can reach %s has every right, without a token",
                settings.host,
            )

    def outgoing(
        self, token: TokenSource | None = None, *, identity: Credentials | None = None
    ) -> HttpNetwork:
        """
        Return a network for calls to other servers, with this token or these credentials. The
        caller must close it.

        Raises:
            ConfigError: a file cannot be used.
        """
        self._token = token
        self._outgoing = HttpNetwork(self._settings.client_tls(), token=token, identity=identity)
        return self._outgoing

    def adopt(self, settings: ServingSettings) -> None:
        """Reload the certificates. If they cannot be used, log the problem and keep the old
        ones.
        """
        if self.tls is None or settings.tls_cert is None:
            if (self.tls is None) != (settings.tls_cert is None):
                log.warning("TLS can only be turned on or off by a restart")
            return
        try:
            self.tls.reload(settings)
            tls = settings.client_tls()
            if self._outgoing is not None and tls is not None:
                self._outgoing.renew(tls)
            self._authorities = self._read_authorities(settings)
        except ConfigError as error:
            log.error("cannot reload the certificates: %s", error.message)
            return
        self._settings = settings
        log.warning("certificates reloaded: %s", settings.tls_cert)

    async def collect(self) -> Iterable[Metric]:
        """Return the metrics for TLS and access control."""
        insecure = self._settings.is_insecure
        families = [
            gauge(
                "keylane_insecure_network", "1: other machines connect without TLS.", int(insecure)
            ),
            gauge(
                "keylane_access_off",
                "1: other machines connect, and everybody may do everything.",
                int(self._settings.is_unguarded),
            ),
        ]
        if self.tls is not None:
            families.append(
                gauge(
                    "keylane_tls_certificate_end_seconds",
                    "Time when the server's certificate ends, in seconds since 1970.",
                    self.tls.expires_s,
                )
            )
        if self._authorities:
            families.append(
                labelled(
                    "keylane_tls_authority_end_seconds",
                    "Time when an authority that the server trusts ends, in seconds since 1970, by "
                    "the SHA-256 of its certificate.",
                    {(("sha256", name),): end_s for name, end_s in self._authorities.items()},
                )
            )
        if self._token is not None:
            digest = token_hash(self._token())[:TOKEN_DIGITS]
            families.append(
                labelled(
                    "keylane_own_token_info",
                    f"The first {TOKEN_DIGITS} digits of the hash of the server's own token.",
                    {(("sha256", digest),): 1},
                )
            )
        return families

    @staticmethod
    def _read_authorities(settings: ServingSettings) -> dict[str, float]:
        """Return when each authority in `tls_ca` ends, in seconds since 1970, by its SHA-256.
        Raises ConfigError.
        """
        if settings.tls_cert is None or settings.tls_ca is None:
            return {}
        return {
            fingerprint(certificate): certificate.not_valid_after_utc.timestamp()
            for certificate in read_certificates(settings.tls_ca)
        }
