"""Explains why connections fail: a certificate that is not accepted, or TLS at only one end."""

from __future__ import annotations

import asyncio
import errno
import ssl

import aiohttp

from ...protocol.address import parse_address
from ...protocol.errors import ConfigError, NotSentError, Reason

PROBE_SECONDS = 1.0
# OpenSSL error numbers, X509_V_ERR_*.
_NOT_YET_VALID, _EXPIRED, _HOST_MISMATCH, _IP_MISMATCH = 9, 10, 62, 64
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_CLIENT_CERTIFICATE_ALERTS = (
    "CERTIFICATE_REQUIRED",
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_CERTIFICATE_EXPIRED",
)
_RESETS = frozenset({errno.ECONNRESET, errno.EPIPE})


def tls_problem(address: str, error: BaseException) -> NotSentError | None:
    """Return the error for a connection to `address` that failed because of TLS, or None if it
    failed for another reason.
    """
    cause = _ssl_error(error)
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _certificate_error(address, cause)
    reason = cause.reason or ""
    if reason in _NO_TLS:
        return NotSentError(
            Reason.TLS_MISSING, f"the server at {address} does not use TLS", address=address
        )
    if any(alert in reason for alert in _CLIENT_CERTIFICATE_ALERTS):
        return NotSentError(
            Reason.CLIENT_CERTIFICATE,
            f"the server at {address} refuses this client's certificate, or requires one",
            address=address,
        )
    return NotSentError(f"no TLS connection to {address}: {reason or cause}", address=address)


def _certificate_error(address: str, cause: ssl.SSLCertVerificationError) -> NotSentError:
    if cause.verify_code == _EXPIRED:
        return NotSentError(
            Reason.CERTIFICATE_ENDED, f"the certificate of {address} has expired", address=address
        )
    if cause.verify_code == _NOT_YET_VALID:
        return NotSentError(
            Reason.CERTIFICATE_EARLY,
            f"the certificate of {address} is not valid yet",
            address=address,
        )
    if cause.verify_code in (_HOST_MISMATCH, _IP_MISMATCH):
        return NotSentError(
            Reason.CERTIFICATE_NAME,
            f"the certificate of {address} is not valid for this name",
            address=address,
        )
    return NotSentError(
        Reason.CERTIFICATE_UNKNOWN,
        f"the certificate of {address} is not from a trusted authority: {cause.verify_message}",
        address=address,
    )


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """Return the OpenSSL error that caused an aiohttp error, or None if there is none."""
    seen_errors: BaseException | None = error
    for _ in range(8):
        # aiohttp's classes are tested first, because they are also SSLErrors, but without details.
        if isinstance(seen_errors, aiohttp.ClientConnectorCertificateError):
            seen_errors = seen_errors.certificate_error
        elif isinstance(seen_errors, aiohttp.ClientConnectorError):
            seen_errors = seen_errors.os_error
        elif isinstance(seen_errors, ssl.SSLError):
            return seen_errors
        elif seen_errors is not None:
            seen_errors = seen_errors.__cause__ or seen_errors.__context__
    return None


async def probe_tls(
    address: str, error: BaseException, context: ssl.SSLContext | None
) -> NotSentError | None:
    """
    Find out with a probe, which takes up to PROBE_SECONDS, whether a server closed a connection
    because of TLS.

    If the address has never answered, an error means that the server has seen no request, so
    nothing was done.

    Args:
        context: the TLS context of the closed connection; None if it had no TLS.

    Returns:
        The error, or None if TLS was not the reason.
    """
    if not is_disconnect(error):
        return None
    if context is None:
        if await _is_closed(address, _unverified_context(), wait_s=0) is None:
            return None
        return NotSentError(
            Reason.TLS_NEEDED, f"the server at {address} requires TLS", address=address
        )
    if await _is_closed(address, context):
        return NotSentError(
            Reason.CLIENT_CERTIFICATE,
            f"the server at {address} requires a client certificate, or another one",
            address=address,
        )
    return None


def is_disconnect(error: BaseException) -> bool:
    """Return True if the other end has closed the connection, as a server does when it refuses a
    client's certificate.
    """
    is_reset = isinstance(error, OSError) and error.errno in _RESETS  # or ClientOSError
    return is_reset or isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)


def _unverified_context() -> ssl.SSLContext:
    """Return a context for a probe that sends nothing, and only finds out whether the server uses
    TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _is_closed(
    address: str, context: ssl.SSLContext, *, wait_s: float = PROBE_SECONDS
) -> bool | None:
    """Return True if the server closes a TLS connection within `wait_s` before any request, False
    if it does not, or None if no connection is possible.
    """
    writer = None
    try:
        host, port = parse_address(address)
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
        async with asyncio.timeout(wait_s):
            return not await reader.read(1)
    except (ConnectionError, ssl.SSLError):  # the server's alert, or an earlier reset
        return None if writer is None else True
    except (ConfigError, OSError, TimeoutError):
        return None if writer is None else False
    finally:
        if writer is not None:
            writer.transport.abort()
