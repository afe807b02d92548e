"""Pages in Chinese have the commands, programs and outputs of the English ones."""

import re

import pytest

from tidy.tree import ROOT

CODE = re.compile(r"^```[^\n]*\n.*?^```$|(?:^ {4}[^\n]*\n)+", re.DOTALL | re.MULTILINE)
TRANSLATED = sorted([*ROOT.glob("*.zh.md"), *(ROOT / "docs").rglob("*.zh.md")])


def test_translations_are_found():
    assert {page.name for page in TRANSLATED} == {"README.zh.md", "tutorial.zh.md"}


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_translation_has_the_code_of_the_original(page):
    """Whoever changes a command or a program changes it on both pages."""
    original = page.with_name(page.name.replace(".zh.md", ".md"))
    theirs, ours = (CODE.findall(each.read_text()) for each in (original, page))
    assert len(theirs) > 5
    assert ours == theirs
