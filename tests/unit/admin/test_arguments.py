"""Arguments of calls: converted to what goes over the wire, or refused by name."""

from __future__ import annotations

import pytest

from keylane.admin.arguments import checked
from keylane.protocol.control import SwitchGroup
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import ConsumeStrategy


def test_arguments_are_converted_to_the_types_of_the_call():
    """Texts become values of enumerations, lists become tuples."""
    assert checked(Reshape, {"kind": "grow", "subject": "s", "queues": [3, 5]}) == Reshape(
        kind=OperationKind.GROW, subject="s", queues=(3, 5)
    )
    asked = checked(SwitchGroup, {"strategy": "shared"})
    assert asked.strategy is ConsumeStrategy.SHARED


def test_argument_is_refused_by_its_name_when_its_type_is_wrong():
    """The error names the field, or the argument that has another name than its field."""
    with pytest.raises(InvalidRequestError, match="queues"):
        checked(Reshape, {"kind": "grow", "queues": ["3"]})
    with pytest.raises(InvalidRequestError, match="consume_strategy"):
        checked(SwitchGroup, {"strategy": "none"}, strategy="consume_strategy")
