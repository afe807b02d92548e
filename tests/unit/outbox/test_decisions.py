"""What follows for the batches of a partition after the oldest of them failed."""

import itertools

import pytest

from keylane.outbox.batches import SendStep, decide_send_step
from keylane.protocol import errors

RETRY, RETURN, GIVE_UP = SendStep.RETRY, SendStep.RETURN, SendStep.GIVE_UP
FLAGS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize(("doubtful", "closed", "gone"), FLAGS)
def test_batches_return_when_the_partition_is_sealed_or_takes_less(doubtful, closed, gone):
    for error in (errors.StaleRouteError(), errors.MessageTooLargeError()):
        assert decide_send_step(error, doubtful=doubtful, closed=closed, gone=gone) is RETURN


@pytest.mark.parametrize(
    "kind",
    [errors.SequenceGapError, errors.SequenceReusedError, errors.ProducerFencedError],
)
@pytest.mark.parametrize("closed", [False, True])
def test_doubtful_batches_are_given_up_when_the_broker_cannot_tell(kind, closed):
    assert decide_send_step(kind(), doubtful=True, closed=closed, gone=False) is GIVE_UP
    assert decide_send_step(kind(), doubtful=False, closed=closed, gone=False) is RETURN


@pytest.mark.parametrize("closed", [False, True])
def test_doubtful_batches_are_given_up_when_their_partition_is_gone(closed):
    error = errors.NotSentError()
    assert decide_send_step(error, doubtful=True, closed=closed, gone=True) is GIVE_UP
    assert decide_send_step(error, doubtful=False, closed=closed, gone=True) is RETURN


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
    assert decide_send_step(kind(), doubtful=True, closed=True, gone=False) is RETRY
    assert decide_send_step(kind(), doubtful=True, closed=False, gone=False) is RETRY
    assert decide_send_step(kind(), doubtful=False, closed=False, gone=False) is RETRY
    assert decide_send_step(kind(), doubtful=False, closed=True, gone=False) is RETURN
