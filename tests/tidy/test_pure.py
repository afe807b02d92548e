"""A module that says it is pure imports only pure modules: values go in, decisions come out."""

import ast

from tidy.test_arrows import PROTOCOL_MAY_IMPORT, top
from tidy.test_layers import file_of
from tidy.tree import FILES, Source, imports_of

VALUES_OF = {
    *("contextlib", "weakref", "urllib.parse"),
    *("numpy", "pyarrow", "pyspark.sql.types"),  # columns and schemas, no session
}
"""What pure modules may import besides what the contract may: it computes, too."""

VALUES_FROM: dict[str, set[str]] = {
    "broker/storage/index/file_queue.py": {"broker/storage/index/file_blocks.py"},
    "broker/storage/index/rocksdb_waiting.py": {"broker/storage/index/rocksdb_tables.py"},
    "broker/store/dispatch.py": {
        "broker/storage/log/batch_reader.py",
        "broker/storage/log/recovery.py",
    },
    "broker/store/replay.py": {"broker/storage/log/recovery.py"},
    "broker/store/tail_cache.py": {"broker/storage/append_file.py"},
}
"""Pure modules → modules with I/O of which they use a value or a function of values only.  No new ones."""


def says_it_is_pure(source: Source) -> bool:
    """The first line of its docstring ends in "Pure."."""
    first, _, _ = (ast.get_docstring(source.tree) or "").partition("\n")
    return first.endswith("Pure.")


PURE = {source.name: source for source in FILES if says_it_is_pure(source)}


def only_for_types(source: Source) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, whose imports are not made when the module is loaded."""
    return {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def test_pure_modules_are_found():
    assert len(PURE) > 60


def test_pure_modules_import_only_pure_modules():
    broken = []
    for source in PURE.values():
        types = only_for_types(source)
        for found in imports_of(source):
            if found.line in types:
                continue
            if not found.relative:
                if not {found.target, top(found.target)} & {*PROTOCOL_MAY_IMPORT, *VALUES_OF}:
                    broken.append(f"{source.name}:{found.line} imports {found.target}")
                continue
            target = file_of(found.target)
            if target is None or target.endswith("__init__.py"):
                continue
            if target not in PURE and target not in VALUES_FROM.get(source.name, ()):
                broken.append(f"{source.name}:{found.line} imports {target}, which is not pure")
    assert not broken, "\n" + "\n".join(broken)


def test_exceptions_are_still_needed():
    used = {
        (source.name, target)
        for source in PURE.values()
        for found in imports_of(source)
        if (target := file_of(found.target) or "") and target not in PURE
    }
    idle = {(name, target) for name, targets in VALUES_FROM.items() for target in targets} - used
    assert not idle
