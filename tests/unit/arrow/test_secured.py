"""What secures a reader's connections: it travels without a secret, and says where a file is missing."""

from __future__ import annotations

import asyncio
import pickle
import platform

import pytest

import keylane.arrow
from keylane import TlsSettings
from keylane.arrow.secured import Secured
from keylane.protocol.errors import (
    CertificateFileError,
    ConfigError,
    InvalidRequestError,
    TokenInvalidError,
)

TOKEN = "kl_" + "a" * 43


def test_files_travel_and_a_token_does_not():
    """Nor is a token in the text of the object."""
    secured = Secured(tls=TlsSettings(ca="ca.pem"), token_file="t")
    assert pickle.loads(pickle.dumps(secured)) == secured
    secret = Secured(token=TOKEN)
    assert TOKEN not in repr(secret)
    with pytest.raises(InvalidRequestError, match="does not travel"):
        pickle.dumps(secret)


@pytest.mark.parametrize(
    ("secured", "error", "name"),
    [
        (Secured(tls=TlsSettings(ca="/nowhere/ca.pem")), CertificateFileError, "/nowhere/ca.pem"),
        (Secured(token_file="/nowhere/token"), TokenInvalidError, "/nowhere/token"),
    ],
    ids=("authority", "token"),
)
def test_file_that_is_missing_is_told_with_its_machine(secured, error, name):
    """A file of the driver may be missing on an executor."""

    async def opened() -> None:
        secured.network()

    with pytest.raises(error) as caught:
        asyncio.run(opened())
    assert name in str(caught.value)
    assert f", on {platform.node()}" in str(caught.value)


def test_argument_that_cannot_secure_is_refused_by_the_call():
    with pytest.raises(ConfigError, match="TlsSettings"):
        keylane.arrow.read("127.0.0.1:1", "flights", tls="ca.pem")
    with pytest.raises(TokenInvalidError, match="token="):
        keylane.arrow.read("127.0.0.1:1", "flights", token="secret")
