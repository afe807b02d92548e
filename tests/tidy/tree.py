"""The source files of the package and of the tests, read once, for the tests of this folder."""

import ast
import gc
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
ROOMS = sorted({name.split(".")[1] for name in PACKAGES if "." in name})


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def room(self) -> str:
        """The first folder; "" for the public face."""
        return self.name.split("/")[0] if "/" in self.name else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        # Collecting garbage can end in another parse (pytest shows the source of a
        # ResourceWarning), and CPython 3.11 then loses count within this one: "AST constructor
        # recursion depth mismatch".
        gc.disable()
        try:
            return ast.parse(self.text, filename=self.name)
        finally:
            gc.freeze()  # trees stay: a collection need not go through millions of nodes
            gc.enable()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree: several tests go through them."""
        return list(ast.walk(self.tree))


@cache
def source_of(path: Path) -> Source:
    """The source of a file, read and parsed once."""
    return Source(path)


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is absolute, in-house ones start with "keylane"."""

    target: str
    line: int
    relative: bool


def package_files() -> list[Source]:
    paths = sorted(ROOT.glob("*.py"))
    for room in ROOMS:
        paths += sorted((ROOT / room).rglob("*.py"))
    return [source_of(path) for path in paths]


def imports_of(source: Source) -> Iterator[Import]:
    """Every import of a file, in functions and under TYPE_CHECKING too."""
    parts = ["keylane", *source.path.relative_to(ROOT).parent.parts]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, relative=False)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Import(node.module or "", node.lineno, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1])
            if node.module:
                yield Import(f"{base}.{node.module}", node.lineno, relative=True)
            else:
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}", node.lineno, relative=True)


def tracked_files() -> list[str]:
    """The files under version control, or, in a plain copy of the tree, all but what was built."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*")
        if path.is_file()
        and not {".venv", ".git", "__pycache__", "build", "dist"} & set(path.parts)
    ]


def load_site_module(name: str) -> ModuleType:
    """Return a module of docs/site, where modules import each other by their plain names."""
    folder = str(ROOT / "docs" / "site")
    sys.path.insert(0, folder)
    try:
        return import_module(name)
    finally:
        sys.path.remove(folder)


FILES = package_files()
TEST_FILES = [source_of(path) for path in sorted((ROOT / "tests").rglob("*.py"))]
