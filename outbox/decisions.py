"""Decides what follows for the batches of a partition after the oldest of them failed.  Pure.

| the answer to the oldest batch | it may be stored | it is certainly not |
| --- | --- | --- |
| the partition is sealed | RETURN: it is not | RETURN |
| a message is over the partition's limit | RETURN: it is not | RETURN |
| the loss of the partition is accepted | GIVE_UP | RETURN |
| a gap, a used sequence, a higher epoch | GIVE_UP: the broker cannot tell | RETURN |
| anything else, and the route has left the partition | AGAIN | RETURN |
| anything else | AGAIN | AGAIN |

No batch behind one that is not stored can be stored, because the broker refuses gaps.
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
    """What follows for the unsettled batches of a partition."""

    AGAIN = "the same bytes again, after a pause"
    RETURN = "no batch is stored: the rows of all wait for the present route, under a new session"
    GIVE_UP = (
        "batches that may be stored fail, with a fate that is unknown; the rows of the others wait"
    )


_UNTELLABLE = (SequenceGapError, SequenceReusedError, ProducerFencedError)


def decide_send_step(error: KeylaneError, *, doubtful: bool, left: bool, lost: bool) -> SendStep:
    """
    The next step.

    Args:
        doubtful: the oldest batch may be stored.
        left: the partition is not open in the latest route.
        lost: an operator has accepted its loss.
    """
    if isinstance(error, StaleRouteError | MessageTooLargeError):
        return SendStep.RETURN
    if lost or isinstance(error, _UNTELLABLE):
        return SendStep.GIVE_UP if doubtful else SendStep.RETURN
    return SendStep.RETURN if left and not doubtful else SendStep.AGAIN
