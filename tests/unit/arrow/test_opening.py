"""A network that cannot be opened: the file and the machine are told."""

from __future__ import annotations

import asyncio
import platform

import pytest

from keylane import TlsSettings
from keylane.arrow.opening import open_network
from keylane.arrow.secured import Secured
from keylane.protocol.errors import CertificateFileError, TokenInvalidError


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
        open_network(secured)

    with pytest.raises(error) as caught:
        asyncio.run(opened())
    assert name in str(caught.value)
    assert f", on {platform.node()}" in str(caught.value)
