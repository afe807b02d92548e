"""What a page of a partition that a resize has replaced says."""

from dataclasses import dataclass

import pytest

from keylane.admin import OperationView
from keylane.console.acts.act import Form
from keylane.console.acts.parked import redrive
from keylane.protocol.errors import KeylaneError, NotFoundError, Reason
from keylane.protocol.operations import OperationKind, OperationState

FORM = Form({"subject": "orders", "group": "billing", "key_hex": "6b", "partition": "3"})


@dataclass
class NothingParked:
    """An admin of a group that has parked nothing on the partition."""

    operations: list[OperationView]

    async def redrive(self, *_: object, **__: object) -> None:
        raise NotFoundError(Reason.PARKED_KEY_UNKNOWN, "nothing is parked")

    async def list_operations(self, _subject: str) -> list[OperationView]:
        return self.operations


def resize(state: OperationState, *sealed: int) -> OperationView:
    return OperationView(
        operation_id=7,
        subject="orders",
        kind=OperationKind.RESIZE,
        state=state,
        sealed=sealed,
        children=(),
    )


async def test_form_says_that_its_partition_was_replaced():
    admin = NothingParked([resize(OperationState.DONE, 3)])
    with pytest.raises(NotFoundError, match=r"partition 3 was replaced by operation 7 \(resize\)"):
        await redrive(admin, FORM)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "operation", [resize(OperationState.CANCELED, 3), resize(OperationState.DONE, 4)]
)
async def test_form_keeps_its_error_when_its_partition_was_not_replaced(operation: OperationView):
    with pytest.raises(KeylaneError, match="nothing is parked"):
        await redrive(NothingParked([operation]), FORM)  # type: ignore[arg-type]
