"""A private certificate authority that issues certificates with ECDSA keys on P-256, as PEM.

The extensions follow RFC 5280; OpenSSL's strict check requires all of them.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ....protocol.errors import ConfigError, Reason
from ....rpc.reasons import reason
from ....rpc.tls.contexts import read_certificates

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
"""Validity in days, which is the limit of public authorities. A renewal that is only due after
several years would be forgotten.
"""
LEEWAY = dt.timedelta(days=1)
"""How far a certificate's validity is backdated, so that a host whose clock is slow can start and
is reported by `keylane cluster check`.
"""

OWN_NAMES = ("localhost", "127.0.0.1")
"""Names in every server's certificate, for commands that run on the host itself."""


def server_names(host: str) -> list[str]:
    """Return the names for the certificate of a host's servers."""
    return [host, *(name for name in OWN_NAMES if name != host)]


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """An authority with its private key, that issues certificates at `now`."""

    def __init__(
        self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, now: dt.datetime
    ) -> None:
        self.certificate = certificate
        self._key = key
        self._now = now

    @classmethod
    def create(cls, name: str, now: dt.datetime) -> Self:
        """Return a new authority that is valid from `now`. Its private key exists only in the
        object.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(subject, subject, key.public_key(), now, dt.timedelta(AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key, now)

    @classmethod
    def load(cls, certificate_path: Path, key_path: Path, now: dt.datetime) -> Self:
        """
        Return the authority whose key is in a file, and whose certificate is one of those in
        another file.

        Raises:
            ConfigError: a file cannot be read, the key belongs to none of the certificates, or the
                certificate has expired.
        """
        try:
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            text = "the key is encrypted" if isinstance(error, TypeError) else reason(error)
            raise ConfigError(
                Reason.CERTIFICATE_FILE, f"cannot use {key_path}: {text}", path=str(key_path)
            ) from error
        certificate = next(
            (
                each
                for each in read_certificates(certificate_path)
                if each.public_key() == key.public_key()
            ),
            None,
        )
        if certificate is None or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                Reason.CERTIFICATE_KEY,
                f"the key in {key_path} is not that of an authority in {certificate_path}",
                path=str(key_path),
            )
        if certificate.not_valid_after_utc <= now:
            raise ConfigError(
                Reason.CERTIFICATE_FILE,
                f"the authority in {certificate_path} expired on "
                f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC",
                path=str(certificate_path),
            )
        return cls(certificate, key, now)

    @property
    def pair(self) -> CertificatePair:
        """The authority's own certificate and key."""
        return _to_pem_pair(self.certificate, self._key)

    def issue(
        self, names: Sequence[str], *, start: dt.datetime | None = None, days: float = SERVER_DAYS
    ) -> CertificatePair:
        """
        Issue a certificate for servers and clients.

        Args:
            names: host names and addresses; the first is also the common name.
            start: start of the validity; by default the authority's `now`.
            days: validity in days.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        roles = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(
                self.certificate.subject,
                name,
                key.public_key(),
                start or self._now,
                dt.timedelta(days),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(roles), critical=False)
            .add_extension(issuer_key, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return _to_pem_pair(certificate, key)


def has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return True if an authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    issuer: x509.Name,
    name: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: dt.datetime,
    lifetime: dt.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - LEEWAY)
        .not_valid_after(start + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(**enabled: bool) -> x509.KeyUsage:
    disabled = dict.fromkeys(
        (
            *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
            *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    return x509.KeyUsage(**{**disabled, **enabled})


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _to_pem_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertificatePair:
    encoding = serialization.Encoding.PEM
    key_pem = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return CertificatePair(certificate.public_bytes(encoding), key_pem)
