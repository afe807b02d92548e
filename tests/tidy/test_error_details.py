"""An error's details have the names that its class declares, wherever it is raised."""

import ast

import pytest

from keylane.protocol import errors
from keylane.protocol.errors.base import Detail
from tidy.tree import FILES

KINDS = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, errors.KeylaneError)
}
FREE = {"InvalidRequestError", "CorruptBatchError"}
"""Their details are whatever contradicts something else: no program asks for them by name."""


def declared(kind: type[errors.KeylaneError]) -> set[str]:
    return {
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, Detail)
    }


def raised() -> list[tuple[str, str, str]]:
    """Place, class and detail of every error made in the product."""
    details = []
    for source in FILES:
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                details += [
                    (f"{source.name}:{node.lineno}", node.func.id, keyword.arg)
                    for keyword in node.keywords
                    if node.func.id in KINDS and keyword.arg is not None
                ]
    return details


def test_errors_are_raised_with_declared_details():
    strange = [
        f"{place}: {kind} has no {name}"
        for place, kind, name in raised()
        if kind not in FREE and name not in declared(KINDS[kind])
    ]
    assert not strange, "\n".join(strange)


def named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_errors_are_raised_with_a_reason_of_their_class():
    """A class without a code is always raised with one."""
    strange = []
    for source in FILES:
        for node in source.nodes:
            if not (isinstance(node, ast.Call) and named(node.func) in KINDS):
                continue
            if isinstance(node.func, ast.Attribute) and named(node.func.value) == "click":
                continue  # click has a UsageError too
            kind, first = KINDS[named(node.func)], node.args[0] if node.args else None
            reason = first.attr if isinstance(first, ast.Attribute) else None
            if isinstance(first, ast.Attribute) and named(first.value) == "Reason":
                fits = errors.Reason[first.attr].kind == kind.__name__
            else:
                fits = "code" in vars(kind)
            if not fits:
                strange.append(f"{source.name}:{node.lineno}: {kind.__name__} {reason}")
    assert not strange, "\n".join(strange)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_attribute_is_none_without_its_detail(kind):
    assert [getattr(kind(), name) for name in declared(kind)] == [None] * len(declared(kind))


def test_attribute_is_the_detail_of_its_name():
    error = errors.FencedError("late", token=5, current_token=7)
    assert (error.token, error.current_token) == (5, 7)
    assert errors.SubjectUnknownError(subject="flights").subject == "flights"


def test_attribute_is_none_where_a_peer_sent_another_type():
    """Text is read of anything; a number is not read out of text."""
    error = errors.CorruptLogError(position="far", path=7)
    assert (error.position, error.path) == (None, "7")
