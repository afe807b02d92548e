"""A connection that runs known SQL statements by a shorter way than SQLAlchemy's.

The SQL, its parameters and the values of its rows are SQLAlchemy's own: each statement is compiled, and run for the
first time, by the real connection.  Left out afterwards is what SQLAlchemy does for drivers in general: an execution
context and a cursor result for each execution.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, IteratorResult

T = TypeVar("T")
_MEMO = "_simulated_plan"


class _Plan:
    """What is known of a compiled statement.  `names` are those of its parameters, in order."""

    __slots__ = ("compiled", "expands", "metadata", "names", "processors", "sql")

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.sql: str = compiled.string
        self.names: tuple[str, ...] = tuple(compiled.positiontup)
        self.processors: dict[str, Any] = compiled._bind_processors
        self.expands = bool(compiled.literal_execute_params or compiled.post_compile_params)
        self.metadata: Any = compiled._cached_metadata
        """Of its rows; None if it has none."""

    def text(self, values: dict[str, Any]) -> tuple[str, list[Any]]:
        """The SQL for these values of its parameters, and what the driver gets for its question marks."""
        sql, names, processors = self.sql, self.names, self.processors
        if self.expands:
            expanded = self.compiled._process_parameters_for_postcompile(values)
            sql, names = expanded.statement, expanded.positiontup
            if expanded.processors:
                processors = processors | expanded.processors
        if not processors:
            return sql, [values[name] for name in names]
        return sql, [
            processors[name](values[name]) if name in processors else values[name] for name in names
        ]


def _plan(compiled: Any) -> _Plan | None:
    """The plan of a statement; None if SQLAlchemy adds values of its own beside the parameters."""
    changes = compiled.isinsert or compiled.isupdate or compiled.isdelete
    if changes and (
        compiled.insert_prefetch or compiled.update_prefetch or compiled.implicit_returning
    ):
        return None
    rows = not changes or bool(compiled.compile_state.statement._returning)
    if rows and compiled._cached_metadata is None:
        return None
    return _Plan(compiled)


class _Counted:
    """What a statement without rows answers."""

    __slots__ = ("rowcount",)

    def __init__(self, rowcount: int) -> None:
        self.rowcount = rowcount


class QuickConnection:
    """Use it as a `sqlalchemy.Connection`; unknown statements go to the real one."""

    def __init__(self, real: Connection, raw: sqlite3.Connection) -> None:
        self.dialect: Any = real.dialect
        for name in ("do_begin", "do_commit", "do_rollback"):  # `transact` does
            setattr(self.dialect, name, lambda _connection: None)
        self._compiled: dict[Any, Any] = {}
        self._real = real.execution_options(compiled_cache=self._compiled)
        self._raw = raw
        self._plans: dict[Any, _Plan | None] = {}
        """By compiled statement that was run once; None: it always goes to the real connection."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def transact(self, work: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Run `work(connection, *args, **kwargs)` in a transaction."""
        raw = self._raw
        raw.execute("BEGIN IMMEDIATE")
        try:
            result = work(self, *args, **kwargs)
        except BaseException:
            raw.execute("ROLLBACK")
            raise
        raw.execute("COMMIT")
        return result

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """As `sqlalchemy.Connection.execute`."""
        if isinstance(parameters, list | tuple):
            if len(parameters) != 1:
                return self._real.execute(statement, parameters)
            parameters = parameters[0]
        keys = sorted(parameters) if parameters else []
        # A statement that is a constant of its module is known by itself; its clones have this attribute too.
        memo = statement.__dict__.get(_MEMO)
        if memo is not None and memo[0] == id(statement) and memo[1] == keys:
            _, _, plan, extracted, collected = memo
        else:
            compiled, extracted, collected, _ = statement._compile_w_cache(
                self.dialect, compiled_cache=self._compiled, column_keys=keys
            )
            plan = self._plans.get(compiled)
            if plan is None:
                result = self._real.execute(statement, parameters)
                if compiled not in self._plans:
                    self._plans[compiled] = _plan(compiled)
                return result
            statement.__dict__[_MEMO] = (id(statement), keys, plan, extracted, collected)
        values = plan.compiled.construct_params(
            parameters or None,
            extracted_parameters=extracted,
            escape_names=False,
            _collected_params=collected,
        )
        try:
            cursor = self._raw.execute(*plan.text(values))
        except sqlite3.Error:  # once more, so that the error is SQLAlchemy's
            return self._real.execute(statement, parameters)
        if plan.metadata is None:
            return _Counted(cursor.rowcount)
        return IteratorResult(plan.metadata, iter(cursor.fetchall()))
