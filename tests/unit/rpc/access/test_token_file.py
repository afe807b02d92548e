"""Tokens from files, and the errors when a file is missing."""

from __future__ import annotations

import logging
import os
import random
import resource
import threading
from pathlib import Path

import pytest

from keylane.protocol.access.tokens import make_token
from keylane.protocol.errors import Reason, UnauthenticatedError
from keylane.rpc.access.token_file import (
    FILE_BYTES_MAX,
    TokenFile,
    refused_token_error,
    token_in_file,
)
from support.raising import raises

REFUSAL = UnauthenticatedError(
    "the token is unknown in this cluster, or was revoked", problem="unknown token"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(make_token(random.Random(1).getrandbits))
    return path


def test_token_file_tells_once_when_it_is_gone_and_when_it_is_back(path, caplog):
    """The problem is logged once, however often the token is used."""
    token = path.read_text()
    source = TokenFile(path)
    path.unlink()
    with caplog.at_level(logging.INFO):
        assert {source() for _ in range(5)} == {token}
        assert [record.getMessage() for record in caplog.records] == [
            f"the file {path} is gone; the last token stays in use"
        ]
        path.write_text(token)
        assert {source() for _ in range(5)} == {token}
    assert [record.getMessage() for record in caplog.records][1:] == [
        f"read the token in {path} again"
    ]


def test_refusal_says_that_the_file_is_gone_when_it_is(path):
    """A deleted file was reported as a revoked token."""
    source = TokenFile(path)
    assert refused_token_error(REFUSAL, source) is REFUSAL
    path.unlink()
    source()
    told = refused_token_error(REFUSAL, source)
    assert told.message.startswith(f"the file {path} is gone, and its last token is refused")
    assert told.problem == "unknown token"
    path.write_text("no token")
    source()
    assert f"the file {path}" in refused_token_error(REFUSAL, source).message


def test_refusal_stays_as_it_is_when_the_token_is_of_no_file():
    assert refused_token_error(REFUSAL, lambda: "kl_x") is REFUSAL
    assert refused_token_error(REFUSAL, None) is REFUSAL


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\r\n "])
@pytest.mark.parametrize("behind", [b"", b"\n", b"\r\n"])
def test_token_is_read_when_an_editor_put_marks_around_it(path, before: bytes, behind: bytes):
    token = path.read_text()
    path.write_bytes(before + token.encode() + behind)
    assert token_in_file(path) == token


@pytest.mark.parametrize("share", [0, 1, 20, 45])
def test_last_token_is_used_when_the_file_is_half_written(path, share: int):
    token = path.read_text()
    source = TokenFile(path)
    path.write_text(token[:share])
    assert source() == token
    assert str(path) in source.problem
    assert token[:20] not in source.problem


def test_token_is_read_from_a_pipe_once(path):
    """Like the shell's `<(…)`: a second read returns nothing, which is not an error."""
    token = path.read_text()
    reading, writing = os.pipe()

    def write() -> None:
        os.write(writing, token[:10].encode())
        os.write(writing, token[10:].encode())
        os.close(writing)

    writer = threading.Timer(0.1, write)
    writer.start()
    try:
        source = TokenFile(Path(f"/dev/fd/{reading}"))
        assert [source(), source(), source.problem] == [token, token, ""]
    finally:
        writer.join()
        os.close(reading)


def test_pipe_without_a_writer_holds_no_program(path):
    """A broker's event loop was blocked while it read the token."""
    token = path.read_text()
    source = TokenFile(path)
    path.unlink()
    os.mkfifo(path)
    with raises(Reason.TOKEN_INVALID):
        token_in_file(path, wait_s=0.1)
    assert source() == token
    writer = os.open(path, os.O_RDWR)
    try:
        with raises(Reason.TOKEN_INVALID, match="timed out"):
            token_in_file(path, wait_s=0.1)
        assert source() == token
    finally:
        os.close(writer)


def test_token_is_read_when_the_process_has_over_1023_open_files(path):
    """`select.select` refuses such a file descriptor, so a new token was never read."""
    token = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2_048), hard), hard))
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_024)]
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, token.encode().ljust(FILE_BYTES_MAX))
        assert token_in_file(path) == token
        assert token_in_file(pipe) == token
    finally:
        for each in [writer, *others]:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_folder_in_place_of_the_token_is_told(tmp_path):
    with raises(Reason.TOKEN_INVALID, match="Is a directory"):
        token_in_file(tmp_path)


def test_empty_device_in_place_of_the_token_is_told():
    with raises(Reason.TOKEN_INVALID, match="/dev/null"):
        token_in_file(Path("/dev/null"))
