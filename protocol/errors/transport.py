"""What keeps a connection from being secure, and the files of certificates.  Pure."""

from __future__ import annotations

from .base import Detail, KeylaneError
from .failures import NotSentError
from .refusals import ConfigError


class CertificateNameError(NotSentError):
    """The server's certificate is valid for other names than the one that was connected to."""

    code = 1340
    summary = "the server's certificate has other names"
    hint = (
        "Connect by a name in the certificate, or give the server a certificate with this name.  "
        "keylane cluster check shows the names."
    )


class CertificateEndedError(NotSentError):
    """The server's certificate has ended."""

    code = 1341
    summary = "the server's certificate has ended"
    hint = (
        "Give the server a new certificate and send it SIGHUP.  Also check the "
        "clock of this machine."
    )


class CertificateEarlyError(NotSentError):
    """The server's certificate is not valid yet."""

    code = 1342
    summary = "the server's certificate is not valid yet"
    hint = (
        "Compare the clocks of both machines: one of them is wrong, or the "
        "certificate is not valid yet."
    )


class CertificateFileError(ConfigError):
    """A file of a certificate or key that cannot be used; nothing was started or changed."""

    code = 1343
    summary = "the file of a certificate or key cannot be used"
    hint = "The file must be PEM, readable by the user of this program, and valid today."


class CertificateKeyError(ConfigError):
    """The private key is not that of the certificate; nothing was started or changed."""

    code = 1344
    summary = "the private key does not fit the certificate"
    hint = "Set tls_key to the private key of this tls_cert."


class CertificateUnknownError(NotSentError):
    """The server's certificate was not made by a certificate authority that is trusted here."""

    code = 1345
    summary = "the server's certificate is of an unknown certificate authority"
    hint = (
        "Set tls_ca, or KEYLANE_TLS_CA, to the file of the authority that issued the server's "
        "certificate."
    )


class TlsNeededError(NotSentError):
    """The server at this address serves TLS only, and the client has no certificate authority."""

    code = 1346
    summary = "the server wants TLS"
    hint = "Set KEYLANE_TLS_CA to the file of the cluster's certificate authority, ca.pem."


class TlsMissingError(NotSentError):
    """The server at this address serves no TLS, and the client wants it."""

    code = 1347
    summary = "the server serves no TLS"
    hint = (
        "Check the address.  Give the server tls_cert and tls_key; for a server without TLS, unset "
        "KEYLANE_TLS_CA."
    )


class ClientCertificateError(NotSentError):
    """The server accepts only clients with a certificate of its authority."""

    code = 1348
    summary = "the server wants a client certificate"
    hint = (
        "Set KEYLANE_TLS_CERT and KEYLANE_TLS_KEY to an unexpired certificate issued by the "
        "authority in the server's tls_client_ca.  An open client reloads replaced files by itself."
    )


class ClusterFolderError(KeylaneError):
    """The folder for a new cluster has files already, or cannot be written; nothing in it was
    changed.
    """

    code = 1349
    summary = "the folder cannot take a new cluster"
    hint = "Name a new or empty folder."
    path = Detail(str)
