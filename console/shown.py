"""Writes counts, rates, ages and users' bytes for people. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..protocol.errors import InvalidRequestError
from ..protocol.text import format_time, printable

VALUE_BYTES_SHOWN = 4_096
"""How many bytes of a value are shown."""
PREVIEW_CHARS = 160
Form = Literal["auto", "json", "text", "hex"]


def count(number: int | None) -> str:
    """Return a number with its thousands apart; "?" if it is not known."""
    return "?" if number is None else f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def rate(per_s: float | None) -> str:
    """Return messages per second; "…" if there are not two samples yet."""
    if per_s is None:
        return "…"
    return f"{count(round(per_s))}/s" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}/s"


def age(ms: int | None) -> str:
    """Return how long ago something was, in the largest unit that says enough."""
    if ms is None:
        return "?"
    seconds = max(ms, 0) / 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(time_ms: int) -> str:
    """Return a time to the second, in UTC; "–" for none."""
    return format_time(time_ms)[:19].replace("T", "\N{NO-BREAK SPACE}") if time_ms else "–"


def key_texts(key_hex: str) -> tuple[str, ...]:
    """Return a key as it can be typed, as text if it is one, and then in hexadecimal."""
    try:
        text = bytes.fromhex(key_hex).decode()
    except ValueError:
        return (key_hex,)
    if not text.isprintable() or text != text.strip():
        return (key_hex,)
    return text, f"hex {key_hex}"


def value_text(value: bytes, form: Form = "auto") -> tuple[str, str]:
    """
    Return the first VALUE_BYTES_SHOWN bytes of a value, and the form in which they are shown.

    A form that the value does not have gives way: JSON to text, text to hexadecimal.
    """
    cut = value[:VALUE_BYTES_SHOWN]
    if form in {"auto", "json"} and len(cut) == len(value):
        try:
            msgspec.json.decode(value)
            return _escaped_lines(msgspec.json.format(value, indent=2).decode()), "JSON"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    if form != "hex" and (text := _decoded(cut, is_cut=len(cut) < len(value))) is not None:
        return _escaped_lines(text), "text"
    return hex_lines(cut), "hex"


def preview_text(value: bytes) -> str:
    """Return the beginning of a value on one line."""
    cut = value[: 4 * PREVIEW_CHARS]
    text = _decoded(cut, is_cut=len(cut) < len(value))
    line = cut[:PREVIEW_CHARS].hex(" ") if text is None else printable(" ".join(text.split()))
    more = "…" if len(line) > PREVIEW_CHARS or len(cut) < len(value) else ""
    return f"{line[:PREVIEW_CHARS]}{more}"


def parse_hex(text: str) -> bytes:
    """Return the bytes of a text in hexadecimal. Raises InvalidRequestError."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequestError(f"not hexadecimal: {text!r:.80}") from None


def hex_lines(data: bytes) -> str:
    """Return bytes in hexadecimal, 16 in a line, with their offsets."""
    return "\n".join(
        f"{start:04x}  {data[start : start + 16].hex(' ')}" for start in range(0, len(data), 16)
    )


def _decoded(data: bytes, *, is_cut: bool) -> str | None:
    """Return bytes as text, without a character that was cut at their end; None if they are no
    text.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        is_torn = is_cut and error.reason == "unexpected end of data"
        return data[: error.start].decode() if is_torn else None


def _escaped_lines(text: str) -> str:
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
