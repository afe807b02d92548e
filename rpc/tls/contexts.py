"""The TLS contexts of servers and clients, made from PEM files; TLS 1.3 only.

    server   tls_cert + tls_key ─▶ ServerTls ◀── reload at SIGHUP: new handshakes use the new files
             tls_client_ca ─▶ clients need a certificate
    client   ca ─▶ the server's certificate and its name are verified
             files that are replaced while it runs ─▶ the next connection uses them

A server does not start with an expired certificate, so the error appears where it can be fixed.

TLS contexts of clients that resume sessions: a new connection to a known server needs no
certificate.

    handshake ─▶ the server's tickets arrive with its first bytes ─▶ kept, one for each name
              ─▶ offered at the next handshake

A server that cannot use a ticket, for example after its restart, does a full handshake. A resumed
session rests on the certificate of the first one, so it is offered until that certificate ends, and
for at most RESUMED_S.

It uses only what `ssl` documents: `SSLContext.wrap_bio` with a session, and
`SSLContext.sslobject_class`.
"""

from __future__ import annotations

import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, MissingExtraError, Reason
from ...protocol.http.tls_settings import TlsSettings
from .settings import ServingSettings

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


RESUMED_S = 3_600
"""Seconds for which a session is offered after its certificate was verified; OpenSSL's servers
accept it for two hours.
"""
NAMES_MAX = 16
"""Number of server names whose sessions a context keeps; its connections are to one server, which
usually has one name.
"""
READ_BYTES = 64 << 10
"""Bytes of the buffer that a read makes. Event loops ask for 256 KiB and get a record of 16 KiB.
"""


_wall_ms = SystemClock().wall_ms


def _now_s() -> float:
    """Return the time of the wall clock, in seconds like the dates of certificates."""
    return _wall_ms() / 1000


class _Kept(NamedTuple):
    session: ssl.SSLSession
    until_s: float


class BulkObject(ssl.SSLObject):
    """TLS of one connection; a read without its own buffer makes a small one."""

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`."""
        return super().read(min(size, READ_BYTES)) if buffer is None else super().read(size, buffer)


class BulkContext(ssl.SSLContext):
    """A context whose connections read without large buffers."""

    sslobject_class = BulkObject


class _ResumingObject(BulkObject):
    """TLS of one connection of a client; it gives its context the session once it can be
    resumed.
    """

    _fresh = True

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`; a server's tickets come before its first bytes."""
        taken = super().read(size, buffer)  # raises while nothing has arrived
        if self._fresh:
            self._fresh = False
            context = self.context
            assert isinstance(context, ResumingContext)
            context.take(self)
        return taken


