"""One idea a file, one thought a function, few files a folder."""

import ast
from collections import Counter

from tidy.tree import FILES, ROOT, TEST_FILES, tracked_files

FILES_MAX = 20
"""Directly in one folder."""
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
LONGER: dict[str, int] = {
    "producer/sending.py:send": 94,
}
"""Functions that were longer before there was this limit: what each may have.  No new ones; each comes down."""


def test_folders_are_small():
    files = Counter(name.rpartition("/")[0] for name in tracked_files())
    large = {folder: count for folder, count in files.items() if count > FILES_MAX}
    assert not large, f"over {FILES_MAX} files, find the second feature in: {large}"


def test_files_are_short():
    long = {
        name: lines
        for name in tracked_files()
        if name.endswith(".py")
        and (lines := (ROOT / name).read_text().count("\n")) > FILE_LINES_MAX
    }
    assert not long, f"over {FILE_LINES_MAX} lines, find the second idea in: {long}"


def function_lines() -> dict[str, int]:
    """Lines of every function of the package and of its tests, by file and name."""
    return {
        f"{source.name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for source in [*FILES, *TEST_FILES]
        if source.room != "migrations"  # a schema is one list, however long
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_functions_are_short():
    long = {
        name: lines
        for name, lines in function_lines().items()
        if lines > LONGER.get(name, FUNCTION_LINES_MAX)
    }
    assert not long, f"over {FUNCTION_LINES_MAX} lines: {long}"


def test_exceptions_are_still_needed():
    lines = function_lines()
    short = {name for name in LONGER if lines.get(name, 0) <= FUNCTION_LINES_MAX}
    assert not short, f"take these out of LONGER: {short}"
