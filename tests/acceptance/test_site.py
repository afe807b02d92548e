"""The site of the documents is built strictly: a link that leads nowhere fails.

mkdocstrings is left out, because it takes a minute for the API, to which no other page links;
`make docs` has it, and tests/tidy/test_api_pages.py looks at the names that it is given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tidy.tree import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]


class Links(HTMLParser):
    """The links and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets |= {value or "" for name, value in attrs if name in {"href", "src"}}


def targets_of(page: Path) -> set[str]:
    links = Links()
    links.feed(page.read_text())
    return links.targets


def test_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\n"
        f"docs_dir: {ROOT}/docs\n"
        f"hooks: [{ROOT}/docs/site/pages.py]\n"
        "site_dir: site\n"
        "plugins: []\n"
    )
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    site = tmp_path / "site"
    home = targets_of(site / "index.html")
    assert {"index.zh/", "pictures/fence.svg", "source/examples/", "source/CONTRIBUTING/"} <= home
    assert "../source/examples/" in targets_of(site / "index.zh" / "index.html")
    for page in site.rglob("*.html"):
        loaded = [each for each in targets_of(page) if each.endswith((".js", ".css", ".woff2"))]
        assert loaded
        assert not [each for each in loaded if "://" in each], page
