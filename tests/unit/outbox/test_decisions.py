"""What follows for the batches of a partition after the oldest of them failed."""

import itertools

import pytest

from keylane.outbox.batches import SendStep, decide_send_step
from keylane.protocol import errors

AGAIN, RETURN, GIVE_UP = SendStep.AGAIN, SendStep.RETURN, SendStep.GIVE_UP
FLAGS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize(("doubtful", "left", "gone"), FLAGS)
def test_batches_return_when_the_partition_is_sealed_or_takes_less(doubtful, left, gone):
    for error in (errors.StaleRouteError(), errors.MessageTooLargeError()):
        assert decide_send_step(error, doubtful=doubtful, left=left, gone=gone) is RETURN


@pytest.mark.parametrize(
    "kind",
    [errors.SequenceGapError, errors.SequenceReusedError, errors.ProducerFencedError],
)
@pytest.mark.parametrize("left", [False, True])
def test_doubtful_batches_are_given_up_when_the_broker_cannot_tell(kind, left):
    assert decide_send_step(kind(), doubtful=True, left=left, gone=False) is GIVE_UP
    assert decide_send_step(kind(), doubtful=False, left=left, gone=False) is RETURN


@pytest.mark.parametrize("left", [False, True])
def test_doubtful_batches_are_given_up_when_their_partition_is_gone(left):
    error = errors.NotSentError()
    assert decide_send_step(error, doubtful=True, left=left, gone=True) is GIVE_UP
    assert decide_send_step(error, doubtful=False, left=left, gone=True) is RETURN


@pytest.mark.parametrize(
    "kind",
    [
        errors.NotSentError,
        errors.OutcomeUnknownError,
        errors.BrokerReadOnlyError,
        errors.OverloadedError,
        errors.PartitionUnknownError,
        errors.WrongBrokerError,
        errors.CorruptLogError,
        errors.InternalError,
        errors.ForeignServerError,
    ],
)
def test_batches_are_sent_again_for_ever_unless_they_left_and_are_not_stored(kind):
    assert decide_send_step(kind(), doubtful=True, left=True, gone=False) is AGAIN
    assert decide_send_step(kind(), doubtful=True, left=False, gone=False) is AGAIN
    assert decide_send_step(kind(), doubtful=False, left=False, gone=False) is AGAIN
    assert decide_send_step(kind(), doubtful=False, left=True, gone=False) is RETURN
