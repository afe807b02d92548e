"""What an operation on partitions waits for while no broker can be asked, in words.  Pure."""

from __future__ import annotations

from ...protocol.operations import OperationState
from ...protocol.routing import Partition
from .journal import Operation


def hindrance(operation: Operation) -> str:
    """What it waits for; "" if a broker can be asked, or nothing is left to ask."""
    if any(one.address is not None for one in operation.todo):
        return ""
    if operation.todo:
        leaves = operation.state is OperationState.SEAL and operation.may_forsake
        return "" if leaves else silence(operation, operation.todo[0])
    return unsealable(operation) if operation.held else ""


def silence(operation: Operation, one: Partition) -> str:
    """The broker of a partition to host or to seal cannot be asked."""
    held = operation.state is OperationState.SEAL and not operation.may_forsake
    after = "; its children are held until it is back and has sealed" if held else ""
    return f"broker group {one.broker_group!r} is silent{after}"


def refusal(one: Partition, why: str) -> str:
    """The broker of a parent answers that it could not seal it, so none is sealed."""
    return (
        f"partition {one.partition_id} on {one.broker_group!r} cannot be sealed: {why}; "
        f"nothing is sealed before all parents can be"
    )


def unsealable(operation: Operation) -> str:
    """The brokers of some parents cannot be asked, so none of them is sealed."""
    return f"silent: {', '.join(operation.held)}; nothing is sealed before all parents can be"
