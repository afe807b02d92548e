"""Objects that travel to processes of Spark, and say there in one sentence what the process lacks.
Needs pyspark.

Spark pickles them; a process without keylane would fail in unpickling, with a page of traces and
"No module named 'keylane'".  So what unpickles them travels by value: it is a function inside of a
function, which cloudpickle cannot look up by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark import cloudpickle


def travelling(
    kind: type, state: dict[str, Any]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """What `__reduce__` of a travelling object returns: the object arrives as a `kind` with this
    `__dict__`.
    """
    data: bytes = cloudpickle.dumps((kind, state))  # type: ignore[no-untyped-call]
    return _reviver(), (data,)


def _reviver() -> Callable[[bytes], object]:
    lacking = lack_teller()

    def revive(data: bytes) -> object:
        import pickle

        try:
            kind, state = pickle.loads(data)  # noqa: S301 - Spark has pickled it
        except ImportError as error:
            raise lacking(error) from None
        made = kind.__new__(kind)
        made.__dict__.update(state)
        return made

    return revive


def lack_teller() -> Callable[[ImportError], Exception]:
    """
    A function that travels by value, and makes of an ImportError the one sentence that the driver
    shows.

    Its text is that of a SparkProcessError in the form of `failure.py`: there may be no keylane to
    raise the real one.
    """

    def lacking(error: ImportError) -> Exception:
        import json
        import platform
        import sys

        python = f"{sys.executable} ({platform.python_version()}) on {platform.node()}"
        # Of a module that is there, and lacks a name or a library, the error itself says more than
        # the module's name.
        gone = isinstance(error, ModuleNotFoundError) and error.name is not None
        missing = error.name if gone else str(error)
        lack = f"cannot import {missing}" if gone else f"cannot use a package: {missing}"
        facts = {"details": {"missing": missing, "python": python}, "fate": "not_done"}
        return RuntimeError(
            f"KEYLANE_1296 {json.dumps(facts, sort_keys=True)} the Python of this Spark process, "
            f"{python}, {lack}: "
            f"install keylane with pyarrow and numpy there, or set PYSPARK_PYTHON in the "
            f"environment of the driver to a "
            f"Python that has them"
        )

    return lacking
