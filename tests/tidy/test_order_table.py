"""docs/ORDER.md names every way in which order breaks, and tests that exist."""

import ast
import re

from tidy.tree import ROOT

WAY = re.compile(r"^### (\d+)\. (.+)\n\n((?:.+\n)+)\nShown by:\n\n((?:\* .+\n)+)", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
WAYS = 37


def ways() -> list[tuple[int, str, str, str]]:
    text = (ROOT / "docs" / "ORDER.md").read_text()
    return [(int(number), *rest) for number, *rest in WAY.findall(text)]


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


def test_every_way_has_a_number_and_a_test():
    """The ways are numbered without a gap, and each has a test."""
    assert [number for number, *_ in ways()] == list(range(1, WAYS + 1))
    for number, _, _, shown in ways():
        assert TEST.search(shown), f"way {number}"


def test_every_test_of_the_page_exists():
    """A test that was renamed or removed fails here."""
    named = [pair for _, _, _, shown in ways() for pair in TEST.findall(shown)]
    assert len(named) > WAYS
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in names_in(path)
    ]
    assert missing == []
