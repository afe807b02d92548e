"""Formats values for logs and messages: counts, lists, times, digests of keys, and URLs without
passwords. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, get_args, get_type_hints

_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, line breaks, bidirectional marks and lone surrogates."""
_PASSWORD = re.compile(r"(://[^:/@]*):.*@", re.DOTALL)
"""Matches a URL up to its last @, so that all of a password is hidden even if it contains an
unescaped @.
"""
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:passw|pwd|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)
_NOT_A_VALUE = re.compile(r"^Invalid enum value .* - at `\$\.(\w+)`$", re.DOTALL)
MAYBE_OLDER_COPY = "may stand on an older copy of its data folder"
"""The text about a broker that lacks messages it had stored, although retention has not removed
them and no metaserver reports them as lost.
"""
ESCAPED_RULE = (
    "in a user or password of a URL, @ is written %40, : is %3A, / is %2F, ? is %3F and % is %25"
)
UNREADABLE_URL = f"its port is not a number; {ESCAPED_RULE}"
PORT_MAX = 65_535
HALF_DAY_MS = 43_200_000
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:/?@\[\]]*)(:\d*)?(,[^/?@]*)?")
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
LISTED_MAX = 10
_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def parse_number(text: str) -> int | None:
    """
    Parse a number below 2**63 that consists of ASCII digits. Return None for any other text.

    Python's `int` accepts more: `1_000`, `+1`, non-ASCII digits, white space and line breaks.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        return None
    number = int(text)
    return number if number < 1 << 63 else None


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: "1 message", "2 messages". `plural` is needed only for
    irregular nouns.
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def listed(items: Iterable[object], total: int | None = None) -> str:
    """
    Join the first LISTED_MAX items, and state the number of the others: "1, 2, 3", "1, 2, …, 10, …
    and 90 more", or "none".

    `total` is the total number of items, if `items` contains only the first ones.
    """
    texts = list(map(str, items))
    other_count = (len(texts) if total is None else total) - LISTED_MAX
    if other_count > 0:
        texts[LISTED_MAX:] = [f"… and {other_count} more"]
    return ", ".join(texts) or "none"


def format_seconds(ms: int) -> str:
    """Format milliseconds as seconds, with one decimal below ten seconds."""
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms // 1000} s"


def format_age(ms: int) -> str:
    """Format milliseconds as seconds, minutes, hours or days, whichever reads best."""
    if ms < 120_000:
        return format_seconds(ms)
    for unit_ms, unit, limit in ((60_000, "min", 120), (3_600_000, "h", 48)):
        if ms < limit * unit_ms:
            return f"{ms // unit_ms} {unit}"
    return f"{ms // 86_400_000} days"


def format_size(size_bytes: float | None) -> str:
    """Format a number of bytes, or of bytes a second, in the unit that reads best; "-" for None."""
    if size_bytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            digits = 0 if size_bytes >= 10 or unit == "B" else 1
            return f"{size_bytes:.{digits}f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def format_rate(per_s: float | None, *, sign: str = "") -> str:
    """Format a number of events a second, with one decimal below 10; "-" for None."""
    if per_s is None:
        return "-"
    digits = 1 if 0 < abs(per_s) < 10 else 0
    return "0" if round(per_s, digits) == 0 else f"{per_s:{sign},.{digits}f}"


def sum_text(number: str, *, is_partial: bool) -> str:
    """Return a sum as text; if parts of it are not known, "7 or more", or "?" instead of 0."""
    if not is_partial:
        return number
    return "?" if number == "0" else f"{number} or more"


def format_time(time_ms: int) -> str:
    """Format a time as ISO 8601 in UTC; as a number if it is outside the range of datetime."""
    try:
        return (_BEGIN + time_ms * _MS).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms:.3g} ms" if abs(time_ms) < 10**300 else "a meaningless number"


def format_moment(time_ms: int, now_ms: int) -> str:
    """Format a time in UTC for a sentence: to the second, with the date if it is half a day or more
    from `now_ms`.
    """
    try:
        moment = _BEGIN + time_ms * _MS
    except OverflowError:
        return format_time(time_ms)
    date = "" if abs(time_ms - now_ms) < HALF_DAY_MS else f"{moment.date().isoformat()} "
    return f"{date}{moment:%H:%M:%S} UTC"


def key_digest(order_key: bytes) -> str:
    """Return the digest that stands for an order key in logs and errors. The command `printf %s KEY
    | b2sum -l 64` prints the same digest.
    """
    if not order_key:
        return "no key"
    return f"key digest {blake2b(order_key, digest_size=8).hexdigest()}"


def key_text(order_key: bytes) -> str:
    r"""Format an order key for people, with bytes that are not UTF-8 as `\xff`; "(no key)" if it
    is empty.
    """
    return printable(order_key.decode(errors="backslashreplace")) or "(no key)"


def printable(text: str) -> str:
    r"""Escape the control characters in `text`, as `\t`, `\x1b` or `\u202e`, to make it safe for a
    terminal.
    """
    return _CONTROL.sub(_escaped, text)


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter, unless it begins with a name that has other
    characters than letters.
    """
    first, _, _ = text.partition(" ")
    return text[0].upper() + text[1:] if first.isalpha() and first.islower() else text


