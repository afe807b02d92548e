"""Routes of subjects whose rows wait."""

from __future__ import annotations

import logging
import random
from typing import Any, cast

from msgspec.structs import replace

from keylane.outbox import routes as module
from keylane.outbox.routes import MISSING_PAUSE_MS_MAX, OutboxRoutes, RouteState
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    KeylaneError,
    SubjectDeletedError,
    SubjectUnknownError,
    UnreachableError,
)
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route

PARTITION = Partition(
    partition_id=1,
    name="p",
    queue=0,
    range_start=0,
    range_end=1024,
    broker_group="g",
    state=PartitionState.OPEN,
)
ROUTE = Route(subject="s", version=1, order_strategy=OrderStrategy.STRICT, partitions=(PARTITION,))


class Meta:
    """A metaserver that answers with what it is given, in turn."""

    def __init__(self, *answers: Route | KeylaneError) -> None:
        self.answers = list(answers)

    async def route_to_send(self, _subject: str, **_more: Any) -> Route:
        answer = self.answers.pop(0)
        if isinstance(answer, KeylaneError):
            raise answer
        return answer


def pauses_ms(known: RouteState) -> list[int]:
    return [known.pause_ms(attempt, Backoff(), random.Random(7)) for attempt in range(1, 30)]


async def test_missing_subject_is_asked_for_ever_less_often_and_said_once_until_it_appears(caplog):
    """A row whose subject is never created asked each metaserver every 2 s, with a line each
    time.
    """
    caplog.set_level(logging.INFO, logger="keylane.outbox")
    missing = SubjectUnknownError(subject="s")
    meta: Any = Meta(*[missing] * 20, UnreachableError("gone"), missing, ROUTE)
    routes = OutboxRoutes(meta)
    longest: list[int] = []
    for attempt in range(1, 21):
        known = await routes.fetch("s", ())
        longest.append(known.pause_ms(attempt, Backoff(), random.Random(7)))
    assert MISSING_PAUSE_MS_MAX / 2 <= max(longest) <= MISSING_PAUSE_MS_MAX
    assert max(longest[:5]) <= 800  # a subject that is created soon is found soon
    (line,) = caplog.records
    assert line.getMessage() == f"rows of subject s wait to be sent: {missing.message}"
    assert line.levelname == "WARNING"
    assert max(pauses_ms(await routes.fetch("s", ()))) <= 2_000  # no answer says nothing of it
    assert (await routes.fetch("s", ())).not_found_count
    known = await routes.fetch("s", ())
    assert (known.problem, known.not_found_count) == ("", 0)
    assert max(pauses_ms(known)) <= 2_000


def test_pause_for_a_missing_subject_is_the_longer_one_that_is_set():
    """A program that waits longer for all is not made to ask more often."""
    slow = Backoff(max_ms=600_000)
    known = RouteState(not_found_count=30)
    assert known.pause_ms(30, slow, random.Random(7)) > MISSING_PAUSE_MS_MAX


async def test_pause_is_a_short_one_when_a_subject_is_missing_after_many_questions_without_an_answer():
    """The metaservers were away for long, and come back with a database that is being rebuilt."""
    routes = OutboxRoutes(cast(Any, Meta(SubjectUnknownError(subject="s"))))
    known = await routes.fetch("s", ())
    assert known.pause_ms(100, Backoff(), random.Random(7)) <= 50


async def test_pauses_are_those_of_a_failing_call_when_a_subject_that_was_missing_has_an_older_route():
    """There is a subject again, though what is known of it is newer."""
    older, missing = replace(ROUTE, version=0), SubjectUnknownError(subject="s")
    routes = OutboxRoutes(cast(Any, Meta(ROUTE, *[missing] * 20, older)))
    for _ in range(22):
        known = await routes.fetch("s", ())
    assert known.problem
    assert max(pauses_ms(known)) <= 2_000


async def test_deleted_subjects_are_known_by_name_up_to_a_bound(monkeypatch):
    """A program that names a subject for each order kept the names of all that were deleted."""
    monkeypatch.setattr(module, "DELETED_KNOWN_MAX", 5)
    meta: Any = Meta(*[SubjectDeletedError()] * 50, SubjectUnknownError())
    routes = OutboxRoutes(meta)
    for number in range(50):
        await routes.fetch(f"s{number}", ())
    assert len(routes._deleted) == 5
    known = await routes.fetch("s49", (1,))
    assert isinstance(known.gone[1], SubjectDeletedError)
