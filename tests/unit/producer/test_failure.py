"""What follows a failed batch."""

import pytest

from keylane.producer.failure import Step, decide_after_failure
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    DiskFullError,
    FlushFailedError,
    InvalidRequestError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    WrongBrokerError,
)
from keylane.protocol.routing import OrderStrategy

STRICT, BEST_TRIED = OrderStrategy.STRICT, OrderStrategy.BEST_TRIED
PASSING = [
    NotSentError,
    OutcomeUnknownError,
    BrokerReadOnlyError,
    OverloadedError,
    SequenceGapError,
    DiskFullError,
    FlushFailedError,
]


def decide(error, strategy, tries, *, doubtful=False, leaving=False, gone=False):
    return decide_after_failure(
        error(),
        strategy,
        tries=tries,
        tries_max=10,
        home_tries=3,
        doubtful=doubtful,
        leaving=leaving,
        gone=gone,
    )


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.parametrize("tries", [1, 3, 10, 1_000_000])
def test_strict_stays_for_ever(error, tries):
    """STRICT sends what may pass later to the same partition again, however often."""
    assert decide(error, STRICT, tries) is Step.AGAIN


@pytest.mark.parametrize("error", PASSING)
def test_best_tried_goes_elsewhere_then_gives_up(error):
    """BEST_TRIED tries at home, then elsewhere, and is out of the queue after ten tries."""
    steps = [decide(error, BEST_TRIED, tries) for tries in range(1, 11)]
    assert steps == [Step.AGAIN] * 2 + [Step.ELSEWHERE] * 7 + [Step.GIVE_UP]


@pytest.mark.parametrize("error", [StaleRouteError, PartitionUnknownError])
@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_a_sealed_partition_asks_for_a_new_route(error, strategy):
    """Only a route change moves messages of either strategy without a word."""
    assert decide(error, strategy, 1) is Step.NEW_ROUTE


@pytest.mark.parametrize("error", PASSING)
def test_what_cannot_be_stored_leaves_a_sealed_partition_whatever_its_broker_says(error):
    """Only what may be stored waits for the broker of a partition that the route has left."""
    for strategy in (STRICT, BEST_TRIED):
        assert decide(error, strategy, 1, leaving=True) is Step.NEW_ROUTE
        assert decide(error, strategy, 1, leaving=True, doubtful=True) is Step.AGAIN
    assert decide(error, BEST_TRIED, 10, leaving=True) is Step.GIVE_UP


@pytest.mark.parametrize("error", [PartitionUnknownError, WrongBrokerError])
def test_a_wrong_broker_does_not_number_anew_what_may_be_stored(error):
    """Only the right broker knows a batch sent again; where the partition is gone for good, nobody does."""
    assert decide(error, STRICT, 1_000, doubtful=True) is Step.AGAIN
    assert decide(error, STRICT, 1, doubtful=True, gone=True) is Step.GIVE_UP
    assert decide(error, STRICT, 1, gone=True) is Step.NEW_ROUTE
    steps = [decide(error, BEST_TRIED, tries, doubtful=True) for tries in (1, 3, 10)]
    assert steps == [Step.AGAIN, Step.ELSEWHERE, Step.GIVE_UP]
    assert decide(StaleRouteError, STRICT, 1, doubtful=True) is Step.NEW_ROUTE


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_what_no_retry_mends_is_given_up(strategy):
    """A refusal for good is told to the sender at once."""
    assert decide(InvalidRequestError, strategy, 1) is Step.GIVE_UP


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_a_shared_id_is_given_up_and_not_the_batch(strategy):
    """A batch that is surely not stored is sent again, under another id; nobody would know again one that may be."""
    for error in (SequenceReusedError, ProducerFencedError):
        assert decide(error, strategy, 1) is Step.AGAIN
    assert decide(ProducerFencedError, strategy, 1, doubtful=True) is Step.GIVE_UP
    assert decide(SequenceReusedError, strategy, 1, doubtful=True) is Step.AGAIN