def mask_password(url: str) -> str:
    """Replace the password in a database URL, or in its query parameters, with `***`."""
    return _SECRET_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def url_problem(url: str, *, new: bool = False) -> str:
    """
    Return the reason why unescaped characters make a database URL ambiguous, or "" if they do not.

    Args:
        new: True if the URL is not in use yet. A bare %, which programs parse in different ways, is
            then refused, too.
    """
    _scheme, _, remainder = url.partition("://")
    user, position, location = remainder.partition("@")
    if not position or remainder.startswith("/"):
        user, location = "", remainder
    before_query = location.partition("?")[0]
    authority = before_query.partition("/")[0]
    if "@" in before_query and user:
        return f"a part of its password is read as a host: {ESCAPED_RULE}"
    if not (problem := _AUTHORITY.fullmatch(authority)):
        return UNREADABLE_URL
    port = (problem[2] or "")[1:]
    if port and not 0 < (parse_number(port) or 0) <= PORT_MAX:
        return f"its port is not a number from 1 to {PORT_MAX}"
    if _CONTROL.search(url) or " " in authority:
        return "it has a line break or another control character, or a space in its host"
    if new and _BARE_PERCENT.search(user):
        return f"it has a % that begins no escape: {ESCAPED_RULE}"
    return ""


def json_printable(text: str) -> str:
    """Escape the control characters in the strings of `text`, which is JSON on one line, in the way
    that JSON does.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def describe_invalid_value(error: Exception, kind: object) -> str:
    """Return the text of msgspec's `error` about an object of type `kind`. If a value of an
    enumeration is invalid, the valid ones are added.
    """
    text = f"{error!s:.300}"
    field = _NOT_A_VALUE.search(text)
    hint = get_type_hints(kind).get(field[1]) if field else None
    for option in get_args(hint) or (hint,):
        if isinstance(option, type) and issubclass(option, enum.Enum):
            return f"{text}: one of {', '.join(str(member.value) for member in option)}"
    return text


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    number = ord(character)
    return _ESCAPES.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def invalid_unicode_text(error: UnicodeEncodeError) -> str:
    """Return an error text for a string with a lone surrogate, which Python uses in file names that
    are not valid UTF-8.
    """
    return f"{error.object!r:.80} is not valid text: {error.reason}"


def collect_items(given: object) -> list[Any]:
    """Return the items of an iterable, or an empty list for text and for values that cannot be
    iterated, such as a zero-dimensional numpy array.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return []
    try:
        items = iter(given)
    except TypeError:
        return []
    return list(items)


def is_not_a_time(given: object) -> bool:
    """Return True for pandas.NaT. It is recognised without importing pandas, as a datetime that is
    not equal to itself.
    """
    return given != given  # noqa: PLR0124