class ResumingContext(ssl.SSLContext):
    """The context of a client's connections to one server."""

    sslobject_class = _ResumingObject
    _kept: OrderedDict[str, _Kept]

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`; it offers the session that was kept for the name."""
        kept = self._sessions.get(str(server_hostname))
        if session is None and kept is not None and _now_s() < kept.until_s:
            session = kept.session
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def take(self, connection: ssl.SSLObject) -> None:
        """
        Keep the session of a connection for the next ones to the same name.

        A connection that has resumed a session brings no new one: the offered session is offered
        again until its time is over. Each read of `session` leaves a copy of it in memory for
        ever, with Python before 3.12.7, and with 3.13.0 (gh-116810), so it is read once for each
        full handshake.
        """
        if connection.session_reused:
            return
        session = connection.session
        if session is None or not session.has_ticket:
            return
        now_s = _now_s()
        certificate: Any = connection.getpeercert() or {}
        ends = certificate.get("notAfter")
        ends_s = ssl.cert_time_to_seconds(ends) if ends else now_s
        name = str(connection.server_hostname)
        self._sessions[name] = _Kept(session, min(ends_s, now_s + RESUMED_S))
        self._sessions.move_to_end(name)
        while len(self._sessions) > NAMES_MAX:
            self._sessions.popitem(last=False)

    @property
    def _sessions(self) -> OrderedDict[str, _Kept]:
        """Kept sessions, made at the first use because `ssl.SSLContext` is made by `__new__`."""
        if "_kept" not in self.__dict__:
            self._kept = OrderedDict()
        return self._kept


log = logging.getLogger("keylane.rpc")

SHARED_MAX = 256
"""Most contexts of clients that a process keeps for its next clients, with the sessions that these
resume.
"""
_shared: OrderedDict[tuple[bytes, str], ResumingContext] = OrderedDict()
"""Context of connections by (content of a client's files, address of a server)."""


class ServerTls:
    """
    The TLS of a running server.

    Args:
        wall_ms: returns the time in milliseconds since 1970; None: the machine's.

    Raises:
        ConfigError: see `reload`.
    """

    def __init__(self, settings: ServingSettings, wall_ms: Callable[[], int] | None = None) -> None:
        self._wall_ms = wall_ms or SystemClock().wall_ms
        self.names, self.ends_s = self._check(settings)
        self.context = _server_context()
        """Context for the next connection."""
        _use(self.context, settings)

    def reload(self, settings: ServingSettings) -> None:
        """
        Read the files again; open connections are not affected, but their sessions cannot be
        resumed.

        Raises:
            ConfigError: a file cannot be used; the old ones stay in use.
        """
        names, ends_s = self._check(settings)
        context = _server_context()
        _use(context, settings)
        self.context = context
        self.names = names
        self.ends_s = ends_s

    def _check(self, settings: ServingSettings) -> tuple[frozenset[str], float]:
        """Return the names of the certificate, and its end in seconds since 1970. Raises
        ConfigError.
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
    """Return the first certificate in a PEM file. Raises ConfigError, MissingExtraError."""
    try:
        from cryptography.x509 import load_pem_x509_certificate
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "the check of a certificate", "access") from error
    try:
        return load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error


def names_of(certificate: Certificate) -> frozenset[str]:
    """Return the host names and addresses for which a certificate is valid."""
    from cryptography.x509 import DNSName, ExtensionNotFound, IPAddress, SubjectAlternativeName

    try:
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    except ExtensionNotFound:
        return frozenset()
    addresses = (str(address) for address in names.get_values_for_type(IPAddress))
    return frozenset([*names.get_values_for_type(DNSName), *addresses])


class ClientContexts:
    """
    The contexts of a client's connections, one for each server, because only the server that began
    a session can resume it.

    Clients of a process whose files have the same content share them.

    Args:
        follows_files: True if replaced files are read again automatically, for a client; a server
            reads them at SIGHUP.

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(self, tls: TlsSettings, *, follows_files: bool = False) -> None:
        self._follows_files = follows_files
        self.renew(tls)

    def renew(self, tls: TlsSettings) -> None:
        """Read the files again, for later connections. Raises the errors of the class; then the
        old files stay in use.
        """
        # Before the content: a later change is seen at the next connection.
        stamps = _stamps_of(tls)
        content, first = _content_of(tls), client_context(tls)
        self._tls = tls
        self._stamps = stamps
        self._content = content
        self._first = first
        self._of: OrderedDict[str, ResumingContext] = OrderedDict()
        """Contexts by address; their number is limited, because brokers return at other addresses.
        """

    def of(self, address: str) -> ssl.SSLContext:
        """Return the context of connections to an address."""
        if self._follows_files:
            self._follow()
        context = self._of.get(address)
        if context is None:
            known = (self._content, address)
            context = _shared.pop(known, None) or self._another()
            self._of[address] = context
            if context is not self._first:
                _shared[known] = context
            for contexts in (_shared, self._of):
                while len(contexts) > SHARED_MAX:
                    contexts.popitem(last=False)
        self._of.move_to_end(address)
        return context

    @property
    def shows_certificate(self) -> bool:
        """True if this client has a certificate of its own."""
        return bool(self._tls.cert)

    def own_certificate_problem(self) -> str:
        """Return why no server can accept the certificate in this client's file; "" if its time is
        right, or there is none.
        """
        if not self._tls.cert:
            return ""
        try:
            certificate = read_certificate(Path(self._tls.cert))
        except ConfigError as error:
            return error.message
        now_s = SystemClock().wall_ms() / 1000
        if certificate.not_valid_after_utc.timestamp() < now_s:
            when = f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        elif certificate.not_valid_before_utc.timestamp() > now_s:
            when = f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        else:
            return ""
        return f"this client's certificate, in {self._tls.cert}, {when}"

    def _follow(self) -> None:
        """Use files that have been replaced; if they do not fit, for example one of a pair, keep
        the old ones in use.
        """
        stamps = _stamps_of(self._tls)
        if stamps == self._stamps:
            return
        try:
            self.renew(self._tls)
        except ConfigError as error:
            self._stamps = stamps  # told once; the second file of a pair changes them again
            log.warning("TLS keeps using the previous files: %s", error.message)

    def _another(self) -> ResumingContext:
        """Return one more context of the same files; the first one if they have changed or are
        gone.
        """
        try:
            another = client_context(self._tls)
            return another if _content_of(self._tls) == self._content else self._first
        except ConfigError:
            return self._first


def _stamps_of(tls: TlsSettings) -> tuple[tuple[int, int, int] | None, ...]:
    """Return values that change when a file of a client is written or replaced; None for a file
    that cannot be examined.
    """
    return tuple(_stamp_of(path) for path in (tls.ca, tls.cert, tls.key))


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _content_of(tls: TlsSettings) -> bytes:
    """Return a digest of the content of a client's files. Raises ConfigError."""
    digest = sha256()
    for path in (tls.ca, tls.cert, tls.key):
        try:
            digest.update(sha256(Path(path).read_bytes() if path else b"").digest())
        except OSError as error:
            raise _unusable(Path(path), error) from error
    return digest.digest()


def client_context(tls: TlsSettings) -> ResumingContext:
    """
    Return the context of a client's connections to one server.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _trust(context, Path(tls.ca))
    if tls.cert:
        _load_pair(context, Path(tls.cert), Path(tls.key))
    return context


def _server_context() -> ssl.SSLContext:
    context = BulkContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _use(context: ssl.SSLContext, settings: ServingSettings) -> None:
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    if settings.tls_client_ca is not None:
        _trust(context, settings.tls_client_ca)
    asked = ssl.CERT_OPTIONAL if settings.tls_client_principals else ssl.CERT_REQUIRED
    context.verify_mode = asked if settings.tls_client_ca else ssl.CERT_NONE
    _load_pair(context, settings.tls_cert, settings.tls_key)


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load a certificate and its key. Raises ConfigError."""
    for path in (cert, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise _unusable(path, error) from error
    try:
        # Without a callback OpenSSL asks the terminal for the password of an encrypted key.
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                Reason.CERTIFICATE_KEY,
                f"the key in {key} is not that of the certificate in {cert}",
                path=str(key),
            ) from error
        read_certificate(cert)
        raise _unusable(key, error) from error
    except (OSError, ValueError) as error:
        raise _unusable(key, error) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _trust(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        text = error.strerror or str(error)
    else:
        text = "it has no PEM certificate or key that can be read"
        if "encrypted" in str(error):
            text = "the key is encrypted"
    return ConfigError(Reason.CERTIFICATE_FILE, f"cannot use {path}: {text}", path=str(path))
