"""The function of a job, named `module:function`, and the version of its code."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from pyspark import cloudpickle

from ...protocol.errors import JobFailedError

JobFunction = Callable[[pa.Table], "pa.Table | pa.RecordBatch"]
DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A function of a table of messages, in their order, that returns a table; it is called once for each piece."""

    name: str
    function: JobFunction
    code: str
    """module:function@digest of the module's source."""


def load_job(named: str, *, name: str = "") -> Job:
    """
    The job of a name such as `jobs.clean:run`.

    Its module travels to the workers by value: they need what it imports, and not the module itself.

    Raises:
        JobFailedError: no such module or function.
    """
    module_name, _, function_name = named.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
        source = inspect.getsource(module)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise JobFailedError(
            f"{named!r:.200} is no job: give module:function; {error}", job=named[:200]
        ) from None
    if not callable(function):
        raise JobFailedError(f"{named!r:.200} is no function", job=named[:200])
    if module_name != "__main__":
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    digest = hashlib.sha256(source.encode()).hexdigest()[:DIGEST_CHARS]
    return Job(name or named.replace(":", "."), function, f"{module_name}:{function_name}@{digest}")
