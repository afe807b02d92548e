"""TLS contexts for servers and clients, created from PEM files. Only TLS 1.3 is supported.

    server   tls_cert + tls_key ─▶ ServerTls ◀── reload at SIGHUP: new handshakes use the new files
             tls_client_ca ─▶ clients need a certificate
    client   ca ─▶ verifies the server's certificate and its name
             replaced files ─▶ used by the next connection

A server does not start with an expired certificate, so that the error appears where it can be
fixed.
"""

from __future__ import annotations

import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, MissingExtraError, Reason
from ...protocol.http.tls_settings import TlsSettings
from .resumption import ResumingContext, SmallReadContext
from .settings import ServingSettings

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


log = logging.getLogger("keylane.rpc")

SHARED_MAX = 256
"""The maximum number of client contexts that a process keeps, so that later clients can resume
their sessions.
"""
_shared: OrderedDict[tuple[bytes, str], ResumingContext] = OrderedDict()
"""Client contexts by (digest of the client's files, address of the server)."""


class ServerTls:
    """
    The TLS of a running server.

    Args:
        wall_ms: returns the wall-clock time in milliseconds since 1970; None uses the system clock.

    Raises:
        ConfigError: see `reload`.
    """

    def __init__(self, settings: ServingSettings, wall_ms: Callable[[], int] | None = None) -> None:
        self._wall_ms = wall_ms or SystemClock().wall_ms
        self.names, self.expires_s = self._check(settings)
        self.context = _server_context()
        """The context for new connections."""
        _load_files(self.context, settings)

    def reload(self, settings: ServingSettings) -> None:
        """
        Reload the files for new connections. Sessions of earlier connections can no longer be
        resumed.

        Raises:
            ConfigError: a file cannot be used; the old ones stay in use.
        """
        names, expires_s = self._check(settings)
        context = _server_context()
        _load_files(context, settings)
        self.context = context
        self.names = names
        self.expires_s = expires_s

    def _check(self, settings: ServingSettings) -> tuple[frozenset[str], float]:
        """Return the names in the certificate, and when it expires in seconds since 1970. Raises
        ConfigError if it is not valid now.
        """
        assert settings.tls_cert is not None
        certificate = read_certificate(settings.tls_cert)
        now_s = self._wall_ms() / 1000
        if certificate.not_valid_after_utc.timestamp() < now_s:
            raise ConfigError(
                Reason.CERTIFICATE_FILE,
                f"the certificate in {settings.tls_cert} expired on "
                f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC",
                path=str(settings.tls_cert),
            )
        if certificate.not_valid_before_utc.timestamp() > now_s:
            raise ConfigError(
                Reason.CERTIFICATE_FILE,
                f"the certificate in {settings.tls_cert} is valid from "
                f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on",
                path=str(settings.tls_cert),
            )
        return names_of(certificate), certificate.not_valid_after_utc.timestamp()


def read_certificate(path: Path) -> Certificate:
    """Return the first certificate in a PEM file. Raises ConfigError or MissingExtraError."""
    return read_certificates(path)[0]


def read_certificates(path: Path) -> list[Certificate]:
    """Return all certificates in a PEM file, at least one. Raises ConfigError or
    MissingExtraError.
    """
    try:
        from cryptography.x509 import load_pem_x509_certificates
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "the check of a certificate", "access") from error
    try:
        return load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _file_error(path, error) from error


