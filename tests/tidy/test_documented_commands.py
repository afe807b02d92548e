"""Commands in the documents exist, with the options they are given there, and so do the pages that
they link to.
"""

import re
import shlex

import pytest

from keylane.cli.main import app
from tidy.tree import ROOT

PAGES = sorted(
    page
    for page in [
        *ROOT.glob("README*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "deploy/README.md",
        *ROOT.glob("examples/*/README.md"),
    ]
    if "decisions" not in page.parts
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(
    r"^(?: {4,}|\$ | {4,}\$ )(?:\.venv/bin/)?keylane (.+?)(?: +[#<|].*)?$", re.MULTILINE
)
COMPARED = re.compile(r"^\| .+ \| `keylane ([^`…]+)`", re.MULTILINE)
"""A command of a table that compares ours with those of another system."""


def commands() -> list[tuple[str, str]]:
    """(page, words after `keylane`) of every line of code that calls it."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = COMMAND.findall(text)
        if page.name.startswith("from-"):
            lines += COMPARED.findall(text)
        found += [(page.relative_to(ROOT).as_posix(), line) for line in lines]
    return found


def test_documented_commands_are_found():
    """The search finds commands on every page; a page that writes them in another way fails
    here.
    """
    assert len(commands()) > 150


@pytest.mark.parametrize(("page", "line"), commands())
def test_documented_command_is_accepted(page, line):
    """The command line accepts the name, the options and the number of arguments."""
    words = shlex.split(line)
    if words[0] == "-p":
        words = words[2:]
    command = app
    context = command.make_context("keylane", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        subcommand = command.get_command(context, words[0])
        assert subcommand is not None, f"{page}: no command {words[0]!r} in {line!r}"
        command, words = subcommand, words[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    command.make_context(command.name, words, parent=context.parent)


def test_quick_start_is_what_a_newcomer_was_recorded_with():
    """docs/FIRST_MESSAGE.md shows a run of README's commands: with the clone, at most five."""
    section = (ROOT / "README.md").read_text().split("\n## Quick start\n")[1].split("```python")[0]
    typed = re.findall(r"^\$ (.+)$", section, re.MULTILINE)
    record = (ROOT / "docs" / "FIRST_MESSAGE.md").read_text()
    clone, *recorded = re.findall(r"^ +[0-9.]+ s {2}\$ (.+)$", record, re.MULTILINE)
    assert clone.startswith("git clone ")
    assert recorded == typed
    assert len(recorded) < 5


def anchors(text: str) -> set[str]:
    """The names under which a page's headings are linked to."""
    plain = (re.sub(r"[^\w\- ]", "", heading).lower() for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_links_lead_to_pages_and_headings():
    """A page or a heading that was renamed fails here."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    pages += ROOT.glob("examples/*/README.md")
    links = [(page, *link) for page in pages for link in LINK.findall(page.read_text())]
    assert len(links) > 50
    broken = [
        f"{page.relative_to(ROOT)}: {path}#{anchor}"
        for page, path, anchor in links
        if not (target := page.parent / path if path else page).exists()
        or (anchor and anchor not in anchors(target.read_text()))
    ]
    assert broken == []
