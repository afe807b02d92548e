"""TLS and token of a reader are sent without secrets; a missing file is reported with the
machine.
"""

from __future__ import annotations

import pickle

import pytest

import keylane.arrow
from keylane import TlsSettings
from keylane.arrow.connection_security import ConnectionSecurity
from keylane.protocol.errors import ConfigError, InvalidRequestError, Reason
from support.raising import raises

TOKEN = "kl_" + "a" * 43


def test_files_travel_and_a_token_does_not():
    """The repr does not contain the token either."""
    secured = ConnectionSecurity(tls=TlsSettings(ca="ca.pem"), token_file="t")
    assert pickle.loads(pickle.dumps(secured)) == secured
    secret = ConnectionSecurity(token=TOKEN)
    assert TOKEN not in repr(secret)
    with pytest.raises(InvalidRequestError, match="a token is not sent to other processes"):
        pickle.dumps(secret)


def test_argument_that_cannot_secure_is_refused_by_the_call():
    with pytest.raises(ConfigError, match="TlsSettings"):
        keylane.arrow.read("127.0.0.1:1", "flights", tls="ca.pem")
    with raises(Reason.TOKEN_INVALID, match="token="):
        keylane.arrow.read("127.0.0.1:1", "flights", token="secret")
