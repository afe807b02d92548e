"""A connection to SQLite that runs known SQL statements by a shorter way than SQLAlchemy's.

The SQL, its parameters and the values of its rows are SQLAlchemy's own: each statement is compiled, and run for the
first time, by SQLAlchemy.  Left out afterwards is what SQLAlchemy does for drivers in general: an execution context and
a cursor result for each execution.

It uses parts of SQLAlchemy that are not documented, and is written for the minor version that `pyproject.toml` names.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy.engine import Connection, Engine, IteratorResult
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase

from .dialect import BEGIN_WRITE

P = ParamSpec("P")
T = TypeVar("T")
_MEMO = "_keylane_memo"

EXPANDED_MAX = 256
"""Texts that are kept of one statement."""
COMPILED_MAX = 2_000
"""Compiled statements that are kept; several times as many as the metaserver has."""


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


class _Memo:
    """
    A plan of one statement object, and the values of its parameters that are constants.

    Clones of a statement have its attributes too, so it holds for the object that it names; not by its id, which a clone
    may get once the object is gone.  Threads may share it.

    Args:
        first: the values of a first execution, and `given` what it was given.
    """

    __slots__ = ("_constants", "_given", "keys", "plan", "statement")

    def __init__(self, statement: Any, plan: _Plan, first: Mapping[str, Any], given: Any) -> None:
        self.statement = weakref.ref(statement)
        self.plan = plan
        self.keys = frozenset(given)
        self._given = [
            (name, parameter.key if parameter.key in given else name)
            for parameter, name in plan.compiled.bind_names.items()
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


_NONE: dict[str, Any] = {}


class QuickConnection(Connection):
    """
    A connection of an engine; what is not a known statement goes SQLAlchemy's way.

    A result has the rows, or the count of changed ones; not the primary key of an inserted one.  A value of a row is found
    by position, by name, or by a column of a table; not by that of an alias or a label, which is another object each time.
    A value that its column's type refuses raises the type's own error, not a StatementError.

    Args:
        begin: the SQL that begins a transaction.
    """

    def __init__(self, engine: Engine, *, begin: str = BEGIN_WRITE) -> None:
        super().__init__(engine)
        driver: Any = self.connection.dbapi_connection
        self._raw: sqlite3.Connection = driver
        self._begin = begin
        self._compiled: dict[Any, Any] = {}
        self._plans: dict[Any, _Plan | None] = {}
        """By compiled statement that was run once; None: it always goes SQLAlchemy's way."""
        self.execution_options(compiled_cache=self._compiled)
        for name in ("do_begin", "do_commit", "do_rollback"):  # `transact` does
            setattr(self.dialect, name, _nothing)

    def transact(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `work(connection, …)` returns, in a transaction.  Raises what it raises, and sqlite3.Error."""
        raw = self._raw
        raw.execute(self._begin)
        try:
            result = work(self, *args, **kwargs)
            raw.commit()
        except BaseException:
            raw.rollback()
            raise
        return result

    def execute(
        self,
        statement: Executable,
        parameters: Any = None,
        *,
        execution_options: Any = None,
    ) -> Any:
        """As `sqlalchemy.Connection.execute`."""
        if execution_options:
            return super().execute(statement, parameters, execution_options=execution_options)
        if isinstance(parameters, list | tuple):
            if len(parameters) != 1:
                return self._execute_many(statement, parameters)
            parameters = parameters[0]
        given = parameters or _NONE
        memo: _Memo | None = statement.__dict__.get(_MEMO)
        if memo is not None and memo.statement() is statement and memo.keys == given.keys():
            return self._run(memo.plan, memo.values(given))
        if not isinstance(statement, SelectBase | UpdateBase):
            return super().execute(statement, parameters)
        return self._execute_anew(statement, given)

    def _execute_anew(self, statement: Any, given: Mapping[str, Any]) -> Any:
        """Execute a statement whose object is not known; one with the same text may be."""
        if len(self._compiled) > COMPILED_MAX:
            self._compiled.clear()
            self._plans.clear()
        compiled, extracted, collected, _ = statement._compile_w_cache(
            self.dialect, compiled_cache=self._compiled, column_keys=sorted(given)
        )
        result = None
        plan = self._plans.get(compiled)
        if plan is None:
            result = super().execute(statement, given)
            if compiled not in self._plans:
                self._plans[compiled] = _plan(compiled)
            plan = self._plans[compiled]
            if plan is None:
                return result
        values = self._remember(statement, plan, given, extracted, collected)
        return self._run(plan, values) if result is None else result

    def _execute_many(self, statement: Any, rows: Any) -> Any:
        """Execute a change once for each of these rows, which have the same keys."""
        if not rows or not isinstance(statement, UpdateBase):
            return super().execute(statement, rows)
        memo: _Memo | None = statement.__dict__.get(_MEMO)
        known = memo is not None and memo.statement() is statement
        if memo is None or not known or memo.keys != rows[0].keys():
            result = super().execute(statement, rows)
            self._learn(statement, rows[0])
            return result
        plan = memo.plan
        if plan.metadata is not None or plan.expands:
            return super().execute(statement, rows)
        ordered = [plan.text(memo.values(row))[1] for row in rows]
        try:
            return _Counted(self._raw.executemany(plan.sql, ordered).rowcount)
        except sqlite3.Error as error:
            raise self._wrapped(error, plan.sql, ordered) from error

    def _learn(self, statement: Any, given: Mapping[str, Any]) -> None:
        """Remember a change without rows that was executed for several rows, of which this is one."""
        compiled, extracted, collected, _ = statement._compile_w_cache(
            self.dialect, compiled_cache=self._compiled, column_keys=sorted(given)
        )
        plan = self._plans.get(compiled) or _plan(compiled)
        if plan is not None and plan.metadata is None:
            self._plans[compiled] = plan
            self._remember(statement, plan, given, extracted, collected)

    def _remember(
        self, statement: Any, plan: _Plan, given: Mapping[str, Any], extracted: Any, collected: Any
    ) -> dict[str, Any]:
        """Remember what a statement object is run by; returns the values of all its parameters."""
        values: dict[str, Any] = plan.compiled.construct_params(
            given or None,
            extracted_parameters=extracted,
            escape_names=False,
            _collected_params=collected,
        )
        binds = [*plan.compiled.bind_names, *(extracted or ())]
        if not collected and not any(bind.callable for bind in binds):
            statement.__dict__[_MEMO] = _Memo(statement, plan, values, given)
        return values

    def _wrapped(self, error: sqlite3.Error, sql: str, ordered: Sequence[Any]) -> BaseException:
        """The error as SQLAlchemy raises it."""
        return DBAPIError.instance(sql, tuple(ordered), error, sqlite3.Error, dialect=self.dialect)

    def _run(self, plan: _Plan, values: dict[str, Any]) -> Any:
        sql, ordered = plan.text(values)
        try:
            cursor = self._raw.execute(sql, ordered)
            if plan.metadata is None:
                return _Counted(cursor.rowcount)
            rows: Iterable[Any] = cursor.fetchall()
        except sqlite3.Error as error:
            raise self._wrapped(error, sql, ordered) from error
        return IteratorResult(plan.metadata, iter(rows))


def _nothing(_connection: object) -> None:
    """Leave transactions to `transact`."""
