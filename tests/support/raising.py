"""`pytest.raises` for an error by its class or by its reason."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.protocol.errors import KeylaneError, Reason

Expected = type[BaseException] | Reason


def raises(
    expected: Expected | tuple[Expected, ...], *, match: str | None = None
) -> pytest.RaisesExc[Any]:
    """Expect an error of a class, or of a reason."""
    each = expected if isinstance(expected, tuple) else (expected,)
    kinds = [KeylaneError if isinstance(kind, Reason) else kind for kind in each]
    return pytest.raises(
        tuple(kinds), match=match, check=lambda error: any(is_a(error, kind) for kind in each)
    )


def is_a(error: object, expected: Expected) -> bool:
    """Whether an error is of a class, or has a reason and the class of that."""
    if not isinstance(expected, Reason):
        return isinstance(error, expected)
    named = isinstance(error, KeylaneError) and error.reason is expected
    return named and expected.kind in {kind.__name__ for kind in type(error).__mro__}
