"""The pages of the documents are readable in a plain editor, and one finds the way to each of them."""

import re
import tomllib

import pytest

from tidy.tree import ROOT

LINE_MAX = 300
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    if page.name != "CHANGELOG.md"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_has_no_long_line(page):
    """A paragraph goes on in the next line; a cell of a table says less, and the rest is below."""
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > LINE_MAX] == []


def test_package_is_described_by_the_first_sentence_of_readme():
    """The site of packages and the page of the repository say the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / "README.md").read_text().splitlines()[2] == project["description"]


def test_every_page_is_in_the_navigation():
    """Decisions have a list of their own; pages that are made from the code are not in the tree."""
    settings = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([\w./-]+\.md)$", settings, re.MULTILINE))
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in there if not page.startswith("decisions/")} <= named
    made = {page for page in named - there if page.startswith(("index.", "reference/"))}
    assert named - there == made
