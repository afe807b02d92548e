"""Pickles objects so that another Spark process can clearly report a missing package. Requires
pyspark.

In a process without keylane, unpickling would fail with a long traceback and "No module named
'keylane'". So the function that unpickles is itself pickled by value. For this it is nested in
another function, because cloudpickle cannot refer to a nested function by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark import cloudpickle


def reduce_by_value(
    kind: type, state: dict[str, Any]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the `__reduce__` result for an object of class `kind` whose `__dict__` is `state`."""
    data: bytes = cloudpickle.dumps((kind, state))  # type: ignore[no-untyped-call]
    return _make_unpickler(), (data,)


def _make_unpickler() -> Callable[[bytes], object]:
    report_missing = missing_package_reporter()

    def unpickle(data: bytes) -> object:
        import pickle

        try:
            kind, state = pickle.loads(data)  # noqa: S301 - Spark has pickled it
        except ImportError as error:
            raise report_missing(error) from None
        instance = kind.__new__(kind)
        instance.__dict__.update(state)
        return instance

    return unpickle


def missing_package_reporter() -> Callable[[ImportError], Exception]:
    """
    Return a function, pickled by value, that turns an ImportError into an error that the driver
    shows.

    The message encodes a SparkProcessError as in `failure.py`, because the missing package may be
    keylane itself, which defines the class.
    """

    def report_missing(error: ImportError) -> Exception:
        import json
        import platform
        import sys

        python = f"{sys.executable} ({platform.python_version()}) on {platform.node()}"
        # If the module exists but lacks a name or a library, the error's text says more than the
        # module's name.
        is_module_missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        missing_module = error.name if is_module_missing else str(error)
        problem = (
            f"cannot import {missing_module}"
            if is_module_missing
            else f"cannot use a package: {missing_module}"
        )
        payload = {"details": {"missing": missing_module, "python": python}, "fate": "not_done"}
        return RuntimeError(
            f"KEYLANE_1296 {json.dumps(payload, sort_keys=True)} the Python of this Spark process, "
            f"{python}, {problem}: install keylane with pyarrow and numpy there, or set "
            "PYSPARK_PYTHON in the environment of the driver to a Python that has them"
        )

    return report_missing
