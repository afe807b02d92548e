"""Token buckets hold a rate per principal, and never cost a lease."""

from __future__ import annotations

import pytest

from keylane.protocol.access.quota import (
    BYTES_PER_S_MIN,
    MAX,
    Quota,
    check_quota,
    matching_limits,
    subject_limit,
)
from keylane.protocol.errors import ConnectionQuotaError, InvalidRequestError
from keylane.rpc.access.pacing import (
    KNOWN_MAX,
    NO_DELAY,
    NOT_LIMITED,
    PAUSE_MS,
    Delay,
    Pacing,
    TokenBucket,
)
from support.raising import raises

QUOTA = Quota(bytes_per_s=1_000_000, requests_per_s=100, connections=2)


def test_bucket_lets_a_second_through_at_once_and_then_the_rate():
    bucket = TokenBucket(1_000, 0)
    sent, now_ms = 0, 0.0
    while now_ms < 10_000:
        wait_ms = bucket.debt_ms(now_ms)
        now_ms += wait_ms
        bucket.consume(100, now_ms)
        sent += 100
    assert 10_500 <= sent <= 11_200


def test_bucket_never_holds_more_than_a_second_of_its_rate():
    bucket = TokenBucket(1_000, 0)
    bucket.consume(0, 3_600_000)
    bucket.consume(3_000, 3_600_000)
    assert bucket.debt_ms(3_600_000) == pytest.approx(2_000)
    assert bucket.debt_ms(3_599_000) == pytest.approx(2_000)  # a clock that goes back gives nothing


def test_connections_of_a_principal_share_its_rate():
    """Each call waits for the debt of those before it."""
    pacing = Pacing()
    waits = []
    for _ in range(5):
        waits.append(pacing.delay("shop", QUOTA, 0).ms)
        pacing.consume("shop", QUOTA, 0, size=1_000_000)
    assert waits == pytest.approx([0, 0, 1_000, 2_000, 3_000])


def test_debt_of_a_principal_is_not_that_of_another():
    pacing = Pacing()
    pacing.consume("greedy", QUOTA, 0, size=100_000_000, requests=10_000)
    assert pacing.delay("greedy", QUOTA, 0).ms == pytest.approx(99_000)
    assert pacing.delay("modest", QUOTA, 0).ms == 0


def test_delay_names_the_limit_that_is_used_up():
    pacing = Pacing()
    pacing.consume("shop", QUOTA, 0, requests=300)
    assert pacing.delay("shop", QUOTA, 0) == (pytest.approx(2_000), "requests of principal 'shop'")
    pacing.consume("shop", QUOTA, 0, size=5_000_000, requests=0)
    assert pacing.delay("shop", QUOTA, 0).limit == "bytes of principal 'shop'"
    pacing.consume("shop", QUOTA, 0, size=900, requests=0, subject="s", subject_rate=100)
    told = pacing.delay("shop", QUOTA, 0, subject="s", subject_rate=100)
    assert told == (pytest.approx(8_000), "bytes of subject 's'")


def test_new_quota_begins_without_debt():
    pacing = Pacing()
    pacing.consume("shop", QUOTA, 0, size=50_000_000)
    assert pacing.delay("shop", Quota(bytes_per_s=2_000_000), 0).ms == 0


def test_connections_are_counted_until_they_end():
    pacing = Pacing()
    for _ in range(2):
        pacing.add_connection("shop", QUOTA)
    with raises(ConnectionQuotaError) as refused:
        pacing.add_connection("shop", QUOTA)
    assert refused.value.retry_after_ms
    pacing.add_connection("other", QUOTA)
    pacing.remove_connection("shop")
    pacing.add_connection("shop", QUOTA)
    for name in ("shop", "shop", "other"):
        pacing.remove_connection(name)
    assert not pacing.connections


def test_memory_is_bounded_by_the_number_of_principals():
    pacing = Pacing()
    for number in range(KNOWN_MAX + 100):
        pacing.consume(f"p{number}", QUOTA, 0, subject=f"s{number}", subject_rate=1, size=1)
        pacing.record_wait(f"p{number}", NO_DELAY._replace(ms=5.0))
    assert len(pacing._principals) == KNOWN_MAX


@pytest.mark.parametrize(
    "quota",
    [
        Quota(),
        Quota(bytes_per_s=1),
        Quota(bytes_per_s=-1),
        Quota(bytes_per_s=MAX + 1),
        Quota(requests_per_s=-5),
        Quota(connections=MAX * 2),
    ],
)
def test_quota_that_cannot_be_is_refused(quota: Quota):
    with pytest.raises(InvalidRequestError):
        check_quota(quota)


def test_limit_of_a_subject_is_its_own_or_of_the_longest_pattern():
    limits = {"a.*": 1, "a.b.*": 2, "a.b.c": 3, "*": 4}
    names = ("a.b.c", "a.b.d", "a.x", "ab", "b")
    assert [subject_limit(name, limits) for name in names] == [3, 2, 1, 4, 4]
    assert subject_limit("ab", {"a.*": 1}) == 0
    assert check_quota(Quota(bytes_per_s=BYTES_PER_S_MIN))


def test_every_pattern_that_means_a_subject_counts_it():
    limits = {"shop.*": 5, "shop.eu.*": 2, "shop.eu.a": 1, "*": 9, "sho": 3, "Shop.*": 4, "s*": 0}
    assert matching_limits("shop.eu.a", limits) == [
        ("shop.*", 5),
        ("shop.eu.*", 2),
        ("shop.eu.a", 1),
        ("*", 9),
    ]


def test_call_about_a_subject_is_limited_until_its_wait_has_passed():
    pacing = Pacing()
    assert pacing.limited("orders", 0) == NOT_LIMITED
    pacing.note_limited("orders", Delay(400, "bytes of principal 'shop'"), 100)
    assert pacing.limited("orders", 200) == ("bytes of principal 'shop'", 300, 100)
    assert pacing.limited("orders", 500) == NOT_LIMITED
    assert pacing.limited("others", 200) == NOT_LIMITED


def test_calls_wait_for_a_limit_since_the_first_of_them_without_a_long_pause():
    pacing = Pacing()
    for now_ms in (0, 1_000, 1_000 + PAUSE_MS):
        pacing.note_limited("orders", Delay(400, "bytes"), now_ms)
    assert pacing.limited("orders", 1_100 + PAUSE_MS).for_ms == 1_100 + PAUSE_MS
    later_ms = 1_000 + 2 * PAUSE_MS + 500
    pacing.note_limited("orders", Delay(400, "bytes"), later_ms)
    assert pacing.limited("orders", later_ms + 100).for_ms == 100
    pacing.note_limited("orders", Delay(400, "requests"), later_ms + 200)
    assert pacing.limited("orders", later_ms + 300) == ("requests", 300, 100)


def test_limited_subjects_are_remembered_up_to_a_limit():
    pacing = Pacing()
    for number in range(KNOWN_MAX + 3):
        pacing.note_limited(f"s{number}", Delay(400, "bytes"), 0)
    assert pacing.limited("s2", 0) == NOT_LIMITED
    assert pacing.limited("s3", 0).left_ms == 400
