"""What the reader of a page types, in its order: blocks of Python, and commands of a shell. Pure.

A page's code is run, unless the page or one of the rules below says why not:

* A block is left out if the line above it ends in `<!-- run: no, REASON -->`, for one of `REASONS`.
* `INSTALLS` and `SERVES` match commands that a test machine has behind it: keylane is installed,
  and the cluster of `keylane dev` runs. tests/acceptance/test_examples.py runs those of `EXAMPLE`.
* A block with `def test_` is a test of the reader; tests/unit/testing/test_guide.py runs it.

A block of Python is fenced; one with `title="jobs.py"` is a file that a later block uses. A block
of SQL is for the page's session of Spark. A block of commands is fenced or indented. If it has a
line with `$`, lines without are the output of the command above; otherwise each line is a command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support.pages import Block, Command, blocks_of, commands_of

MARK = re.compile(r"<!-- run: no, (.+?) -->$")
REASONS = (
    "a package of others",
    "a cluster with access control",
    "names of other hosts",
    "servers have to be stopped",
    "a disk has to be lost",
    "a server of Spark Connect",
)
"""Why a page may say that a block is not run. docs/ACCESS.md has a cluster with access control."""
INSTALLS = re.compile(r"^(?:python3 -m venv|pip install|make|venv-pack) ")
SERVES = re.compile(r"^keylane (?:dev|metaserver run|broker run)\b")
EXAMPLE = re.compile(r"^python examples/")
TYPED = re.compile(r"^(?:\$ |keylane |curl |python3? |export |cat )", re.MULTILINE)
"""The first words of a command; a block with a line of them is a block of commands."""

Kind = Literal["python", "sql", "commands"]


@dataclass(frozen=True)
class Step:
    """A block of a page; `mark` is the page's reason for not running it, "" if there is none."""

    kind: Kind
    block: Block
    mark: str

    @property
    def runs(self) -> bool:
        """True if anything of the block is run."""
        if self.mark:
            return False
        if self.kind == "commands":
            return bool(self.commands)
        return "def test_" not in self.block.text

    @property
    def commands(self) -> list[Command]:
        """The commands of the block, without those that a test machine has behind it."""
        if self.kind != "commands":
            return []
        return [each for each in all_commands(self.block) if not behind_us(each.command)]


def behind_us(command: str) -> str:
    """Return why a command is not run on a machine with keylane and a cluster, "" if it is."""
    if INSTALLS.match(command):
        return "installs"
    if SERVES.match(command):
        return "serves"
    return "an example" if EXAMPLE.match(command) else ""


def all_commands(block: Block) -> list[Command]:
    """Return the commands of a block, each on one line; a line that ends in `\\` goes on."""
    joined = re.sub(r" *\\\n *", " ", block.text)
    if re.search(r"^\$ ", joined, re.MULTILINE):
        return list(commands_of(Block(block.language, block.title, joined, block.line)))
    return [Command(line, []) for line in joined.splitlines() if line.strip()]


def steps_of(page: Path) -> list[Step]:
    """Return the steps of a page, in their order."""
    lines = page.read_text().splitlines()
    steps = []
    for block in sorted([*blocks_of(page), *indented_blocks(page)], key=lambda block: block.line):
        kind = kind_of(block)
        if kind is not None:
            steps.append(Step(kind, block, mark_of(block, lines)))
    return steps


def kind_of(block: Block) -> Kind | None:
    """Return what a block is, None if nobody runs it."""
    if block.language == "python":
        return "python"
    if block.language == "sql":
        return "sql"
    if block.language in {"", "console", "sh"} and TYPED.search(block.text):
        return "commands"
    return None


def mark_of(block: Block, lines: list[str]) -> str:
    """Return the reason in the line above a block, "" if there is none; `lines` are those of its
    page.
    """
    above = [line for line in lines[: block.line - 1] if line.strip()]
    marked = MARK.search(above[-1]) if above else None
    return marked[1] if marked else ""


def indented_blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that are indented by four columns or more, after an empty line."""
    text = page.read_text()
    for fenced in blocks_of(page):
        count = fenced.text.count("\n") + 2
        lines = text.split("\n")
        lines[fenced.line - 1 : fenced.line - 1 + count] = ["."] * count
        text = "\n".join(lines)
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        found = re.match(r" {4,}(?=\S)", lines[at])
        if not found or (at and lines[at - 1].strip()):
            at += 1
            continue
        end = at
        while end < len(lines) and (lines[end].startswith(found[0]) or not lines[end].strip()):
            end += 1
        taken = [line.removeprefix(found[0]) for line in lines[at:end]]
        yield Block("", "", "\n".join(taken).strip("\n") + "\n", at + 1)
        at = end
