"""Turns links between files of the repository into links between pages of the site. A page may link
to any file: those outside docs/ are on the site too, below `source/`. Nothing here needs MkDocs.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"README.md": "index.md", "README.zh.md": "index.zh.md"}
"""The files that are home pages."""
OUTSIDE = "source/"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?=#[^)\s]*\)|\))")
"""Matches the path of a link to a file."""


def site_name(file: str) -> str:
    """Return the place on the site of a file of the repository."""
    if file in HOMES:
        return HOMES[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else f"{OUTSIDE}{file}"


def repository_name(page: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    for file, home in HOMES.items():
        if page == home:
            return file
    return page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"


def linked_file(file: str, link: str) -> str | None:
    """Return the file that a link in `file` leads to: that of a folder is its README.md. None if
    there is none.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link))
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def site_text(page: str, text: str) -> str:
    """Return the text of a page with links to other files replaced by links within the site."""
    file = repository_name(page)

    def replaced(link: re.Match[str]) -> str:
        target = linked_file(file, link[1])
        if target is None:
            return link[0]
        return posixpath.relpath(site_name(target), posixpath.dirname(page) or ".")

    return LINK.sub(replaced, text)


def outside_files() -> list[str]:
    """Return the files outside docs/ that pages of the site link to, directly or by each other."""
    pages = [*HOMES, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
    found: dict[str, None] = {}
    while pages:
        file = pages.pop()
        for link in LINK.findall((ROOT / file).read_text(encoding="utf-8")):
            target = linked_file(file, link)
            if target is None or target.startswith("docs/") or target in {*HOMES, *found}:
                continue
            found[target] = None
            if target.endswith(".md"):
                pages.append(target)
    return sorted(found)
