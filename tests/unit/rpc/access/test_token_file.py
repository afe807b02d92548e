"""A token that comes from a file: what is said when the file is gone."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from keylane.protocol.access.tokens import make_token
from keylane.protocol.errors import UnauthenticatedError
from keylane.rpc.access.token_file import TokenFile, refused_token

REFUSAL = UnauthenticatedError(
    "the token is not of this cluster, or it was revoked", reason="unknown token"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(make_token(random.Random(1).getrandbits))
    return path


def test_token_file_tells_once_when_it_is_gone_and_when_it_is_back(path, caplog):
    """However often the token is used."""
    token = path.read_text()
    source = TokenFile(path)
    path.unlink()
    with caplog.at_level(logging.INFO):
        assert {source() for _ in range(5)} == {token}
        assert [record.getMessage() for record in caplog.records] == [
            f"the file {path} is gone: the last token of it is used"
        ]
        path.write_text(token)
        assert {source() for _ in range(5)} == {token}
    assert [record.getMessage() for record in caplog.records][1:] == [
        f"the token in {path} is read again"
    ]


def test_refusal_says_that_the_file_is_gone_when_it_is(path):
    """A deleted file was told as a token that was revoked."""
    source = TokenFile(path)
    assert refused_token(REFUSAL, source) is REFUSAL
    path.unlink()
    source()
    told = refused_token(REFUSAL, source)
    assert told.message.startswith(f"the file {path} is gone, and the last token of it is refused")
    assert told.reason == "unknown token"
    path.write_text("no token")
    source()
    assert f"the file {path}" in refused_token(REFUSAL, source).message


def test_refusal_stays_as_it_is_when_the_token_is_of_no_file():
    assert refused_token(REFUSAL, lambda: "kl_x") is REFUSAL
    assert refused_token(REFUSAL, None) is REFUSAL
