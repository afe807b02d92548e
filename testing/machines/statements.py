"""A connection that runs known SQL statements by a shorter way than SQLAlchemy's.

The SQL, its parameters and the values of its rows are SQLAlchemy's own: each statement is compiled, and run for the
first time, by the real connection.  Left out afterwards is what SQLAlchemy does for drivers in general: an execution
context and a cursor result for each execution.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from sqlalchemy.engine import Connection, IteratorResult

T = TypeVar("T")
_MEMO = "_simulated_plan"


EXPANDED_MAX = 256
"""Texts that are kept of one statement."""


class _Expanded(NamedTuple):
    """A statement with lists of certain lengths; `elements` are the names of the elements of each list."""

    sql: str
    names: tuple[str, ...]
    processors: dict[str, Any]
    elements: dict[str, list[str]]


class _Plan:
    """What is known of a compiled statement.  `names` are those of its parameters, in order."""

    __slots__ = (
        *("_expanded", "_lists", "compiled", "expands", "metadata", "names", "processors", "sql"),
    )

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.sql: str = compiled.string
        self.names: tuple[str, ...] = tuple(compiled.positiontup)
        self.processors: dict[str, Any] = compiled._bind_processors
        self.expands = bool(compiled.literal_execute_params or compiled.post_compile_params)
        self.metadata: Any = compiled._cached_metadata
        """Of its rows; None if it has none."""
        self._lists = _lists(compiled)
        """Parameters that are lists of plain values, as of IN; None: the SQL depends on more than their lengths."""
        self._expanded: dict[tuple[int, ...], _Expanded] = {}
        """By the lengths of the lists."""

    def text(self, values: dict[str, Any]) -> tuple[str, list[Any]]:
        """The SQL for these values of its parameters, and what the driver gets for its question marks."""
        sql, names, processors = self.sql, self.names, self.processors
        if self.expands:
            sql, names, processors, _ = self._expand(values)
        if not processors:
            return sql, [values[name] for name in names]
        return sql, [
            processors[name](values[name]) if name in processors else values[name] for name in names
        ]

    def _expand(self, values: dict[str, Any]) -> _Expanded:
        """The SQL with a question mark for each element of a list; the elements take the places of the lists in `values`."""
        lists = self._lists
        lengths = () if lists is None else tuple([len(values[name]) for name in lists])
        known = None if lists is None else self._expanded.get(lengths)
        if known is not None:
            for name, elements in known.elements.items():
                values.update(zip(elements, values.pop(name), strict=True))
            return known
        told = self.compiled._process_parameters_for_postcompile(values)
        processors = self.processors | told.processors if told.processors else self.processors
        expanded = _Expanded(
            told.statement, tuple(told.positiontup), processors, dict(told.parameter_expansion)
        )
        if lists is not None and len(self._expanded) < EXPANDED_MAX:
            self._expanded[lengths] = expanded
        return expanded


def _lists(compiled: Any) -> tuple[str, ...] | None:
    lists = [compiled.bind_names[parameter] for parameter in compiled.post_compile_params]
    types = [parameter.type for parameter in compiled.post_compile_params]
    plain = not any(kind._is_tuple_type or kind._isnull for kind in types)
    return tuple(sorted(lists)) if plain and not compiled.literal_execute_params else None


class _Parameters:
    """
    The values of the parameters of a statement that is a constant, run with the same names each time.

    Args:
        first: the values of a first execution, and `given` what it was given.
    """

    __slots__ = ("_constants", "_given")

    def __init__(self, compiled: Any, first: dict[str, Any], given: Any) -> None:
        self._given = [
            (name, parameter.key if parameter.key in given else name)
            for parameter, name in compiled.bind_names.items()
            if parameter.key in given or name in given
        ]
        changing = {name for name, _ in self._given}
        self._constants = {name: value for name, value in first.items() if name not in changing}

    def values(self, given: Any) -> dict[str, Any]:
        """The values for what an execution is given."""
        values = self._constants.copy()
        for name, key in self._given:
            values[name] = given[key]
        return values


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
            _, _, plan, known = memo
            values = known.values(parameters)
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
            values = plan.compiled.construct_params(
                parameters or None,
                extracted_parameters=extracted,
                escape_names=False,
                _collected_params=collected,
            )
            binds = [*plan.compiled.bind_names, *(extracted or ())]
            if not collected and not any(bind.callable for bind in binds):
                known = _Parameters(plan.compiled, values, parameters or {})
                statement.__dict__[_MEMO] = (id(statement), keys, plan, known)
        try:
            cursor = self._raw.execute(*plan.text(values))
        except sqlite3.Error:  # once more, so that the error is SQLAlchemy's
            return self._real.execute(statement, parameters)
        if plan.metadata is None:
            return _Counted(cursor.rowcount)
        return IteratorResult(plan.metadata, iter(cursor.fetchall()))
