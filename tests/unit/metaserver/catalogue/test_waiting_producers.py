"""Producers that wait for brokers are remembered while they say so."""

from __future__ import annotations

import json

import pytest

from keylane.metaserver.catalogue.recent import KEPT_MS, REMEMBERED_MAX
from keylane.metaserver.catalogue.waiting_producers import (
    WaitingProducers,
)
from keylane.protocol.errors import InvalidRequestError
from support.raising import raises


class SetTime:
    now_ms = 0.0


def told(client: str, *, waiting_ms: int = 500, broker_group: str = "g1") -> str:
    wait = {
        "client": client,
        "broker_group": broker_group,
        "messages": 3,
        "waiting_ms": waiting_ms,
        "reason": "connection refused",
    }
    return json.dumps([wait])


@pytest.fixture
def times() -> SetTime:
    return SetTime()


@pytest.fixture
def producers(times: SetTime) -> WaitingProducers:
    return WaitingProducers(lambda: times.now_ms)


def test_producers_of_a_subject_are_told_those_that_have_waited_longest_first(
    producers: WaitingProducers,
):
    producers.note("orders", told("a"))
    producers.note("orders", told("b", waiting_ms=900))
    producers.note("others", told("c"))
    assert [each.client for each in producers.of("orders")] == ["b", "a"]


def test_producer_replaces_what_it_told_before(producers: WaitingProducers):
    producers.note("orders", told("a"))
    producers.note("orders", told("a", waiting_ms=1_000))
    assert [each.waiting_ms for each in producers.of("orders")] == [1_000]


def test_producer_is_forgotten_when_it_no_longer_says_that_it_waits(
    producers: WaitingProducers, times: SetTime
):
    producers.note("orders", told("a"))
    times.now_ms = KEPT_MS - 1
    producers.note("orders", told("b"))
    assert len(producers.of("orders")) == 2
    times.now_ms = KEPT_MS + 1
    assert [each.client for each in producers.of("orders")] == ["b"]


def test_oldest_waits_are_forgotten_over_the_limit(producers: WaitingProducers):
    for number in range(REMEMBERED_MAX + 5):
        producers.note("orders", told(f"p{number}"))
    clients = {each.client for each in producers.of("orders")}
    assert len(clients) == REMEMBERED_MAX
    assert "p4" not in clients


@pytest.mark.parametrize(
    "text", ["", "{", "[{}]", '[{"client": 1}]', json.dumps([{"client": "x" * 600}])]
)
def test_text_that_is_no_list_of_waits_is_refused(producers: WaitingProducers, text: str):
    with raises(InvalidRequestError):
        producers.note("orders", text)
    assert producers.of("orders") == ()
