"""Decides what happens to the batches of a partition after the oldest of them failed. Pure.

| the answer to the oldest batch | it may be stored | it is certainly not stored |
| --- | --- | --- |
| the partition is sealed | RETURN: the answer proves that it is not stored | RETURN |
| a message is over the partition's limit | RETURN: the same | RETURN |
| its loss is accepted, or its subject is deleted | GIVE_UP | RETURN |
| a gap, a used sequence, a higher epoch | GIVE_UP: the broker does not know | RETURN |
| anything else, and the partition is no longer in the route | AGAIN | RETURN |
| anything else | AGAIN | AGAIN |

If a batch is not stored, no batch after it can be stored, because the broker refuses gaps.
"""

from __future__ import annotations

import enum

from ..protocol.errors import (
    KeylaneError,
    MessageTooLargeError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
)


class SendStep(enum.Enum):
    """The next step for the unsettled batches of a partition."""

    AGAIN = "the same bytes are sent again, after a pause"
    RETURN = "no batch is stored: all rows wait again, and are sent by the latest route"
    GIVE_UP = (
        "batches that may be stored fail, with a fate that is unknown; the rows of the others wait"
    )


_OUTCOME_LOST = (SequenceGapError, SequenceReusedError, ProducerFencedError)


def decide_send_step(error: KeylaneError, *, doubtful: bool, left: bool, gone: bool) -> SendStep:
    """
    Return the next step after the oldest batch failed with `error`.

    Args:
        doubtful: the oldest batch may be stored.
        left: the partition is not open in the latest route.
        gone: no broker can be asked about the partition any more: an operator has accepted its
            loss, or its subject is deleted.
    """
    if isinstance(error, StaleRouteError | MessageTooLargeError):
        return SendStep.RETURN
    if gone or isinstance(error, _OUTCOME_LOST):
        return SendStep.GIVE_UP if doubtful else SendStep.RETURN
    return SendStep.RETURN if left and not doubtful else SendStep.AGAIN
