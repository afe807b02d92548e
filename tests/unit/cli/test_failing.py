"""What people read about a message that holds a group up."""

from keylane.cli.failing import failing_lines
from keylane.protocol.parked import Failure, failing_message, hanging_failure


def test_lines_name_what_fails_and_what_can_be_done():
    """Partition, offset, digest of the key, since when, why, tries; the three ways out, with the
    command.
    """
    failure = Failure("ValueError", "no\ntown", "host-1", 9_000, 12)
    failing = failing_message(4, failure, key_digest="key digest 1", since_ms=1_000)
    what, advice = failing_lines("orders", "billing", 7, failing)
    assert what == (
        "partition 7: billing fails at offset 4, key digest 1, since "
        "1970-01-01T00:00:01.000+00:00: "
        "ValueError: no\\ntown (12 tries, last at 1970-01-01T00:00:09.000+00:00, consumer host-1)"
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
    what, advice = failing_lines("orders", "billing", 7, failing)
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
    what, advice = failing_lines("orders", "billing", 7, redriven)
    assert "billing waits at parked offset 4 of partition 3" in what
    assert "keylane parked skip orders billing --key KEY" in advice
