"""The standard streams of a command print every text, whatever their encoding is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from keylane.cli.streams import ESCAPED, escape_unencodable

TEXT = "wért 😀 \udcff"


def printed(monkeypatch: pytest.MonkeyPatch, text: str, encoding: str, errors: str) -> bytes:
    """What standard output and errors get of `text`, which is the same."""
    buffers = []
    for name in ("stdout", "stderr"):
        buffers.append(io.BytesIO())
        monkeypatch.setattr(sys, name, io.TextIOWrapper(buffers[-1], encoding, errors))
    escape_unencodable()
    for stream in (sys.stdout, sys.stderr):
        print(text, end="", file=stream, flush=True)
    out, err = (buffer.getvalue() for buffer in buffers)
    assert out == err
    return out


@pytest.mark.parametrize(
    ("encoding", "errors", "bytes_"),
    [
        ("ascii", "strict", rb"w\u00e9rt \ud83d\ude00 \udcff"),
        ("ascii", "surrogateescape", rb"w\u00e9rt \ud83d\ude00 \udcff"),
        ("latin-1", "backslashreplace", b"w\xe9rt " + rb"\ud83d\ude00 \udcff"),
        ("utf-8", "strict", "wért 😀 ".encode() + rb"\udcff"),
        ("utf-8", "surrogateescape", "wért 😀 ".encode() + b"\xff"),
    ],
)
def test_stream_escapes_what_its_encoding_lacks(monkeypatch, encoding, errors, bytes_):
    """Bytes of arguments stay bytes in UTF-8 where Python lets them pass."""
    assert printed(monkeypatch, TEXT, encoding, errors) == bytes_


def test_json_stays_json_when_it_is_escaped(monkeypatch):
    r"""Python's own escapes, `\xe9` and `\U0001f600`, are none of JSON."""
    line = json.dumps({"é": "😀"}, ensure_ascii=False)
    assert json.loads(printed(monkeypatch, line, "ascii", "strict")) == {"é": "😀"}


def test_stream_that_is_decoded_is_refused_as_before():
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("utf-8", ESCAPED)


def test_help_is_printed_when_the_output_is_ascii():
    """Its frame has lines that ASCII lacks."""
    ran = subprocess.run(
        [sys.executable, "-m", "keylane.cli", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "--version" in ran.stdout
