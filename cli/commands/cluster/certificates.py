"""A private certificate authority that issues certificates with ECDSA keys on P-256, as PEM.

The extensions follow RFC 5280; OpenSSL's strict check requires all of them.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
"""Validity in days, which is the limit of public authorities. A renewal that is only due after
several years would be forgotten.
"""
LEEWAY = dt.timedelta(days=1)
"""How far a certificate's validity is backdated, so that a host whose clock is slow can start and
is reported by `keylane cluster check`.
"""


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """A new authority that is valid from `now`. Its private key exists only in this object."""

    def __init__(self, name: str, now: dt.datetime) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._now = now
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        self._certificate = (
            self._builder(self._name, self._key.public_key(), now, dt.timedelta(AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pair(self) -> CertificatePair:
        """The authority's own certificate and key."""
        return _to_pem_pair(self._certificate, self._key)

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
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(name, key.public_key(), start or self._now, dt.timedelta(days))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(roles), critical=False)
            .add_extension(authority, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return _to_pem_pair(certificate, key)

    def _builder(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        start: dt.datetime,
        lifetime: dt.timedelta,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
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
