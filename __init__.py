"""A message broker for Python: a durable log that keeps each key's order.

`keylane` exports the clients, their settings, and the values and errors that most programs name.
`keylane.admin` has what an operator's calls return, `keylane.errors` every error, and
`keylane.sync` the clients of programs without an event loop.  The names are listed once, in
`__init__.pyi`, and are loaded when they are first used: `import keylane` imports no network library.
"""

import re
from importlib import import_module
from pkgutil import get_data

__version__ = "0.2.0"

_LINE = re.compile(r"^from (\.[\w.]*) import (\w+) as \2$", re.MULTILINE)
_STUB = (get_data(__name__, "__init__.pyi") or b"").decode()
_HOMES = {name: home for home, name in _LINE.findall(_STUB)}
"""The module that each exported name comes from; a module of keylane itself comes from "."."""

__all__ = [name for name, home in _HOMES.items() if home != "."]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == ".":
        return import_module(f".{name}", __name__)
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
