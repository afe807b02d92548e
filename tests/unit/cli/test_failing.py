"""What people read about a message that holds a group up."""

import pytest
from msgspec.structs import replace

from keylane.cli.failing import failing_lines
from keylane.protocol.groups import FailurePolicy, GroupPolicy
from keylane.protocol.parked import Failure, failing_message, hanging_failure


def test_lines_name_what_fails_and_what_can_be_done():
    """Partition, offset, digest of the key, since when, why, tries; the three ways out, with the
    command.
    """
    failure = Failure("ValueError", "no\ntown", "host-1", 9_000, 12)
    failing = failing_message(4, failure, key_digest="key digest 1", since_ms=1_000)
    what, shown_by, advice = failing_lines("orders", "billing", 7, failing)
    assert what == (
        "partition 7: billing fails at offset 4, key digest 1, since "
        "1970-01-01T00:00:01.000+00:00: "
        "ValueError: no\\ntown (12 tries, last at 1970-01-01T00:00:09.000+00:00, consumer host-1)"
    )
    several = replace(failing, others_count=3)
    assert failing_lines("orders", "billing", 7, several)[0].endswith(
        "; 3 more messages of it fail too"
    )
    assert shown_by == (
        "  the message with its key: keylane read orders --partition 7 --from 4 -n 1"
    )
    assert "keylane group set orders billing --on-failure park" in advice
    assert "--on-failure dead" in advice
    assert advice.endswith("keylane group reset orders billing --partition 7 --to 5 --live")


def test_lines_name_a_handler_that_does_not_return():
    """For how long, and that no policy counts before it does."""
    running = hanging_failure(
        "its handler has not returned", client="host-1", at_ms=46_000, attempts=2
    )
    failing = failing_message(
        4, running, key_digest="key digest 1", since_ms=1_000, running_ms=45_000
    )
    what, shown_by, advice = failing_lines("orders", "billing", 7, failing)
    assert what == (
        "partition 7: billing waits at offset 4, key digest 1, since "
        "1970-01-01T00:00:01.000+00:00: "
        "its handler has not returned for 45 s (2 tries failed before, seen last at "
        "1970-01-01T00:00:46.000+00:00, consumer host-1)"
    )
    assert "no policy applies before it has ended" in advice
    assert advice.endswith("keylane group reset orders billing --partition 7 --to 5 --live")
    redriven = failing_message(
        4, running, key_digest="key digest 1", since_ms=1_000, source=3, running_ms=45_000
    )
    what, shown_by, advice = failing_lines("orders", "billing", 7, redriven)
    assert "billing waits at parked offset 4 of partition 3" in what
    assert "--partition 3 --from 4" in shown_by
    assert "keylane parked skip orders billing --key KEY" in advice


@pytest.mark.parametrize(
    ("on_failure", "tries_max", "owned", "words"),
    [
        ("park", 5, True, "  at its next failed try, the stored policy park sets its key aside"),
        ("park", 50, True, "  after 50 failed tries, the stored policy park sets its key aside"),
        ("park", 5, False, "  no consumer has the partition: once one does, at its next failed"),
        ("dead", None, True, "  after as many failed tries as its consumer allows, the stored pol"),
        ("block", 5, False, "  keylane group set orders billing --on-failure park sets its key as"),
        (None, 5, True, "  keylane group set orders billing --on-failure park sets its key aside"),
    ],
)
def test_advice_does_not_repeat_what_is_stored(on_failure, tries_max, owned, words):
    """It says when the stored policy applies, and what that waits for."""
    failing = failing_message(
        4, Failure("ValueError", "", "host-1", 9_000, 12), key_digest="key digest 1", since_ms=1_000
    )
    policy = GroupPolicy(
        on_failure=None if on_failure is None else FailurePolicy(on_failure), tries_max=tries_max
    )
    advice = failing_lines("orders", "billing", 7, failing, policy=policy, owned=owned)[-1]
    assert advice.startswith(words)
    assert ("keylane group set" in advice) is (on_failure in {None, "block"})
    assert advice.endswith("keylane group reset orders billing --partition 7 --to 5 --live")


def test_advice_says_that_a_retry_is_never_the_last_try():
    """A handler that asks again and again would wait for a policy that never applies."""
    failing = failing_message(
        4, Failure("Retry", "", "host-1", 9_000, 12), key_digest="key digest 1", since_ms=1_000
    )
    policy = GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=5)
    advice = failing_lines("orders", "billing", 7, failing, policy=policy)[-1]
    assert advice.startswith(
        "  once its handler raises another error (Retry and NACK always get another try), the "
        "stored policy park sets its key aside"
    )


def test_advice_on_a_redriven_message_does_not_repeat_what_is_stored():
    failing = failing_message(
        4,
        Failure("ValueError", "", "host-1", 9_000, 2),
        key_digest="key digest 1",
        since_ms=1_000,
        source=3,
    )
    assert "park it again (keylane group set" in failing_lines("orders", "g", 7, failing)[-1]
    policy = GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=5)
    advice = failing_lines("orders", "g", 7, failing, policy=policy)[-1]
    assert "wait: after 5 failed tries, the stored policy park sets its key aside" in advice
