"""Elements and text of an SVG document, with everything escaped that comes from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ...protocol.text import printable

CHARACTER_WIDTH = 0.58
"""The mean width of a character, in heights of the font."""
_ESCAPED = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\ufffe": "\ufffd", "\uffff": "\ufffd"}
)
"""Markup, and the characters that XML does not allow."""


def text_of(words: str) -> str:
    """Return words as the content of an element. Control characters and bidirectional marks are
    shown as escapes, so that they change nothing around them.
    """
    return printable(words).translate(_ESCAPED)


def number_of(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, inside: str = "", /, **attributes: object) -> str:
    """Return an element. `inside` is markup, attributes are text; `text_anchor="end"` becomes
    `text-anchor="end"`, and `class_` becomes `class`.
    """
    parts = _attributes(attributes)
    return f"<{name}{parts}>{inside}</{name}>" if inside else f"<{name}{parts}/>"


def rectangle(
    x: float, y: float, width: float, height: float, inside: str = "", /, **attributes: object
) -> str:
    """Return a rectangle as an element, with more attributes than its place."""
    x_text, y_text, across, down = map(number_of, (x, y, width, height))
    return (
        f'<rect x="{x_text}" y="{y_text}" width="{across}" height="{down}"'
        f"{_attributes(attributes)}>{inside}</rect>"
    )


def label(x: float, y: float, words: str, class_: str = "", *, title: str = "") -> str:
    """Return words that begin at a place, or end or are centred there if the class says so."""
    attributes = {"class_": class_} if class_ else {}
    return element("text", title + text_of(words), x=x, y=y, **attributes)


def path_data(*parts: str | float) -> str:
    """Return commands and coordinates as the data of a path."""
    return " ".join(part if isinstance(part, str) else number_of(part) for part in parts)


def title_of(words: str) -> str:
    """Return words as the title of the element that contains it."""
    return f"<title>{text_of(words)}</title>"


def _attributes(attributes: Mapping[str, object]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
    )


def _attribute(value: object) -> str:
    return number_of(value) if isinstance(value, float | int) else text_of(str(value))


def width_of(words: str, size: float) -> float:
    """Return about how wide words are at a size of the font."""
    return len(words) * size * CHARACTER_WIDTH


def shorten(words: str, width: float, size: float) -> str:
    """Cut words so that they fit into a width; "" if not even a few letters do."""
    room = int(width / (size * CHARACTER_WIDTH))
    if len(words) <= room:
        return words
    return f"{words[: room - 1]}…" if room >= 4 else ""