def fingerprint(certificate: Certificate) -> str:
    """Return the SHA-256 of a certificate, as 64 hexadecimal digits."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def names_of(certificate: Certificate) -> frozenset[str]:
    """Return the host names and addresses that a certificate is valid for."""
    from cryptography.x509 import DNSName, ExtensionNotFound, IPAddress, SubjectAlternativeName

    try:
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    except ExtensionNotFound:
        return frozenset()
    addresses = (str(address) for address in names.get_values_for_type(IPAddress))
    return frozenset([*names.get_values_for_type(DNSName), *addresses])


class ClientContexts:
    """
    A client's TLS contexts, one per server, because a session can only be resumed with the server
    that started it.

    Clients in the same process share contexts if their files have the same content.

    Args:
        follows_files: True if replaced files are reloaded automatically; a server program passes
            False, and calls `renew` on SIGHUP.

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(self, tls: TlsSettings, *, follows_files: bool = False) -> None:
        self._follows_files = follows_files
        self.renew(tls)

    def renew(self, tls: TlsSettings) -> None:
        """Reload the files for later connections. If that raises ConfigError, the old ones stay in
        use.
        """
        # Taken before the content is read, so that a later change is noticed at the next
        # connection.
        stamps = _stamps_of(tls)
        digest, first_context = _digest_of(tls), client_context(tls)
        self._tls = tls
        self._stamps = stamps
        self._digest = digest
        self._first_context = first_context
        self._contexts: OrderedDict[str, ResumingContext] = OrderedDict()
        """Contexts by address. Their number is limited, because brokers may come back at other
        addresses.
        """

    def of(self, address: str) -> ssl.SSLContext:
        """Return the context for connections to an address."""
        if self._follows_files:
            self._renew_if_replaced()
        context = self._contexts.get(address)
        if context is None:
            key = (self._digest, address)
            context = _shared.pop(key, None) or self._new_context()
            self._contexts[address] = context
            if context is not self._first_context:
                _shared[key] = context
            for contexts in (_shared, self._contexts):
                while len(contexts) > SHARED_MAX:
                    contexts.popitem(last=False)
        self._contexts.move_to_end(address)
        return context

    @property
    def shows_certificate(self) -> bool:
        """True if this client has its own certificate."""
        return bool(self._tls.cert)

    def own_certificate_problem(self) -> str:
        """Return why no server can accept this client's certificate; "" if it is valid now, or
        there is none.
        """
        if not self._tls.cert:
            return ""
        try:
            certificate = read_certificate(Path(self._tls.cert))
        except ConfigError as error:
            return error.message
        now_s = SystemClock().wall_ms() / 1000
        if certificate.not_valid_after_utc.timestamp() < now_s:
            problem = f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        elif certificate.not_valid_before_utc.timestamp() > now_s:
            problem = f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        else:
            return ""
        return f"this client's certificate, in {self._tls.cert}, {problem}"

    def _renew_if_replaced(self) -> None:
        """Reload the files if they were replaced. If they do not match, for example because only
        one of a pair was replaced, continue with the old ones.
        """
        stamps = _stamps_of(self._tls)
        if stamps == self._stamps:
            return
        try:
            self.renew(self._tls)
        except ConfigError as error:
            self._stamps = stamps  # log once; replacing the second file changes them again
            log.warning("TLS keeps using the previous files: %s", error.message)

    def _new_context(self) -> ResumingContext:
        """Return a new context from the same files, or the first context if the files were changed
        or removed.
        """
        try:
            context = client_context(self._tls)
            return context if _digest_of(self._tls) == self._digest else self._first_context
        except ConfigError:
            return self._first_context


def _stamps_of(tls: TlsSettings) -> tuple[tuple[int, int, int] | None, ...]:
    """Return values that change when one of a client's files is written or replaced. None stands
    for a file that cannot be read.
    """
    return tuple(_stamp_of(path) for path in (tls.ca, tls.cert, tls.key))


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _digest_of(tls: TlsSettings) -> bytes:
    """Return a digest of the contents of a client's files. Raises ConfigError."""
    digest = sha256()
    for path in (tls.ca, tls.cert, tls.key):
        try:
            digest.update(sha256(Path(path).read_bytes() if path else b"").digest())
        except OSError as error:
            raise _file_error(Path(path), error) from error
    return digest.digest()


def client_context(tls: TlsSettings) -> ResumingContext:
    """
    Return a new context for a client's connections to one server.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_authority(context, Path(tls.ca))
    if tls.cert:
        _load_pair(context, Path(tls.cert), Path(tls.key))
    return context


def _server_context() -> ssl.SSLContext:
    context = SmallReadContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load_files(context: ssl.SSLContext, settings: ServingSettings) -> None:
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    if settings.tls_client_ca is not None:
        _load_authority(context, settings.tls_client_ca)
    required = ssl.CERT_OPTIONAL if settings.tls_client_principals else ssl.CERT_REQUIRED
    context.verify_mode = required if settings.tls_client_ca else ssl.CERT_NONE
    _load_pair(context, settings.tls_cert, settings.tls_key)


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load a certificate and its key. Raises ConfigError."""
    for path in (cert, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise _file_error(path, error) from error
    try:
        # Without a callback, OpenSSL would prompt for the password of an encrypted key on the
        # terminal.
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                Reason.CERTIFICATE_KEY,
                f"the key in {key} is not that of the certificate in {cert}",
                path=str(key),
            ) from error
        read_certificate(cert)
        raise _file_error(key, error) from error
    except (OSError, ValueError) as error:
        raise _file_error(key, error) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _load_authority(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise _file_error(path, error) from error


def _file_error(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        text = error.strerror or str(error)
    else:
        text = "it has no PEM certificate or key that can be read"
        if "encrypted" in str(error):
            text = "the key is encrypted"
    return ConfigError(Reason.CERTIFICATE_FILE, f"cannot use {path}: {text}", path=str(path))
