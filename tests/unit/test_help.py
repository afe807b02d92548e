"""What `help()` shows of the classes that users hold."""

import inspect

import pytest

import keylane
from keylane.outbox import Outbox

COLUMNS_MAX = 124


KINDS = [keylane.Producer, keylane.Consumer, keylane.Admin, Outbox]


@pytest.mark.parametrize("kind", KINDS)
def test_help_explains_every_argument(kind):
    """A docstring, of the class or of its constructor, is wrapped as the code is and has each
    public argument.
    """
    text = f"{inspect.getdoc(kind)}\n{inspect.getdoc(kind.__init__)}"
    assert max(map(len, text.splitlines())) <= COLUMNS_MAX
    arguments = text.partition("Args:")[2].partition("Raises:")[0]
    for name in inspect.signature(kind).parameters:
        assert name.startswith("_") or name in arguments, name


@pytest.mark.parametrize("kind", KINDS)
def test_help_of_public_methods_is_wrapped(kind):
    """Each has a docstring."""
    for name, member in inspect.getmembers(kind):
        if name.startswith("_"):
            continue
        text = inspect.getdoc(member)
        assert text, name
        assert max(map(len, text.splitlines())) <= COLUMNS_MAX, name
