"""The decision after a failed batch."""

import pytest

from keylane.producer.failure import Step, decide_after_failure, decide_wait_stage
from keylane.producer.settings import ProducerSettings
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    ConnectionQuotaError,
    DiskFullError,
    FlushFailedError,
    InvalidRequestError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    ProducerFencedError,
    QuotaExceededError,
    SequenceGapError,
    SequenceReusedError,
    StaleRouteError,
    UnpackError,
    WrongBrokerError,
)

STRICT, BEST_TRIED = False, True
"""Whether messages may leave their partition."""
SETTINGS = ProducerSettings(leave_after_ms=5_000, give_up_after_ms=60_000, tries_min=10)
PASSING = [
    NotSentError,
    OutcomeUnknownError,
    BrokerReadOnlyError,
    OverloadedError,
    SequenceGapError,
    DiskFullError,
    FlushFailedError,
    QuotaExceededError,
    ConnectionQuotaError,
]


def decide(
    error,
    may_reroute_keys,
    *,
    tries=1,
    failing_ms=0,
    waited_ms=0,
    doubtful=False,
    closed=False,
    unrecoverable=False,
):
    stage = decide_wait_stage(
        SETTINGS,
        may_reroute_keys=may_reroute_keys,
        tries=tries,
        waited_ms=max(waited_ms, failing_ms),
        failing_ms=failing_ms,
    )
    return decide_after_failure(
        error(), stage, doubtful=doubtful, closed=closed, unrecoverable=unrecoverable
    )


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.parametrize("tries", [1, 3, 10, 1_000_000])
def test_strict_stays_at_its_partition_when_errors_may_pass(error, tries):
    """STRICT sends a batch to the same partition again after errors that may pass, without any
    limit.
    """
    assert decide(error, STRICT, tries=tries, failing_ms=tries * 1_000) is Step.RETRY


@pytest.mark.parametrize("error", PASSING)
def test_best_tried_leaves_by_time_and_not_by_tries(error):
    """BEST_TRIED stays for `leave_after_ms`, however often it failed, and then goes elsewhere."""
    assert decide(error, BEST_TRIED, tries=1_000, failing_ms=4_999) is Step.RETRY
    assert decide(error, BEST_TRIED, tries=1, failing_ms=5_000) is Step.REROUTE


@pytest.mark.parametrize("error", PASSING)
def test_best_tried_gives_up_after_its_time_and_its_tries(error):
    """A batch is given up after `give_up_after_ms`, if it was tried often enough as well."""
    steps = [
        decide(error, BEST_TRIED, tries=tries, failing_ms=5_000, waited_ms=waited_ms)
        for tries, waited_ms in ((10, 59_999), (9, 60_000), (10, 60_000))
    ]
    assert steps == [Step.REROUTE, Step.REROUTE, Step.GIVE_UP]


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_batch_is_given_up_when_it_does_not_unpack(strategy):
    """It is kept as it was packed, so that it would be refused for ever."""
    assert decide(UnpackError, strategy) is Step.GIVE_UP


@pytest.mark.parametrize("error", [StaleRouteError, PartitionUnknownError])
@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_sealed_partition_asks_for_a_new_route(error, strategy):
    """Under both strategies a route change moves messages without declaring them reordered."""
    assert decide(error, strategy, failing_ms=30_000) is Step.NEW_ROUTE


@pytest.mark.parametrize("error", PASSING)
def test_batch_that_is_not_stored_leaves_when_the_route_has_left_its_partition(error):
    """Only a doubtful batch waits for the broker of a partition that the route has left."""
    for strategy in (STRICT, BEST_TRIED):
        assert decide(error, strategy, closed=True) is Step.NEW_ROUTE
        assert decide(error, strategy, closed=True, doubtful=True) is Step.RETRY
    exhausted = {"tries": 10, "failing_ms": 60_000, "closed": True}
    assert decide(error, BEST_TRIED, **exhausted) is Step.GIVE_UP
    due = {"failing_ms": 5_000, "closed": True, "doubtful": True}
    assert decide(error, STRICT, **due) is Step.RETRY
    assert decide(error, BEST_TRIED, **due) is Step.NEW_ROUTE


@pytest.mark.parametrize("error", [PartitionUnknownError, WrongBrokerError])
def test_doubtful_batch_stays_when_a_wrong_broker_refuses_it(error):
    """Only the right broker recognizes a repeated batch; when the partition is gone for good, no
    broker does.
    """
    assert decide(error, STRICT, tries=1_000, doubtful=True) is Step.RETRY
    assert decide(error, STRICT, doubtful=True, unrecoverable=True) is Step.GIVE_UP
    assert decide(error, STRICT, unrecoverable=True) is Step.NEW_ROUTE
    steps = [
        decide(error, BEST_TRIED, tries=10, failing_ms=ms, doubtful=True)
        for ms in (0, 5_000, 60_000)
    ]
    assert steps == [Step.RETRY, Step.REROUTE, Step.GIVE_UP]
    assert decide(StaleRouteError, STRICT, doubtful=True) is Step.NEW_ROUTE


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_batch_is_given_up_when_no_retry_mends_it(strategy):
    """A refusal that no retry mends ends the batch at once."""
    assert decide(InvalidRequestError, strategy) is Step.GIVE_UP


@pytest.mark.parametrize("strategy", [STRICT, BEST_TRIED])
def test_batch_is_sent_again_when_its_producer_id_is_shared(strategy):
    """A batch that is not stored is sent again under another id; no broker would recognize a
    doubtful one.
    """
    for error in (SequenceReusedError, ProducerFencedError):
        assert decide(error, strategy) is Step.RETRY
    assert decide(ProducerFencedError, strategy, doubtful=True) is Step.GIVE_UP
    assert decide(SequenceReusedError, strategy, doubtful=True) is Step.RETRY
