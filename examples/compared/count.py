"""Counts the lines of code of the four versions, and prints the table that README shows.

Comments, docstrings and blank lines do not count; nor does shop.py, which all versions share.
"""

import ast
import io
import tokenize
from pathlib import Path

HERE = Path(__file__).parent
BY_HAND = "by_hand.py"
NONE = "none: it keeps them all"
ORDER = "order of a key when partitions are added"
VERSIONS = {
    "keylane": ("with_keylane.py", NONE, "they are lost, unless acks wait for copies"),
    "Kafka, aiokafka": ("with_aiokafka.py", ORDER, "replicas have them"),
    "Kafka, FastStream": (
        "with_faststream.py",
        f"{ORDER}; that other keys of the partition continue while an order is retried",
        "replicas have them",
    ),
    "Redis, Celery": (
        "with_celery.py",
        "order: its queue has none, so a task that arrives early is put back and retried",
        "a replica has them, but perhaps not the last ones",
    ),
}
"""File, promises of the service that it cannot keep, what becomes of messages on a dead disk."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_lines(code: str) -> int:
    """Return the number of lines that have code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def table() -> str:
    """Return the table, as Markdown."""
    by_hand = count_lines((HERE / BY_HAND).read_text())
    rows = [
        (
            "| the same service with | lines of code | which of these promises it cannot keep | "
            "messages of a dead disk |"
        ),
        "| --- | --- | --- | --- |",
    ]
    for name, (file, lacking, disk) in VERSIONS.items():
        code = (HERE / file).read_text()
        shared = by_hand if "import by_hand" in code else 0
        rows.append(f"| {name} | {count_lines(code) + shared} | {lacking} | {disk} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
