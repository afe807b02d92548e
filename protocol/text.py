"""Texts for people: counts, lists, times, digests of keys, URLs without passwords, no control
characters. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, get_args, get_type_hints

_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, line ends, marks that change the direction of writing, and lone
surrogates.
"""
_PASSWORD = re.compile(r"(://[^:/@]*):.*@", re.DOTALL)
"""Matches a URL up to its last @, so that no part of a password with an unescaped @ is shown."""
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:passw|pwd|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)
_NOT_A_VALUE = re.compile(r"^Invalid enum value .* - at `\$\.(\w+)`$", re.DOTALL)
MAYBE_OLDER_COPY = "may stand on an older copy of its data folder"
"""Text about a broker that lacks messages which were stored there, though retention has not removed
them and no metaserver reports them as lost.
"""
ESCAPED_RULE = (
    "in a user or password of a URL, @ is written %40, : is %3A, / is %2F, ? is %3F and % is %25"
)
UNREADABLE_URL = f"its port is not a number; {ESCAPED_RULE}"
PORT_MAX = 65_535
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:/?@\[\]]*)(:\d*)?(,[^/?@]*)?")
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
LISTED_MAX = 10
_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def plain_number(text: str) -> int | None:
    """
    Return the number below 2**63 that consists of ASCII digits; None for other text.

    Python's `int` accepts more: `1_000`, `+1`, digits of other scripts, white space and line ends.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        return None
    number = int(text)
    return number if number < 1 << 63 else None


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return the count with its noun: "1 message", "2 messages". `plural` is given for nouns that
    do not just take an s.
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def listed(items: Iterable[object], total: int | None = None) -> str:
    """
    Return the first LISTED_MAX items and the number of further ones: "1, 2, 3", or "1, 2, …, 10, …
    and 90 more", or "none".

    `total` is the number of all items, for a caller whose `items` are only the first ones.
    """
    texts = list(map(str, items))
    more = (len(texts) if total is None else total) - LISTED_MAX
    if more > 0:
        texts[LISTED_MAX:] = [f"… and {more} more"]
    return ", ".join(texts) or "none"


def seconds(ms: int) -> str:
    """Return milliseconds as seconds, with one decimal below ten seconds."""
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms // 1000} s"


def key_digest(order_key: bytes) -> str:
    """Return the name of an order key in logs and errors: `printf %s KEY | b2sum -l 64` prints the
    same digest.
    """
    if not order_key:
        return "no key"
    return f"key digest {blake2b(order_key, digest_size=8).hexdigest()}"


def printable(text: str) -> str:
    r"""Return `text` with every control character escaped, like `\t`, `\x1b` or `\u202e`, so that a
    terminal only shows it.
    """
    return _CONTROL.sub(_escaped, text)


def without_password(url: str) -> str:
    """Return the URL of a database with `***` in place of its password, even if that is a
    parameter.
    """
    return _SECRET_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def url_problem(url: str, *, new: bool = False) -> str:
    """
    Return why a URL of a database would be read in another way than intended, because of unescaped
    characters; "" if it would not.

    Args:
        new: nobody uses the URL yet, so a bare % is refused too, which programs read in different
            ways.
    """
    _scheme, _, rest = url.partition("://")
    user, at, place = rest.partition("@")
    if not at or rest.startswith("/"):
        user, place = "", rest
    before_query = place.partition("?")[0]
    authority = before_query.partition("/")[0]
    if "@" in before_query and user:
        return f"a part of its password is read as a host: {ESCAPED_RULE}"
    if not (found := _AUTHORITY.fullmatch(authority)):
        return UNREADABLE_URL
    port = (found[2] or "")[1:]
    if port and not 0 < (plain_number(port) or 0) <= PORT_MAX:
        return f"its port is none of 1 to {PORT_MAX}"
    if _CONTROL.search(url) or " " in authority:
        return "it has a line end or another control character, or a space in its host"
    if new and _BARE_PERCENT.search(user):
        return f"it has a % that begins no escape: {ESCAPED_RULE}"
    return ""


def json_printable(text: str) -> str:
    """Return `text`, which is JSON on one line, with every control character in its strings escaped
    in the way of JSON.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def refused_value(error: Exception, kind: object) -> str:
    """Return the text of msgspec's `error` about an object of type `kind`; for an enumeration, with
    its values.
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


def bad_text(error: UnicodeEncodeError) -> str:
    """Return what is wrong with a text that has half of a surrogate pair, which Python puts into
    file names that are not UTF-8.
    """
    return f"{error.object!r:.80} is not valid text: {error.reason}"


def items_of(given: object) -> list[Any]:
    """Return the items of an iterable; none for text, or for what cannot be iterated, such as an
    array of numpy without a dimension.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return []
    try:
        items = iter(given)
    except TypeError:
        return []
    return list(items)


def is_not_a_time(given: object) -> bool:
    """Return True for pandas.NaT, a datetime that differs from itself; nothing else identifies it
    without pandas.
    """
    return given != given  # noqa: PLR0124
