"""Rates of partitions over a current and a previous window."""

from keylane.broker.store.rates import WINDOW_MS, Rates


def test_rate_is_the_average_since_the_start_in_the_first_window():
    rates = Rates(1_000)
    rates.count(7, messages=100, size_bytes=2_000, now_ms=3_000)
    rates.count(7, messages=100, size_bytes=2_000, now_ms=11_000)
    assert rates.rate(7, 11_000) == (20, 400)
    assert rates.rate(8, 11_000) == (0, 0)


def test_rate_is_taken_over_a_second_at_least_when_the_broker_has_just_started():
    rates = Rates(0)
    rates.count(7, messages=10, size_bytes=50, now_ms=1)
    assert rates.rate(7, 2) == (10, 50)


def test_rate_includes_the_previous_window_when_a_new_one_begins():
    rates = Rates(0)
    rates.count(7, messages=60, size_bytes=600, now_ms=WINDOW_MS - 1)
    assert rates.rate(7, WINDOW_MS) == (2, 20)
    rates.count(7, messages=30, size_bytes=300, now_ms=WINDOW_MS + 15_000)
    assert rates.rate(7, WINDOW_MS + 15_000) == (2, 20)


def test_rate_falls_to_zero_when_two_windows_pass_without_messages():
    rates = Rates(0)
    rates.count(7, messages=60, size_bytes=600, now_ms=10)
    assert rates.rate(7, WINDOW_MS + 10).messages_per_s > 0
    assert rates.rate(7, 2 * WINDOW_MS + 20) == (0, 0)


def test_rate_is_zero_when_the_broker_was_idle_for_long():
    rates = Rates(0)
    rates.count(7, messages=60, size_bytes=600, now_ms=10)
    assert rates.rate(7, 100 * WINDOW_MS) == (0, 0)


def test_partition_takes_no_memory_when_it_stores_nothing_in_two_windows():
    rates = Rates(0)
    for partition_id in range(1_000):
        rates.count(partition_id, messages=1, size_bytes=1, now_ms=0)
    for round_number in (1, 2):
        rates.count(0, messages=1, size_bytes=1, now_ms=round_number * WINDOW_MS)
    assert set(rates._current) | set(rates._previous) == {0}
