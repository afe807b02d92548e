"""The index of the decisions has each of them once, and documents name no other."""

import re

from tidy.tree import ROOT

DECISIONS = ROOT / "docs" / "decisions"
INDEX = (DECISIONS / "README.md").read_text()
ROW = re.compile(r"^\| (\d+) \| \[(.+?)\]\(([^)#]+)#?([^)]*)\)[^|]* \| (.+) \|$", re.MULTILINE)
TITLE = re.compile(r"^##? (\d+)\. (.+)$", re.MULTILINE)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])
NAMED = re.compile(r"\b[Dd]ecisions? \[?(\d+)\b")


def decisions() -> dict[int, tuple[str, str]]:
    """Number → title and file; a page about speed has several."""
    return {
        int(number): (title, page.name)
        for page in sorted(DECISIONS.glob("*.md"))
        for number, title in TITLE.findall(page.read_text())
    }


def test_index_lists_each_decision_once_under_its_title() -> None:
    rows = [(int(number), (title, file)) for number, title, file, _, _ in ROW.findall(INDEX)]
    assert len(rows) == len(dict(rows))
    assert dict(rows) == decisions()


def test_index_names_each_page() -> None:
    pages = {page.name for page in DECISIONS.rglob("*.md")} - {"README.md"}
    assert pages == {file for _, _, file, _, _ in ROW.findall(INDEX)}


def test_page_says_its_status_and_has_the_number_of_its_name() -> None:
    for page in DECISIONS.glob("[0-9]*.md"):
        text = page.read_text()
        (number, _), *others = TITLE.findall(text)
        assert (f"{int(number):04d}", others) == (page.name[:4], []), page.name
        assert "Status: " in text, page.name


def test_decision_that_a_document_names_is_there() -> None:
    known = decisions()
    for page in PAGES:
        for number in NAMED.findall(page.read_text()):
            assert int(number) in known, f"{page.name}: decision {number}"
