"""A bug on purpose: the changes that apply it, and their undoing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Patches:
    """Attributes replaced, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute, which must exist, and takes the same calls if it is a function;
        returns what was there.
        """
        own = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        if inspect.isfunction(own):
            _check_calls(own, value)
        self._before.append((owner, name, own))
        setattr(owner, name, value)
        return getattr(own, "__func__", own)

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()


def _check_calls(real: Callable[..., Any], value: Callable[..., Any]) -> None:
    """Check that `value` takes every argument of `real`: a mutant that raises TypeError shows
    nothing.
    """
    kinds = [
        (parameter.name, parameter.kind)
        for parameter in inspect.signature(real).parameters.values()
    ]
    by_place = [
        name
        for name, kind in kinds
        if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    by_name = {name: None for name, kind in kinds if kind is inspect.Parameter.KEYWORD_ONLY}
    inspect.signature(value).bind(*by_place, **by_name)


class Mutant:
    """One bug; `breaks` puts it in."""

    def __init__(self, breaks: Callable[[Patches], None]) -> None:
        self.name = breaks.__name__
        self.breaks = breaks

    @contextmanager
    def applied(self) -> Iterator[None]:
        patches = Patches()
        try:
            self.breaks(patches)
            yield
        finally:
            patches.undo()


Breaks = Callable[[Patches], None]
