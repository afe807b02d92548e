"""The Python of the pages compiles, imports what there is, and calls it with arguments that it
takes.

Examples that are whole programs are run elsewhere; a part of one has names that only its reader
knows.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import keylane

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    if page.name != "CHANGELOG.md" and "```python" in page.read_text()
)
CLIENTS = (
    "Admin",
    "Consumer",
    "Producer",
    "QueueReader",
    "Reader",
    "sync.Consumer",
    "sync.Producer",
    "outbox.Outbox",
)
"""Classes whose methods are looked up by the name of the variable: `producer.send`."""


def blocks() -> Iterator[Any]:
    """The Python of each page, with the line above it."""
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(
            r"^( *)```python[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE
        ):
            line = text[: block.start()].count("\n") + 1
            code = re.sub(rf"(?m)^{block[1]}", "", block[2])
            yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}")


BLOCKS = list(blocks())


def parsed(code: str) -> ast.Module:
    """The code; `await` may stand outside of a function, and `…` for arguments."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(code.replace("(…, ", "(..., ").replace("…", "..."), "page", "exec", flags)  # type: ignore[return-value]


def imported(tree: ast.Module) -> dict[str, Any]:
    """What the block imports of keylane, by name."""
    names: dict[str, Any] = {"keylane": keylane}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "keylane":
            module = importlib.import_module(node.module or "")
            names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "keylane":
                    importlib.import_module(each.name)
    return names


def client_of(variable: str) -> list[Any]:
    """The classes of which a variable of this name is: `producer` of two."""
    kinds = []
    for path in CLIENTS:
        if path.rpartition(".")[2].lower() == variable.replace("_", "").lower():
            module = importlib.import_module(f"keylane.{path.rpartition('.')[0]}".rstrip("."))
            kinds.append(getattr(module, path.rpartition(".")[2]))
    return kinds


def resolved(function: ast.expr, names: dict[str, Any]) -> list[Any]:
    """The objects of keylane that a call may mean; none if it is not keylane's."""
    if isinstance(function, ast.Name):
        return [names[function.id]] if function.id in names else []
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = function.value.id
        owners = [names[owner]] if owner in names else client_of(owner)
        return [getattr(each, function.attr, None) for each in owners]
    return []


def takes(parameters: Mapping[str, inspect.Parameter], given: set[str]) -> bool:
    """True if a call with these arguments is right, as far as their names go."""
    if any(
        each.kind is each.VAR_KEYWORD and each.annotation != "Never" for each in parameters.values()
    ):
        return True
    return given <= set(parameters)


@pytest.mark.parametrize("code", BLOCKS)
def test_documented_python_calls_what_there_is(code: str):
    tree = parsed(code)
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        meant = resolved(node.func, names)
        if not meant:
            continue
        shown = ast.unparse(node)[:80]
        assert any(meant), f"there is no such call: {shown}"
        given = {each.arg for each in node.keywords if each.arg}
        taken = [inspect.signature(each).parameters for each in meant if each is not None]
        assert any(takes(each, given) for each in taken), f"not all of {given} are taken: {shown}"


def test_pages_with_python_are_found():
    assert {page.name for page in PAGES} >= {"README.md", "CONSUMING.md", "OUTBOX.md", "EFFECTS.md"}
    assert len(BLOCKS) > 30
