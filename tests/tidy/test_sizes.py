"""One idea a file, one thought a function."""

import ast

from tidy.tree import FILES

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80


def test_files_are_short():
    long = {
        source.name: lines
        for source in FILES
        if (lines := source.text.count("\n")) > FILE_LINES_MAX
    }
    assert not long, f"over {FILE_LINES_MAX} lines, find the second idea in: {long}"


def test_functions_are_short():
    long = [
        f"{source.name}:{node.lineno} {node.name} has {lines} lines"
        for source in FILES
        if source.room != "migrations"  # a schema is one list, however long
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, f"over {FUNCTION_LINES_MAX} lines:\n" + "\n".join(long)
