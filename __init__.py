"""A message broker for Python: a durable log that keeps each key's order.

`keylane` exports the clients, their settings, and the values and errors that most programs use.
`keylane.admin` contains the results of administrative calls, `keylane.errors` all errors,
`keylane.metrics` the figures of a program's clients, and `keylane.sync` the clients for programs
without an event loop. The names are listed once, in `__init__.pyi`, and are loaded on first use:
`import keylane` imports no network library.
"""

import re
import sys
from importlib import import_module
from pkgutil import get_data

if sys.version_info < (3, 11):  # noqa: UP036 - for an older Python, which pip did not ask
    _FOUND = ".".join(map(str, sys.version_info[:3]))
    raise ImportError(f"keylane needs Python 3.11 or newer, and this is Python {_FOUND}")

__version__ = "0.3.0"

_LINE = re.compile(r"^from (\.[\w.]*) import (\w+) as \2$", re.MULTILINE)
_STUB = (get_data(__name__, "__init__.pyi") or b"").decode()
_HOMES = {name: home for home, name in _LINE.findall(_STUB)}
"""The module that each exported name comes from; "." stands for a module of keylane itself."""

_FURTHER_HOMES = ("admin", "consumer", "producer", "errors")
"""Modules with public names that `keylane` itself does not export."""

__all__ = [name for name, home in _HOMES.items() if home != "."]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        _refuse_further(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == ".":
        return import_module(f".{name}", __name__)
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def _refuse_further(name: str) -> None:
    """
    Raise ImportError if a public module of keylane has `name`; its message says which module.

    An AttributeError would lose its message in `from keylane import name`. Lower-case names are not
    searched for, because they are modules, whose import must stay cheap.
    """
    if not name[:1].isupper():
        return
    for home in _FURTHER_HOMES:
        if hasattr(import_module(f".{home}", __name__), name):
            raise ImportError(
                f"keylane does not export {name}: write from keylane.{home} import {name}",
                name=name,
            )


def __dir__() -> list[str]:
    """Return the public names, without what this module imports for itself."""
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
