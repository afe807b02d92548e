"""Loads the function of a job, named `module:function`, and computes the version of its code.

    jobs.py ─imports─▶ rules.py ─imports─▶ numpy        code: a digest of jobs.py and rules.py

The digest does not cover installed packages such as numpy, so their versions are the user's
responsibility.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import site
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType

import pyarrow as pa
from pyspark import cloudpickle

from ...protocol.errors import JobError, Reason
from ...protocol.ids import check_name

JobFunction = Callable[[pa.Table], "pa.Table | pa.RecordBatch"]
DIGEST_CHARS = 16
MODULES_MAX = 1_000
_OWN_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Job:
    """A function that takes the messages of a piece as a table, in order, and returns a table of
    rows.
    """

    name: str
    function: JobFunction
    code: str
    """The version of the code: module:function@digest, followed by +VERSION if the user gave
    one.
    """


def load_job(reference: str, *, name: str = "", version: str = "") -> Job:
    """
    Import the function named by a reference such as `jobs.clean:run`.

    Its module is pickled by value, so workers only need the modules that it imports.

    Args:
        version: the version of anything that the digest does not cover, such as installed packages,
            files that the job reads, and modules that are imported under a computed name.

    Raises:
        JobError: the module or the function cannot be imported.
        InvalidRequestError: the version is not a valid name.
    """
    module_name, _, function_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
        source = inspect.getsource(module)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        load_error = JobError(
            Reason.JOB_FAILED,
            f"cannot import the job {reference!r:.200}: {error}",
            job=reference[:200],
        )
        load_error.hint = (
            "Give module:function, for example jobs:clean; the current folder is searched for the "
            "module first."
        )
        raise load_error from None
    if not callable(function):
        raise JobError(
            Reason.JOB_FAILED, f"{reference!r:.200} is not a function", job=reference[:200]
        )
    if module_name != "__main__":
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    digest = hashlib.sha256(source.encode())
    for imported, text in sorted(_imported_sources(module, source).items()):
        digest.update(f"\0{imported}\0".encode() + text)
    code = f"{module_name}:{function_name}@{digest.hexdigest()[:DIGEST_CHARS]}"
    if version:
        code = f"{code}+{check_name('version', version)}"
    return Job(name or reference.replace(":", "."), function, code)


def _imported_sources(module: ModuleType, source: str) -> dict[str, bytes]:
    """
    Return the source of each user module that a module imports, by name. This includes indirect
    imports and imports inside functions.

    A user module is one that is neither installed nor part of Python or keylane.
    """
    sources: dict[str, bytes] = {}
    is_package = hasattr(module, "__path__")
    pending_modules = [
        (module.__name__, module.__name__ if is_package else module.__package__ or "", source)
    ]
    while pending_modules and len(sources) < MODULES_MAX:
        name, package, text = pending_modules.pop()
        for imported in _imported_names(name, package, text):
            if imported in sources or imported == module.__name__:
                continue
            path = _user_module_path(imported)
            if path is None:
                continue
            sources[imported] = path.read_bytes()
            module_package = imported if path.name == "__init__.py" else imported.rpartition(".")[0]
            pending_modules.append(
                (imported, module_package, sources[imported].decode(errors="replace"))
            )
    return sources


def _imported_names(name: str, package: str, source: str) -> Iterator[str]:
    """Yield the names of the modules that some source code imports, and of their packages. Some of
    the names may be attributes of a module instead.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    names = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            names |= {base, *(f"{base}.{each.name}" for each in node.names)}
    for each in sorted(names):
        parts = each.split(".")
        yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _user_module_path(name: str) -> Path | None:
    """Return the file of a user module, or None if it is not a user module or has no source."""
    if name.partition(".")[0] in {_OWN_PACKAGE, "pyspark", "__main__"}:
        return None
    parent = name.rpartition(".")[0]
    if parent and _user_module_path(parent) is None and not _is_namespace(parent):
        return None
    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.has_location:
        return None
    path = Path(spec.origin).resolve()
    if (
        path.suffix != ".py"
        or not path.is_file()
        or any(path.is_relative_to(each) for each in _installed_folders())
    ):
        return None
    return path


def _is_namespace(name: str) -> bool:
    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


@cache
def _installed_folders() -> frozenset[Path]:
    """Return the folders of the standard library and of installed packages."""
    paths = [sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(
        Path(each).resolve()
        for each in (*paths, *site.getsitepackages(), site.getusersitepackages())
    )
