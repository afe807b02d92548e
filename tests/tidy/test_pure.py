"""A module whose first docstring paragraph ends in "Pure." imports nothing that could do I/O: values,
and pure modules.
"""

import ast
from collections.abc import Iterator

import pytest

from tidy.tree import FILES, ROOT, Source

VALUES = {
    "__future__",
    "abc",
    "array",
    "ast",
    "base64",
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "graphlib",
    "hashlib",
    "hmac",
    "heapq",
    "ipaddress",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "statistics",
    "string",
    "struct",
    "types",
    "typing",
    "unicodedata",
    "urllib.parse",
    "weakref",
    "zlib",
    "crc32c",
    "lz4.block",
    "msgspec",
    "numpy",
    "pyarrow",
    "xxhash",
    "backports",
    "compression",
    # a type, and generators with a seed: TAKEN below keeps the module's own generator out
    "random",
    "prometheus_client.parser",  # reads a text
    "rich.cells",  # how wide a text is on a terminal
    "textwrap",
    "sys",  # the version of Python: TAKEN keeps everything else out
    "pyspark.sql.types",  # classes of values; nothing of Spark starts
}
"""Modules that only make values; of a package its submodules too, where no submodule of it does
more.
"""
TAKEN = {"random": {"Random"}, "sys": {"version_info"}}
"""What alone may be used of a module."""
BARRED = {"datetime": {"now", "today", "utcnow"}, "numpy": {"random"}}
"""What no module that imports the key uses as an attribute, of whatever it is: clocks and random
sources.
"""
BY_NAME = {source.name: source for source in FILES}


def is_pure(source: Source) -> bool:
    """A package without code of its own is as pure as what is imported from it."""
    first = (ast.get_docstring(source.tree) or "").partition("\n\n")[0].rstrip()
    empty = source.path.name == "__init__.py" and len(source.tree.body) == 1
    return first.endswith("Pure.") or empty


def imports_at_run_time(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, in functions too, but for those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from imports_at_run_time(ast.Module([other], []))
        else:
            yield from imports_at_run_time(node)


def relative_targets(source: Source, node: ast.ImportFrom) -> Iterator[str]:
    """The files, by path under the root, that a relative import reads names from."""
    folder = source.path.relative_to(ROOT).parent.parts
    base = folder[: len(folder) - node.level + 1]
    module = "/".join((*base, *(node.module or "").split("."))).rstrip("/")
    for alias in node.names:
        names = [f"{module}/{alias.name}.py", f"{module}.py", f"{module}/__init__.py"]
        yield next((name for name in names if name in BY_NAME), names[0])


def problems_of(source: Source) -> Iterator[str]:
    for node in imports_at_run_time(source.tree):
        at = f"{source.name}:{node.lineno} imports"
        if isinstance(node, ast.ImportFrom) and node.level:
            for name in relative_targets(source, node):
                if name not in BY_NAME or not is_pure(BY_NAME[name]):
                    yield f"{at} {name}, which does not say that it is pure"
            continue
        module = node.module if isinstance(node, ast.ImportFrom) else None
        for target in [module] if module else [alias.name for alias in node.names]:
            known = target in VALUES or (target or "").partition(".")[0] in VALUES
            if not known:
                yield f"{at} {target}, which may do more than make values"
    yield from uses_of_sources(source)


def uses_of_sources(source: Source) -> Iterator[str]:
    """What a module uses of TAKEN and BARRED modules beyond values."""
    modules: dict[str, str] = {}
    barred: set[str] = set()
    for node in imports_at_run_time(source.tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            barred.update(*(BARRED.get(alias.name, ()) for alias in node.names))
            continue
        module = "" if node.level else node.module or ""
        barred.update(BARRED.get(module, ()))
        for alias in node.names:
            if module in TAKEN and alias.name not in TAKEN[module]:
                yield f"{source.name}:{node.lineno} imports {module}.{alias.name}"
            if module in BARRED and alias.name in BARRED[module]:
                yield f"{source.name}:{node.lineno} imports {module}.{alias.name}"
    for node in source.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        module = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
        if node.attr in barred or (module in TAKEN and node.attr not in TAKEN[module]):
            yield f"{source.name}:{node.lineno} uses {ast.unparse(node)}"


def source_of(text: str, name: str = "broker/partition/example.py") -> Source:
    source = Source(ROOT / name)
    source.__dict__["tree"] = ast.parse(text)
    return source


def test_pure_modules_import_pure_modules():
    """The label is a promise: no file, socket, thread, clock or random source behind it."""
    pure = [source for source in FILES if is_pure(source)]
    assert len(pure) > 70
    problems = [problem for source in pure for problem in problems_of(source)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('"""A value. Pure."""\nimport struct\nfrom .state import BrokerState', 0),
        ('"""A value. Pure."""\nif TYPE_CHECKING:\n    import asyncio', 0),
        ('"""A value. Pure."""\nif TYPE_CHECKING:\n    pass\nelse:\n    import asyncio', 1),
        ('"""A value. Pure."""\ndef f():\n    import os', 1),
        ('"""A value. Pure."""\nimport random\nrandom.Random(1).random()', 0),
        ('"""A value. Pure."""\nimport random\nrandom.random()', 1),
        ('"""A value. Pure."""\nimport random as r\nr.random()', 1),
        ('"""A value. Pure."""\nfrom random import Random\nRandom(1).random()', 0),
        ('"""A value. Pure."""\nfrom random import random\nrandom()', 1),
        ('"""A value. Pure."""\nimport datetime\ndatetime.datetime.now()', 1),
        ('"""A value. Pure."""\nfrom datetime import date as day\nday.today()', 1),
        ('"""A value. Pure."""\nfrom datetime import timedelta\ntimedelta(1).days', 0),
        ('"""A value. Pure."""\nimport numpy as np\nnp.random.default_rng()', 1),
        ('"""A value. Pure."""\nfrom numpy import random', 1),
        ('"""A value. Pure."""\nfrom ..storage.files import Files', 1),
        ('"""A value. Pure."""\nfrom ..storage import files', 1),
        ('"""A value. Pure."""\nfrom os import path', 1),
    ],
)
def test_import_is_reported_when_it_is_not_pure(text, problems):
    assert len(list(problems_of(source_of(text)))) == problems
