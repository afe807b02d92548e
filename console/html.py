"""Draws pages with the templates of `templates/`, which escape everything that they are given."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..protocol.clock import Clock
from ..protocol.text import format_time, printable, sentence
from .assets import Assets
from .page import Page, href


class Html:
    """The templates."""

    def __init__(self, assets: Assets, clock: Clock) -> None:
        self._clock = clock
        self._templates = Environment(
            loader=PackageLoader(__package__ or ""),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"asset": assets.address, "href": href}
        self._templates.filters |= {"shown": printable, "sentence": sentence}

    def render(self, page: Page, **context: object) -> bytes:
        """Return a page as HTML."""
        template = self._templates.get_template(page.template)
        now = format_time(self._clock.wall_ms())
        return template.render(page=page, now=now, **page.extra, **context).encode(
            errors="backslashreplace"
        )
