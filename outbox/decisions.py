"""Decides what follows for the batches of a partition after the oldest of them failed.  Pure.

| the answer to the oldest batch | it may be stored | it is certainly not |
| --- | --- | --- |
| the partition is sealed | RETURN: it is not | RETURN |
| a message is over the partition's limit | RETURN: it is not | RETURN |
| its loss is accepted, or its subject is deleted | GIVE_UP | RETURN |
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


def decide_send_step(error: KeylaneError, *, doubtful: bool, left: bool, gone: bool) -> SendStep:
    """
    The next step.

    Args:
        doubtful: the oldest batch may be stored.
        left: the partition is not open in the latest route.
        gone: no broker can be asked about it any more: an operator has accepted its loss, or its
            subject is deleted.
    """
    if isinstance(error, StaleRouteError | MessageTooLargeError):
        return SendStep.RETURN
    if gone or isinstance(error, _UNTELLABLE):
        return SendStep.GIVE_UP if doubtful else SendStep.RETURN
    return SendStep.RETURN if left and not doubtful else SendStep.AGAIN
